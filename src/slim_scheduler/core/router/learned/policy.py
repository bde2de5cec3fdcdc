"""The policy networks of eq. 3 in NumPy, forward only: what a router needs, without torch.

`training/policy.py` has the same two networks in torch; the names of the parameters are the same, and a test compares
the outputs. Heads are logits; what may be chosen, and how, is the router's business.
"""

from collections.abc import Mapping
from math import exp
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from slim_scheduler.core.router.learned.observation import Flags, Floats, Observation

MASKED = -1e9  # a logit that no softmax sees


class NetworkSizes(msgspec.Struct, frozen=True):
    """What fixes every parameter's shape. `servers` is the fixed number of a `paper` network, None for `extended`."""

    kind: str
    shared: int
    server: int
    servers: int | None
    widths: int
    groups: int
    hidden: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters: matrices are (in, out), as in `x @ w`."""
        h, w, g = self.hidden, self.widths, self.groups
        heads = {"width.weight": (h, w), "width.bias": (w,), "group.weight": (h, g), "group.bias": (g,)}
        value = {"value.weight": (h, 1), "value.bias": (1,)}
        if self.kind == "paper":
            n = self.servers or 0
            body = {"first.weight": (self.shared, h), "first.bias": (h,), "second.weight": (h, h), "second.bias": (h,)}
            return {**body, "server.weight": (h, n), "server.bias": (n,), **heads, **value}
        return {
            "row.weight": (self.server, h),  # of the server's own figures
            "row_shared.weight": (self.shared, h),
            "row.bias": (h,),
            "second.weight": (h, h),
            "second.bias": (h,),
            "context.weight": (2 * h + self.shared, h),  # of mean and maximum over servers, and the shared figures
            "context.bias": (h,),
            "score.weight": (h, h),
            "score_context.weight": (h, h),
            "score.bias": (h,),
            "server.weight": (h, 1),
            "choice.weight": (2 * h, h),  # of the server that is likely to be chosen, and the context
            "choice.bias": (h,),
            **heads,
            **value,
        }


class Heads(NamedTuple):
    """Logits of the three heads, and the value of the state."""

    server: Floats  # (N,)
    width: Floats  # (W,)
    group: Floats  # (G,)
    value: float


class Network(Protocol):
    def forward(self, observation: Observation) -> Heads: ...


class PaperNetwork:
    """One MLP; its last layer gives the logits of each head and the value (eq. 3)."""

    def __init__(self, parameters: Mapping[str, Floats]) -> None:
        p = parameters
        self._first = p["first.weight"], p["first.bias"]
        self._second = p["second.weight"], p["second.bias"]
        names = ("server", "width", "group", "value")
        self._heads = np.concatenate([p[f"{n}.weight"] for n in names], axis=1)  # one product for all heads
        self._bias = np.concatenate([p[f"{n}.bias"] for n in names])
        self._ends = np.cumsum([p[f"{n}.bias"].size for n in names]).tolist()

    def forward(self, observation: Observation) -> Heads:
        w, b = self._first
        hidden = np.tanh(observation.shared.dot(w) + b)
        w, b = self._second
        hidden = np.tanh(hidden.dot(w) + b)
        out = hidden.dot(self._heads) + self._bias
        servers, widths, groups, _ = self._ends
        return Heads(out[:servers], out[servers:widths], out[widths:groups], float(out[groups]))


class ExtendedNetwork:
    """Every server's row through the same weights; pooled, they are the context of all heads.

    The width and group heads also see the rows weighted by the server head's probabilities: where the block is likely
    to go. The policy stays the product of three softmaxes (eq. 4).
    """

    def __init__(self, parameters: Mapping[str, Floats]) -> None:
        # What has the same input is one product: a decision of so few figures is all calls. (`dot` costs half of `@`.)
        p = parameters
        h = self._hidden = p["second.bias"].size
        context, choice = p["context.weight"], p["choice.weight"]
        self._shared = _beside(p["row_shared.weight"], context[2 * h :])  # (shared, 2H)
        self._shared_bias = _beside(p["row.bias"], p["context.bias"])
        self._row = p["row.weight"]
        self._second = p["second.weight"], p["second.bias"]
        self._pooled = context[: 2 * h]
        self._rows = _beside(p["score.weight"], choice[:h])  # (H, 2H)
        self._context = _beside(p["score_context.weight"], choice[h:], p["value.weight"])  # (H, 2H + 1)
        self._context_bias = _beside(p["score.bias"], p["choice.bias"], p["value.bias"])
        self._score = p["server.weight"][:, 0]
        self._choices = _beside(p["width.weight"], p["group.weight"])
        self._choices_bias = _beside(p["width.bias"], p["group.bias"])
        self._widths = p["width.bias"].size

    def forward(self, observation: Observation) -> Heads:
        h = self._hidden
        shared = observation.shared.dot(self._shared) + self._shared_bias
        rows = observation.servers.dot(self._row) + shared[:h]  # (N, H)
        np.tanh(rows, out=rows)
        weight, bias = self._second
        rows = rows.dot(weight) + bias
        np.tanh(rows, out=rows)
        pooled = np.concatenate((np.add.reduce(rows) / len(rows), np.maximum.reduce(rows)))
        context = np.tanh(pooled.dot(self._pooled) + shared[h:])
        of_context = context.dot(self._context) + self._context_bias
        of_rows = rows.dot(self._rows)
        scores = np.tanh(of_rows[:, :h] + of_context[:h])
        server = scores.dot(self._score)  # (N,)
        likely = softmax(server, observation.server_mask).dot(of_rows[:, h:])
        out = np.tanh(likely + of_context[h:-1]).dot(self._choices) + self._choices_bias
        return Heads(server, out[: self._widths], out[self._widths :], float(of_context[-1]))


def build_network(kind: str, parameters: Mapping[str, Floats]) -> Network:
    return PaperNetwork(parameters) if kind == "paper" else ExtendedNetwork(parameters)


def softmax(logits: Floats, mask: Flags) -> Floats:
    """Probabilities of what the mask leaves; the others have none."""
    seen = masked(logits, mask)
    highest = max(seen)
    weights = [exp(logit - highest) for logit in seen]
    total = sum(weights)
    return np.array([weight / total for weight in weights], np.float32)


def masked(logits: Floats, mask: Flags) -> list[float]:
    """The logits of what the mask leaves, and `MASKED` for the others."""
    return [logit if may else MASKED for logit, may in zip(logits.tolist(), mask.tolist(), strict=True)]


def _beside(*parts: Floats) -> Floats:
    return np.concatenate(parts, axis=-1)
