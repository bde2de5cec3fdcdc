"""The policy networks of eq. 3 in torch, for training: the same two as `core/router/learned/policy.py`, batched.

Parameters have the NumPy networks' names and shapes, and start as PPO's usually do: orthogonal, small for the heads.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slim_scheduler.core.router.learned.observation import Floats
from slim_scheduler.core.router.learned.policy import MASKED, NetworkSizes

HEAD_GAIN = 0.01  # the first policy is all but uniform


class Inputs(NamedTuple):
    """A batch of observations. Masked logits come out as `MASKED`."""

    shared: Tensor  # (B, shared)
    servers: Tensor  # (B, N, features)
    present: Tensor  # (B, N) bool: a server, not padding
    server_mask: Tensor  # (B, N) bool
    width_mask: Tensor  # (B, W) bool
    group_mask: Tensor  # (B, G) bool


class Outputs(NamedTuple):
    server: Tensor  # (B, N)
    width: Tensor  # (B, W)
    group: Tensor  # (B, G)
    value: Tensor  # (B,)


class PolicyNetwork(nn.Module):
    """Parameters as `NetworkSizes` lists them, in `p` with dots as `__`."""

    def __init__(self, sizes: NetworkSizes, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        self.p = nn.ParameterDict()
        for name, shape in sizes.shapes().items():
            values = torch.zeros(shape)
            if len(shape) == 2:
                head = name.partition(".")[0] in ("server", "width", "group")
                nn.init.orthogonal_(values, HEAD_GAIN if head else 1.0, generator)
            self.p[name.replace(".", "__")] = nn.Parameter(values)

    def forward(self, x: Inputs) -> Outputs:
        out = self._paper(x) if self.sizes.kind == "paper" else self._extended(x)
        return Outputs(
            _masked(out.server, x.server_mask),
            _masked(out.width, x.width_mask),
            _masked(out.group, x.group_mask),
            out.value,
        )

    def _paper(self, x: Inputs) -> Outputs:
        hidden = torch.tanh(self._linear("first", x.shared))
        hidden = torch.tanh(self._linear("second", hidden))
        heads = [self._linear(name, hidden) for name in ("server", "width", "group", "value")]
        return Outputs(heads[0], heads[1], heads[2], heads[3][:, 0])

    def _extended(self, x: Inputs) -> Outputs:
        p, present = self.p, x.present[..., None]  # (B, N, 1)
        of_all = x.shared @ p["row_shared__weight"] + p["row__bias"]  # (B, H)
        rows = torch.tanh(x.servers @ p["row__weight"] + of_all[:, None])  # (B, N, H)
        rows = torch.tanh(self._linear("second", rows))
        mean = (rows * present).sum(1) / present.sum(1)
        largest = torch.where(present, rows, -torch.inf).amax(1)
        context = torch.tanh(self._linear("context", torch.cat((mean, largest, x.shared), 1)))
        scores = rows @ p["score__weight"] + (context @ p["score_context__weight"] + p["score__bias"])[:, None]
        server = (torch.tanh(scores) @ p["server__weight"])[..., 0]
        likely = torch.softmax(_masked(server, x.server_mask), 1)
        choice = torch.cat(((likely[..., None] * rows).sum(1), context), 1)
        choice = torch.tanh(self._linear("choice", choice))
        width, group = self._linear("width", choice), self._linear("group", choice)
        return Outputs(server, width, group, self._linear("value", context)[:, 0])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = x @ self.p[f"{name}__weight"] + self.p[f"{name}__bias"]
        return out

    def arrays(self) -> dict[str, Floats]:
        """The parameters as the NumPy networks take them: copies, so that they stay as they are now."""
        return {
            name.replace("__", "."): np.array(values.detach().numpy(), np.float32) for name, values in self.p.items()
        }


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logits, MASKED)
