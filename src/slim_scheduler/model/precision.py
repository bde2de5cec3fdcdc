"""A network of torch in bf16 or fp16: its slices hold their weights and compute in that type.

Items, activations and logits stay float32, so that servers of different precisions work on the same items. What that
costs in accuracy is measured (`slim accuracy --precision`).
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@runtime_checkable
class LowerableSlice(SegmentSlice, Protocol):
    """A slice that can hold its weights in another type, and the variants that it builds from then on."""

    def lower(self, dtype: torch.dtype) -> None:
        """Turns the weights into a type, before any variant is built. `run` then gets items of that type; what it
        returns is made float32 for it."""
        ...


def in_precision(model: SlimmableModel, precision: str) -> SlimmableModel:
    """The network in a precision. Raises InputError for a network that cannot."""
    if precision == "fp32":
        return model
    if precision not in DTYPES:
        raise InputError(f"precision {precision} is not known; give fp32, bf16 or fp16")
    if not all(isinstance(model.slice(s, model.widths[0], "cpu"), LowerableSlice) for s in range(model.segments)):
        raise InputError(
            f"network {model.name} runs fp32 on torch's devices, not {precision}: its slices have no `lower(dtype)`; "
            "openvino:CPU may run bf16"
        )
    return LowerModel(model, precision)


class LowerModel:
    """Implements `SlimmableModel`: another network, its slices in lower precision."""

    def __init__(self, model: SlimmableModel, precision: str) -> None:
        self._model = model
        self._dtype = DTYPES[precision]
        self.name = model.name

    @property
    def segments(self) -> int:
        return self._model.segments

    @property
    def widths(self) -> tuple[float, ...]:
        return self._model.widths

    @property
    def item_shape(self) -> tuple[int, ...]:
        return self._model.item_shape

    @property
    def classes(self) -> int:
        return self._model.classes

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]:
        return self._model.activation_shape(segment, width)

    def macs(self, segment: int, previous_width: float | None, width: float) -> int:
        return self._model.macs(segment, previous_width, width)

    def workspace_bytes(self, segment: int, width: float) -> int:
        return self._model.workspace_bytes(segment, width)

    def slice(self, segment: int, width: float, device: str) -> "LowerSlice":
        return LowerSlice(self._model.slice(segment, width, device), self._dtype)


class LowerSlice:
    """Implements `SegmentSlice`: float32 in, float32 out."""

    def __init__(self, piece: Any, dtype: torch.dtype) -> None:
        self.segment: int = piece.segment
        self.width: float = piece.width
        # As `setup/machines.device_shape` counts: numbers that are no weights, such as counters, keep their type.
        self.weight_bytes: int = piece.weight_bytes // 2
        self._piece: LowerableSlice = piece
        self._dtype = dtype
        piece.lower(dtype)

    @property
    def variant_bytes(self) -> int:
        return self._piece.variant_bytes

    def has_variant(self, previous_width: float | None) -> bool:
        return self._piece.has_variant(previous_width)

    def build_variant(self, previous_width: float | None) -> int:
        return self._piece.build_variant(previous_width)

    def run(self, x: Tensor, previous_width: float | None) -> Tensor:
        return self._piece.run(x.to(self._dtype), previous_width).float()

    def to_host(self) -> None:
        self._piece.to_host()

    def to_device(self) -> None:
        self._piece.to_device()
