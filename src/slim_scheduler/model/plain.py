"""A network of one width made of ordinary torch modules, one per segment: served like any other, at width 1.

A user's class derives from `PlainNetwork`, hands its modules over, and is saved and loaded by its name. Shapes are
found by running the modules; memory and multiply-adds on torch's `meta` device, which computes nothing else.
"""

import copy
import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from slim_scheduler.core.errors import InputError

ONLY = 1.0


class PlainNetwork(nn.Module):
    """Implements `StoredNetwork` for a subclass whose constructor takes JSON values, by name.

    `segments` run one after the other; `item_shape` is one input item's, (channels, height, width); the last segment
    gives logits, (batch, classes). What the subclass was constructed with is kept: a checkpoint builds it again so.
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        network = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(network, *values, **named)
        object.__setattr__(network, "_arguments", dict(list(bound.arguments.items())[1:]))
        return network

    def __init__(self, segments: Sequence[nn.Module], item_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.name = type(self).__name__.lower()
        self.parts = nn.ModuleList(segments)
        self.item_shape = tuple(item_shape)
        self.classes = classes
        self.widths = (ONLY,)
        self._arguments: dict[str, Any]
        self._shapes: list[tuple[int, ...]] | None = None
        self._costs: list[SegmentCost] | None = None

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any], name: str) -> Self:
        network = cls(**architecture)
        network.name = name
        return network

    def architecture(self) -> dict[str, Any]:
        return dict(self._arguments)

    @property
    def segments(self) -> int:
        return len(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        for part in self.parts:
            x = part(x)
        return x

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]:
        if self._shapes is None:
            shapes = _shapes(self.parts, self.item_shape)
            if shapes[-1] != (self.classes,):
                raise InputError(
                    f"the last segment gives {shapes[-1]} per item, {self.classes} classes need one number each"
                )
            self._shapes = shapes
        return self._shapes[segment]

    def macs(self, segment: int, previous_width: float | None, width: float) -> int:
        return self._cost(segment).macs

    def workspace_bytes(self, segment: int, width: float) -> int:
        return self._cost(segment).workspace_bytes

    def slice(self, segment: int, width: float, device: str) -> "PlainSlice":
        """A copy of one segment on `device`. Raises InputError for what is not served."""
        if not 0 <= segment < self.segments:
            raise InputError(f"segment {segment} does not exist; the network has segments 0..{self.segments - 1}")
        if width != ONLY:
            raise InputError(f"width {width:g} is not served; available: {ONLY:g}")
        return PlainSlice(self.parts[segment], segment, torch.device(device))

    def _cost(self, segment: int) -> "SegmentCost":
        if self._costs is None:
            self._costs = _costs(self.parts, self.item_shape)
        return self._costs[segment]


class PlainSlice:
    """Implements `SegmentSlice`: a segment's module, whose layers are the same after every previous width."""

    width = ONLY
    variant_bytes = 0

    def __init__(self, module: nn.Module, segment: int, device: torch.device) -> None:
        self.segment = segment
        self.device = device
        self._module = copy.deepcopy(module).to(device).eval().requires_grad_(False)

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._module.parameters(), *self._module.buffers()))

    def has_variant(self, previous_width: float | None) -> bool:
        return True

    def build_variant(self, previous_width: float | None) -> int:
        return 0

    def run(self, x: Tensor, previous_width: float | None) -> Tensor:
        with torch.no_grad():
            out: Tensor = self._module(x)
        return out

    def lower(self, dtype: torch.dtype) -> None:
        self._module.to(dtype)

    def to_host(self) -> None:
        self._module.to("cpu")

    def to_device(self) -> None:
        self._module.to(self.device)


class SegmentCost:
    """Of one item in one segment: its multiply-adds, and the most temporary bytes at one time."""

    def __init__(self, macs: int, workspace_bytes: int) -> None:
        self.macs, self.workspace_bytes = macs, workspace_bytes


def _shapes(parts: Iterable[nn.Module], item_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Each segment's output for one item: run where its weights are, because the first run on `meta` takes a second."""
    x = torch.zeros((1, *item_shape))
    shapes = []
    with torch.no_grad():
        for part in parts:
            kept = next(filter(Tensor.is_floating_point, chain(part.parameters(), part.buffers())), x)
            x = copy.deepcopy(part).eval()(x.to(kept.device, kept.dtype))
            shapes.append(tuple(x.shape[1:]))
    return shapes


def _costs(parts: Iterable[nn.Module], item_shape: tuple[int, ...]) -> list[SegmentCost]:
    x = torch.zeros((1, *item_shape), device="meta")
    costs = []
    for part in parts:
        module = copy.deepcopy(part).to("meta").eval()
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter, _LiveBytes() as live:
            x = module(x)
        costs.append(SegmentCost(counter.get_total_flops() // 2, live.most))
    return costs


class _LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had at one time; `meta` tensors count as what they stand for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return  # of a view, or of an operation in place
        self._seen.add(key)
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size
