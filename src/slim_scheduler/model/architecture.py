"""A SlimResNet as numbers: its parameters, and from them every convolution of every segment at every width.

One list of convolutions (`segment_convolutions`) is what the network is built from, what multiply-adds are counted
from, and what the manifest of a checkpoint stores. Nothing here needs torch.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from slim_scheduler.core.errors import InputError

FLOAT_BYTES = 4  # activations and weights run in float32


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one network. Channels are those of width 1.0; one entry per segment.

    `stem_scales`: whether the stem's channels follow segment 0's width, or stay the same at all widths.
    `logit_scale` multiplies the classifier's output: features after group norm are large, and small first logits
    keep label smoothing and distillation in the range where they teach.
    """

    item_shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 100
    widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    channels: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    stem_channels: int = 64
    stem_scales: bool = True
    channels_per_group: int = 16
    pooling: Literal["mean", "mean+max"] = "mean"
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        sizes = {"channels": self.channels, "blocks": self.blocks, "strides": self.strides}
        for name, values in sizes.items():
            if len(values) != len(self.channels) or not values or min(values) < 1:
                raise InputError(f"architecture: {name} {values} must be {len(self.channels)} positive numbers")
        if min(self.item_shape) < 1 or self.classes < 2 or self.stem_channels < 1:
            raise InputError(f"architecture: items {self.item_shape} into {self.classes} classes make no network")
        if list(self.widths) != sorted(set(self.widths)) or not self.widths:
            raise InputError(f"architecture: widths {self.widths} must be ascending and different")
        if self.widths[0] <= 0 or self.widths[-1] != 1.0:
            raise InputError(f"architecture: widths {self.widths} must lie in (0, 1] and end with 1.0")
        stem = (self.stem_channels,) if self.stem_scales else ()
        for width in self.widths:
            for channels in (*self.channels, *stem):
                if not math.isclose((channels * width) % self.channels_per_group, 0.0, abs_tol=1e-9):
                    raise InputError(
                        f"architecture: {channels} channels at width {width:g} are no multiple of channels_per_group "
                        f"{self.channels_per_group}; choose channels that are"
                    )
        if self.stem_channels % self.channels_per_group:
            raise InputError(
                f"architecture: stem_channels {self.stem_channels} is no multiple of channels_per_group "
                f"{self.channels_per_group}"
            )

    @property
    def segments(self) -> int:
        return len(self.channels)

    @property
    def pooled(self) -> int:
        """How many pooled features the classifier sees per channel."""
        return 2 if self.pooling == "mean+max" else 1

    def index(self, width: float) -> int:
        """Position of a width. Raises InputError for one that is not served."""
        if width not in self.widths:
            available = ", ".join(f"{w:g}" for w in self.widths)
            raise InputError(f"width {width:g} is not served; available: {available}")
        return self.widths.index(width)

    def segment_channels(self, segment: int, width: float) -> int:
        """Channels of a segment's output; segment -1 is the stem."""
        self.index(width)
        if segment < 0:
            return round(self.stem_channels * width) if self.stem_scales else self.stem_channels
        return round(self.channels[segment] * width)

    def spatial(self, segment: int) -> tuple[int, int]:
        """Height and width in pixels of a segment's output; segment -1 is the stem."""
        _, height, width = self.item_shape
        for stride in self.strides[: segment + 1]:
            height, width = math.ceil(height / stride), math.ceil(width / stride)
        return height, width

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]:
        """Shape of one item after a segment: (channels, height, width), after the last one (classes,)."""
        if segment == self.segments - 1:
            self.index(width)
            return (self.classes,)
        return (self.segment_channels(segment, width), *self.spatial(segment))


def architecture_of(values: Mapping[str, Any]) -> Architecture:
    """An architecture from a manifest's values. Raises InputError."""
    try:
        return msgspec.convert(values, Architecture)
    except msgspec.ValidationError as error:
        raise InputError(f"architecture: {error}; this is no SlimResNet's") from None


