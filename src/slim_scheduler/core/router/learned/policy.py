"""The policy networks of eq. 3 in NumPy, forward only: what a router needs, without torch.

`training/policy.py` has the same two networks in torch; the names of the parameters are the same, and a test compares
the outputs. Heads are logits; what may be chosen, and how, is the router's business.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from slim_scheduler.core.router.learned.observation import Flags, Floats, Observation

MASKED = np.float32(-1e9)  # a logit that no softmax sees


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
        hidden = np.tanh(observation.shared @ w + b)
        w, b = self._second
        hidden = np.tanh(hidden @ w + b)
        out = hidden @ self._heads + self._bias
        servers, widths, groups, _ = self._ends
        return Heads(out[:servers], out[servers:widths], out[widths:groups], float(out[groups]))


class ExtendedNetwork:
    """Every server's row through the same weights; pooled, they are the context of all heads.

    The width and group heads also see the rows weighted by the server head's probabilities: where the block is likely
    to go. The policy stays the product of three softmaxes (eq. 4).
    """

    def __init__(self, parameters: Mapping[str, Floats]) -> None:
        p = self._p = dict(parameters)
        self._choices = np.concatenate([p["width.weight"], p["group.weight"]], axis=1)
        self._choices_bias = np.concatenate([p["width.bias"], p["group.bias"]])
        self._widths = p["width.bias"].size
        self._value = p["value.weight"][:, 0], float(p["value.bias"][0])
        self._score = p["server.weight"][:, 0]

    def forward(self, observation: Observation) -> Heads:
        p, shared = self._p, observation.shared
        rows = np.tanh(
            observation.servers @ p["row.weight"] + (shared @ p["row_shared.weight"] + p["row.bias"])
        )  # (N, H)
        rows = np.tanh(rows @ p["second.weight"] + p["second.bias"])
        pooled = np.concatenate((np.add.reduce(rows) / len(rows), np.maximum.reduce(rows), shared))
        context = np.tanh(pooled @ p["context.weight"] + p["context.bias"])
        scores = np.tanh(rows @ p["score.weight"] + (context @ p["score_context.weight"] + p["score.bias"]))
        server = scores @ self._score  # (N,)
        likely = softmax(server, observation.server_mask) @ rows
        choice = np.tanh(np.concatenate((likely, context)) @ p["choice.weight"] + p["choice.bias"])
        out = choice @ self._choices + self._choices_bias
        weight, bias = self._value
        return Heads(server, out[: self._widths], out[self._widths :], float(context @ weight) + bias)


def build_network(kind: str, parameters: Mapping[str, Floats]) -> Network:
    return PaperNetwork(parameters) if kind == "paper" else ExtendedNetwork(parameters)


def softmax(logits: Floats, mask: Flags) -> Floats:
    """Probabilities of what the mask leaves; the others have none."""
    seen = np.where(mask, logits, MASKED)
    weights = np.exp(seen - np.maximum.reduce(seen))
    return np.asarray(weights / np.add.reduce(weights))
