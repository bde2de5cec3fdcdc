"""From what a caller hands in to what the engine runs: shapes, types and limits checked before memory is taken."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.shape import ModelShape


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


def _by(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in shape)
