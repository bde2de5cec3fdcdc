"""SlimResNet: residual segments that each run at any width, chosen per call.

The weights of one segment at given widths form a plain dictionary, split in the part that depends on the previous width
(first convolution and shortcut) and the rest. `run_segment` runs such a dictionary: the whole network makes it on the
fly, and a `ResNetSlice` keeps it, so both compute the same numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.architecture import (
    Architecture,
    ConvShape,
    architecture_of,
    segment_convolutions,
    segment_macs,
    workspace_bytes,
)
from slim_scheduler.model.layers import SlimConv2d, SlimGroupNorm, SlimLinear
from slim_scheduler.model.segment_slice import ResNetSlice, run_segment

Weights = dict[str, Tensor]


class SlimResNet(nn.Module):
    """A slimmable residual network (method, section 5). Implements `SlimmableModel`."""

    def __init__(self, arch: Architecture, name: str = "slim-resnet") -> None:
        super().__init__()
        self.arch = arch
        self.name = name
        self.convs = nn.ModuleDict()
        self.norms = nn.ModuleDict()
        for segment in range(arch.segments):
            for conv in segment_convolutions(arch, segment, None, 1.0):
                key = _key(segment, conv.name)
                self.convs[key] = SlimConv2d(conv.in_channels, conv.out_channels, conv.kernel)
                if conv.normalized:
                    self.norms[key] = SlimGroupNorm(conv.out_channels)
        self.classifier = SlimLinear(arch.pooled, arch.channels[-1], arch.classes, arch.logit_scale)

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any], name: str) -> "SlimResNet":
        return cls(architecture_of(architecture), name)

    def architecture(self) -> dict[str, Any]:
        values: dict[str, Any] = msgspec.to_builtins(self.arch)
        return values

    @property
    def segments(self) -> int:
        return self.arch.segments

    @property
    def widths(self) -> tuple[float, ...]:
        return self.arch.widths

    @property
    def item_shape(self) -> tuple[int, ...]:
        return self.arch.item_shape

    @property
    def classes(self) -> int:
        return self.arch.classes

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]:
        return self.arch.activation_shape(segment, width)

    def macs(self, segment: int, previous_width: float | None, width: float) -> int:
        return segment_macs(self.arch, segment, previous_width, width)

    def workspace_bytes(self, segment: int, width: float) -> int:
        return workspace_bytes(self.arch, segment, width)

    def forward(self, x: Tensor, widths: Sequence[float]) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes), at one width per segment."""
        if len(widths) != self.segments:
            raise InputError(f"width tuple {tuple(widths)} has {len(widths)} entries; the network has {self.segments}")
        previous: float | None = None
        for segment, width in enumerate(widths):
            weights = self.own_weights(segment, width) | self.variant_weights(segment, previous, width)
            x = run_segment(self.arch, segment, weights, x)
            previous = width
        return x

    def own_weights(self, segment: int, width: float) -> Weights:
        """What a segment at a width needs whatever the previous width was."""
        weights: Weights = {}
        for conv in segment_convolutions(self.arch, segment, None, width):
            key = _key(segment, conv.name)
            if not conv.by_previous:
                weights[conv.name] = self._conv(key, conv)
            if conv.normalized:
                norm = self.norms[key]
                assert isinstance(norm, SlimGroupNorm)
                weights[f"{conv.name}.scale"], weights[f"{conv.name}.shift"] = norm.sliced(conv.out_channels)
        if segment == self.segments - 1:
            features = self.arch.segment_channels(segment, width)
            weights["classifier"], weights["classifier.bias"] = self.classifier.sliced(features)
        return weights

    def variant_weights(self, segment: int, previous_width: float | None, width: float) -> Weights:
        """What depends on the previous width: empty for segment 0."""
        return {
            conv.name: self._conv(_key(segment, conv.name), conv)
            for conv in segment_convolutions(self.arch, segment, previous_width, width)
            if conv.by_previous
        }

    def _conv(self, key: str, shape: ConvShape) -> Tensor:
        conv = self.convs[key]
        assert isinstance(conv, SlimConv2d)
        return conv.sliced(shape.in_channels, shape.out_channels)

    def slice(self, segment: int, width: float, device: str) -> ResNetSlice:
        """A contiguous copy of one segment at one width on `device`. Raises InputError for what is not served."""
        if not 0 <= segment < self.segments:
            raise InputError(f"segment {segment} does not exist; the network has segments 0..{self.segments - 1}")
        self.arch.index(width)
        return ResNetSlice(self, segment, width, torch.device(device))


def _key(segment: int, name: str) -> str:
    return f"segment{segment}-{name}".replace(".", "-")  # a ModuleDict key has no dots
