"""A slimmable network as numbers: segments, widths, and the bytes and multiply-adds of each piece.

Schedulers, simulator and bound know a network only through this; it is read from the checkpoint's manifest without
torch. Nothing here says what a segment computes.
"""

import math

import msgspec

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.types import Bytes, Width

ROUNDING = 1e-9  # of widths: 0.7 + 0.1 is below 0.8


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one network. Tables are indexed by segment, then by position in `widths`.

    Bytes are per item for `input`, `activation` (a segment's output) and `workspace` (peak temporary memory while a
    segment runs), and per instance for `weight` (without variants) and `variant` (the first layers for one previous
    width: `[segment][previous][width]`). `macs` has the same three indices, multiply-adds per item; segment 0 has
    one previous entry.
    """

    name: str
    segments: int
    widths: tuple[Width, ...]
    classes: int
    item_shape: tuple[int, ...]
    input_bytes: Bytes
    activation_bytes: tuple[tuple[Bytes, ...], ...]
    weight_bytes: tuple[tuple[Bytes, ...], ...]
    variant_bytes: tuple[tuple[tuple[Bytes, ...], ...], ...]
    workspace_bytes: tuple[tuple[Bytes, ...], ...]
    macs: tuple[tuple[tuple[int, ...], ...], ...]

    def index(self, width: Width) -> int:
        """Position of a width. Raises InputError for one that is not served."""
        try:
            return self.widths.index(width)
        except ValueError:
            available = ", ".join(f"{w:g}" for w in self.widths)
            raise InputError(f"width {width:g} is not served; available: {available}") from None

    def widest(self, width: Width, upgrade: float | None) -> Width:
        """The widest instance that may run a task for a width: wider by up to `upgrade`; None: any wider one."""
        return self.widths[-1] if upgrade is None else width + upgrade + ROUNDING

    def instance_bytes(self, segment: int, width: Width, max_batch: int) -> Bytes:
        """Device memory of a fresh instance: its weights and room to run `max_batch` items."""
        i = self.index(width)
        return self.weight_bytes[segment][i] + max_batch * self.workspace_bytes[segment][i]

    def variant(self, segment: int, previous_width: Width | None, width: Width) -> Bytes:
        """Device memory of the first layers for one previous width; 0 for segment 0."""
        if previous_width is None:
            return 0
        return self.variant_bytes[segment][self.index(previous_width)][self.index(width)]

    def activation(self, segment: int, width: Width) -> Bytes:
        """Bytes of one item's activation after `segment` at `width`."""
        return self.activation_bytes[segment][self.index(width)]

    def tuple_macs(self, widths: tuple[Width, ...]) -> int:
        """Multiply-adds of one item through the whole network at a width tuple."""
        total, previous = 0, 0
        for segment, width in enumerate(widths):
            current = self.index(width)
            total += self.macs[segment][previous if segment else 0][current]
            previous = current
        return total

    def check(self) -> None:
        """Raises InputError where tables and sizes do not agree."""
        n, w = self.segments, len(self.widths)
        if n < 1 or w < 1 or list(self.widths) != sorted(set(self.widths)):
            raise InputError(f"network {self.name}: {n} segments with widths {self.widths}; need ascending widths")
        for name in ("activation_bytes", "weight_bytes", "workspace_bytes"):
            table = getattr(self, name)
            if len(table) != n or any(len(row) != w for row in table):
                raise InputError(f"network {self.name}: {name} is not {n} segments x {w} widths")
        if math.prod(self.item_shape) < 1:
            raise InputError(f"network {self.name}: item shape {self.item_shape} is empty")
