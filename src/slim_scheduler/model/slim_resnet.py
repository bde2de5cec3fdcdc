"""SlimResNet: residual segments that each run at any width, chosen per call.

The weights of one segment at given widths form a plain dictionary, split in the part that depends on the previous width
(first convolution and shortcut) and the rest. `run_segment` runs such a dictionary: the whole network makes it on the
fly, and a `ResNetSlice` keeps it, so both compute the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.architecture import (
    Architecture,
    ConvShape,
    architecture_of,
    segment_convolutions,
    segment_macs,
    workspace_bytes,
)
from slim_scheduler.model.fused_norm import is_fused, norm_activate_fused
from slim_scheduler.model.layers import NORM_EPS, SlimConv2d, SlimGroupNorm, SlimLinear, activate, convolve, group_norm

Weights = dict[str, Tensor]
HOST = torch.device("cpu")


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
    def from_architecture(cls, architecture: Mapping[str, Any], name: str) -> SlimResNet:
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


class ResNetSlice:
    """One segment at one width, deployed: standardised weights, contiguous, on one device. Implements `SegmentSlice`.

    It holds a reference to the network only to build variants for further previous widths.
    """

    def __init__(self, network: SlimResNet, segment: int, width: float, device: torch.device) -> None:
        self.segment = segment
        self.width = width
        self.device = device
        self._network = network
        self._at = device
        self._dtype = torch.float32
        self._variants: dict[float, dict[str, Tensor]] = {}
        with torch.no_grad():
            self._own = {name: _deployed(w, device) for name, w in network.own_weights(segment, width).items()}

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self._own.values())

    @property
    def variant_bytes(self) -> int:
        return sum(w.nbytes for variant in self._variants.values() for w in variant.values())

    @property
    def on_host(self) -> bool:
        """Whether the weights are in host memory though the slice belongs to another device."""
        return self._at != self.device

    def has_variant(self, previous_width: float | None) -> bool:
        return self.segment == 0 or previous_width in self._variants

    def build_variant(self, previous_width: float | None) -> int:
        if self.segment == 0:
            return 0
        if previous_width is None:
            raise InputError(f"segment {self.segment} needs the previous segment's width, got none")
        if previous_width not in self._variants:
            with torch.no_grad():
                weights = self._network.variant_weights(self.segment, previous_width, self.width)
                self._variants[previous_width] = {n: _deployed(w, self._at, self._dtype) for n, w in weights.items()}
        return sum(w.nbytes for w in self._variants[previous_width].values())

    def run(self, x: Tensor, previous_width: float | None) -> Tensor:
        weights = self._own
        if self.segment > 0:
            if previous_width not in self._variants:
                raise InputError(
                    f"segment {self.segment} at width {self.width:g} has no variant for previous width "
                    f"{previous_width}; call build_variant first"
                )
            weights = weights | self._variants[previous_width]
        with torch.no_grad():
            if x.device == HOST and not torch._C._is_tracing() and not torch.compiler.is_exporting():
                return _run_as_one(self._network.arch, self.segment, weights, x)
            return run_segment(self._network.arch, self.segment, weights, x)

    def lower(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._own = {name: w.to(dtype) for name, w in self._own.items()}
        self._variants = {p: {n: w.to(dtype) for n, w in v.items()} for p, v in self._variants.items()}

    def to_host(self) -> None:
        self._move(HOST)

    def to_device(self) -> None:
        self._move(self.device)

    def _move(self, target: torch.device) -> None:
        self._own = {name: w.to(target) for name, w in self._own.items()}
        self._variants = {p: {n: w.to(target) for n, w in v.items()} for p, v in self._variants.items()}
        self._at = target


def run_segment(arch: Architecture, segment: int, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """One segment with given weights. (batch, channels, height, width) -> its output, or logits after the last."""
    x = x.contiguous(memory_format=torch.channels_last)

    def norm_activate(name: str, x: Tensor, beside: Tensor | None = None) -> Tensor:
        scale, shift, group = weights[f"{name}.scale"], weights[f"{name}.shift"], arch.channels_per_group
        if is_fused(x, group):
            return norm_activate_fused(x, scale, shift, group, NORM_EPS, beside)
        x = group_norm(x, scale, shift, group)
        if beside is not None:
            x = x + beside if torch.is_grad_enabled() else x.add_(beside)
        return activate(x)

    if segment == 0:
        x = convolve(x, weights["stem"], 1)
        x = norm_activate("stem", x)
    for block in range(arch.blocks[segment]):
        stride = arch.strides[segment] if block == 0 else 1
        shortcut = weights.get(f"block{block}.shortcut")
        beside = x if shortcut is None else convolve(x, shortcut, stride)
        # One statement per layer: a layer's input is free before the next but one is computed (`workspace_bytes`).
        x = convolve(x, weights[f"block{block}.conv1"], stride)
        x = norm_activate(f"block{block}.conv1", x)
        x = convolve(x, weights[f"block{block}.conv2"], 1)
        x = norm_activate(f"block{block}.conv2", x, beside)
    if segment == arch.segments - 1:
        features = x.mean(dim=(2, 3))  # (batch, channels)
        if arch.pooling == "mean+max":
            features = torch.cat((features, x.amax(dim=(2, 3))), dim=1)
        x = functional.linear(features, weights["classifier"], weights["classifier.bias"])
    return x


# One trace per segment of an architecture and type, for all slices of the process.
_traces: dict[tuple[Architecture, int, torch.dtype], Callable[..., Tensor]] = {}


def _run_as_one(arch: Architecture, segment: int, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """`run_segment` as a single call into torch, which leaves the interpreter to other threads until it is done.

    The same kernels in the same order, to the last bit. Weights are arguments and no size is fixed, so one trace serves
    every width and batch size.
    """
    names = sorted(weights)
    run = _traces.get((arch, segment, x.dtype))
    if run is None:

        def steps(x: Tensor, *values: Tensor) -> Tensor:
            return run_segment(arch, segment, dict(zip(names, values, strict=True)), x)

        with warnings.catch_warnings():
            # torch.compile, which it recommends instead, needs a C++ compiler where it runs.
            warnings.simplefilter("ignore", DeprecationWarning)
            example = (x, *[weights[name] for name in names])
            run = torch.jit.trace(steps, example, check_trace=False)
        _traces[arch, segment, x.dtype] = run
    return run(x, *[weights[name] for name in names])


def _deployed(weight: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A copy of its own, dense, with the strides it had: other strides may choose another kernel."""
    return weight.to(device, dtype, copy=True)