class ConvShape(msgspec.Struct, frozen=True):
    """One convolution of a segment at given widths. `by_previous`: its input is the previous segment's output."""

    name: str
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    pixels: int  # of its output
    by_previous: bool
    normalized: bool  # a group norm follows; not after shortcuts

    @property
    def macs(self) -> int:
        return self.in_channels * self.out_channels * self.kernel**2 * self.pixels

    @property
    def parameters(self) -> int:
        return self.in_channels * self.out_channels * self.kernel**2 + 2 * self.out_channels * self.normalized


def segment_convolutions(
    arch: Architecture, segment: int, previous_width: float | None, width: float
) -> Iterator[ConvShape]:
    """The convolutions of a segment in the order they run; `previous_width` is None for segment 0."""
    out = arch.segment_channels(segment, width)
    pixels = math.prod(arch.spatial(segment))
    if segment == 0:
        channels = arch.segment_channels(-1, width)
        yield ConvShape("stem", arch.item_shape[0], channels, 3, 1, math.prod(arch.spatial(-1)), False, True)
    else:
        channels = arch.segment_channels(segment - 1, 1.0 if previous_width is None else previous_width)
    for block in range(arch.blocks[segment]):
        stride = arch.strides[segment] if block == 0 else 1
        first = block == 0 and segment > 0
        yield ConvShape(f"block{block}.conv1", channels, out, 3, stride, pixels, first, True)
        yield ConvShape(f"block{block}.conv2", out, out, 3, 1, pixels, False, True)
        if block == 0 and has_shortcut(arch, segment):
            yield ConvShape("block0.shortcut", channels, out, 1, stride, pixels, first, False)
        channels = out


def has_shortcut(arch: Architecture, segment: int) -> bool:
    """Whether a segment's first block has a 1x1 convolution beside it; without one the input itself is added.

    From segment 1 on it always has: the previous segment may run at another width.
    """
    same = arch.stem_scales and arch.stem_channels == arch.channels[0] and arch.strides[0] == 1
    return segment > 0 or not same


def segment_macs(arch: Architecture, segment: int, previous_width: float | None, width: float) -> int:
    """Multiply-adds of one item in one segment: convolutions and classifier."""
    macs = sum(c.macs for c in segment_convolutions(arch, segment, previous_width, width))
    if segment == arch.segments - 1:
        macs += arch.segment_channels(segment, width) * arch.pooled * arch.classes
    return macs


def segment_parameters(arch: Architecture, segment: int, previous_width: float | None, width: float) -> int:
    """Parameters that one segment uses at these widths."""
    count = sum(c.parameters for c in segment_convolutions(arch, segment, previous_width, width))
    if segment == arch.segments - 1:
        count += (arch.segment_channels(segment, width) * arch.pooled + 1) * arch.classes
    return count


def tuple_cost(arch: Architecture, widths: tuple[float, ...]) -> tuple[int, int]:
    """(multiply-adds of one item, parameters) of the whole network at a width tuple."""
    macs = parameters = 0
    for segment, width in enumerate(widths):
        previous = widths[segment - 1] if segment else None
        macs += segment_macs(arch, segment, previous, width)
        parameters += segment_parameters(arch, segment, previous, width)
    return macs, parameters


def workspace_bytes(arch: Architecture, segment: int, width: float) -> int:
    """Peak temporary bytes of one item in a segment, its output included and its input not.

    A block holds at most its input, the shortcut, and one convolution's input and output at the same time
    (activations and additions run in place); the convolution library's own scratch memory is not counted.
    """
    out = FLOAT_BYTES * arch.segment_channels(segment, width) * math.prod(arch.spatial(segment))
    peak, block_input = 0, 0
    if segment == 0:
        channels, height, columns = arch.item_shape
        block_input = FLOAT_BYTES * arch.segment_channels(-1, width) * height * columns
        peak = FLOAT_BYTES * channels * height * columns + 2 * block_input
    for block in range(arch.blocks[segment]):
        shortcut = out if block == 0 and has_shortcut(arch, segment) else 0
        peak = max(peak, block_input + shortcut + 2 * out)
        block_input = out
    return peak
