"""What the rest of the system knows of a network: how many segments, which widths, and how to run a slice.

Any network that offers this can be served (rule 7); SlimResNet is one. Nothing outside `model/` may know what a
segment computes. A network that also offers `StoredNetwork` can be saved, and loaded by the name of its class.
"""

from collections.abc import Mapping
from typing import Any, Protocol, Self

from torch import Tensor


class SegmentSlice(Protocol):
    """One segment at one width, as contiguous weights of its own on one device. Dropping it frees them.

    The layers that read the previous segment's output exist once per previous width (`build_variant`); all else
    exists once. Not safe to run and move from two threads at the same time. One that also has `lower(dtype)` runs in
    bf16 and fp16 too (`LowerableSlice` of `model/precision.py`).
    """

    segment: int
    width: float

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights without variants."""
        ...

    @property
    def variant_bytes(self) -> int:
        """Bytes of all variants built so far."""
        ...

    def has_variant(self, previous_width: float | None) -> bool: ...

    def build_variant(self, previous_width: float | None) -> int:
        """Builds the layers for one previous width; returns their bytes, also when they were there. 0 for segment 0."""
        ...

    def run(self, x: Tensor, previous_width: float | None) -> Tensor:
        """(batch, channels, height, width) float32 on the slice's device -> the segment's output.

        `previous_width` is None for segment 0 and must have been built for the others; the last segment gives
        logits, (batch, classes).
        """
        ...

    def to_host(self) -> None:
        """Moves the weights to host memory; the device's memory is free again."""
        ...

    def to_device(self) -> None:
        """Moves the weights back to the device of the slice."""
        ...


class SlimmableModel(Protocol):
    """A network of `segments` parts, each of which runs at any of `widths`, which ascend.

    `item_shape` is one input item's, (channels, height, width); `activation_shape` one item's after a segment,
    (classes,) after the last.
    """

    name: str

    @property
    def segments(self) -> int: ...
    @property
    def widths(self) -> tuple[float, ...]: ...
    @property
    def item_shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> int: ...

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]: ...

    def macs(self, segment: int, previous_width: float | None, width: float) -> int:
        """Multiply-adds of one item in one segment."""
        ...

    def workspace_bytes(self, segment: int, width: float) -> int:
        """Peak temporary bytes of one item while a segment runs."""
        ...

    def slice(self, segment: int, width: float, device: str) -> SegmentSlice:
        """A contiguous copy of one segment's weights at one width on `device`, without variants."""
        ...


class StoredNetwork(SlimmableModel, Protocol):
    """A network that a checkpoint can hold: a `torch.nn.Module` has all but the first two methods.

    `from_architecture` is called twice at a load, first under `torch.device("meta")`, where tensors have a shape and
    no memory; it must not look at the values of tensors.
    """

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any], name: str) -> Self:
        """The network again, from what `architecture` said, with weights of no meaning. Raises InputError."""
        ...

    def architecture(self) -> Mapping[str, Any]:
        """JSON values that build this network again; tensors belong to `state_dict`."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]: ...
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> Any: ...
    def to(self, device: str) -> Self: ...
    def eval(self) -> Self: ...
    def requires_grad_(self, requires_grad: bool) -> Self: ...


# What a slice, and a class, must offer before any of it is called.
SLICE_METHODS = (
    "segment", "width", "weight_bytes", "variant_bytes", "has_variant", "build_variant", "run", "to_host", "to_device",
)  # fmt: skip
STORED_METHODS = (
    "from_architecture", "architecture", "state_dict", "load_state_dict", "activation_shape", "macs", "workspace_bytes",
    "slice",
)  # fmt: skip
