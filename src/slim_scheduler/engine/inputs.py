"""From what a caller hands in to what the engine runs: shapes, types and limits checked before memory is taken."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import ItemId, Request, RequestId, Seconds, TaskConstraints


class Normalization(NamedTuple):
    """Per channel: what raw pixels, scaled to [0, 1], are centred and divided by. From the model's manifest."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def none(cls, shape: ModelShape) -> "Normalization":
        return cls((0.0,) * shape.item_shape[0], (1.0,) * shape.item_shape[0])

    def apply(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """uint8 (batch, channels, ...) -> float32, normalised."""
        per_channel = (1, -1, *(1,) * (pixels.ndim - 2))
        mean = np.array(self.mean, np.float32).reshape(per_channel)
        std = np.array(self.std, np.float32).reshape(per_channel)
        return np.asarray(pixels * (1 / (255 * std)) - mean / std, np.float32)


def checked(items: npt.NDArray[Any], shape: ModelShape, normalization: Normalization) -> npt.NDArray[np.float32]:
    """Normalised items, (n, *item_shape), that nobody else can change. Raises InputError for another shape or type."""
    if not isinstance(items, np.ndarray):
        raise InputError(f"items are a {type(items).__name__}; give a numpy array, (n, {_by(shape.item_shape)})")
    if items.ndim != len(shape.item_shape) + 1 or items.shape[1:] != shape.item_shape or not len(items):
        raise InputError(
            f"items have shape ({_by(items.shape)}); {shape.name} takes (n, {_by(shape.item_shape)}), n at least 1"
        )
    if items.dtype == np.uint8:
        return normalization.apply(items)
    if items.dtype == np.float32:
        return items.copy() if items.flags.writeable else items  # the caller may reuse its array
    raise InputError(f"items are {items.dtype}; give float32 (normalised) or uint8 (raw pixels)")


def joined(parts: Sequence[npt.NDArray[np.float32]], item_shape: Sequence[int]) -> Tensor:
    """Checked items as one tensor of its own, (n, *item_shape)."""
    batch = np.empty((sum(map(len, parts)), *item_shape), np.float32)
    np.concatenate(parts, out=batch)
    return torch.from_numpy(batch)


class RequestLimits(NamedTuple):
    """What a caller asks for beyond an answer. `deadline_s` counts from the request's arrival."""

    deadline_s: Seconds | None = None
    priority: int = 0
    widths: Sequence[float] | None = None
    accuracy_floor: float | None = None
    confidence_floor: float | None = None
    anytime: bool = True

    def checked(self, shape: ModelShape) -> "RequestLimits":
        """The same with the widths as a tuple. Raises InputError for what can never be met."""
        for name in ("accuracy_floor", "confidence_floor"):
            floor = getattr(self, name)
            if floor is not None and not 0 <= floor <= 1:
                raise InputError(f"{name} is {floor}; it must be from 0 to 1")
        if self.deadline_s is not None and math.isnan(self.deadline_s):
            raise InputError("deadline_s is not a number; give seconds from now, or None")
        if not isinstance(self.priority, int) or self.priority < 0:
            raise InputError(f"priority is {self.priority}; it must be a whole number from 0 (most urgent)")
        if self.widths is None:
            return self
        exact = tuple(float(width) for width in self.widths)
        if len(exact) != shape.segments:
            raise InputError(f"{len(exact)} widths are given; {shape.name} has {shape.segments} segments")
        for width in exact:
            shape.index(width)
        return self._replace(widths=exact)

    def request(self, request_id: RequestId, items: Sequence[ItemId], arrival: Seconds) -> Request:
        deadline = None if self.deadline_s is None else arrival + self.deadline_s
        constraints = None
        if self.widths is not None or self.accuracy_floor is not None:
            widths = None if self.widths is None else tuple(self.widths)
            constraints = TaskConstraints(widths, self.accuracy_floor)
        return Request(
            request_id, tuple(items), arrival, deadline, self.priority, constraints, self.confidence_floor, self.anytime
        )


def _by(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in shape)
