"""What a device takes to run each piece of one network: latency, load time, memory and power.

A profile is measured (`slim measure`) or derived from public data, and says which. The simulator, the cost-model
router and the bound read it; it knows nothing of queues. Latency is the time of a batch alone on the device; how
concurrent batches slow each other, and how a busy device slows down, are curves of the device.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf, isfinite

import msgspec

from slim_scheduler.core.errors import ProfileError
from slim_scheduler.core.types import Bytes, Seconds, Width


class Curve(msgspec.Struct, frozen=True):
    """A piecewise linear function, flat beyond its ends. `x` ascends."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __call__(self, at: float) -> float:
        x, y = self.x, self.y
        if at <= x[0]:
            return y[0]
        if at >= x[-1]:
            return y[-1]
        i = bisect_left(x, at)
        return y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])


class Latency(msgspec.Struct, frozen=True):
    """Seconds of one (segment, previous width, width) at each measured batch size.

    `seconds` are medians and `spread` the distance between quartiles. Queues feel the mean and the rare long batch, so
    `mean` and `deviation` (standard), where they were measured, are what is reckoned with.
    """

    segment: int
    previous_width: Width | None
    width: Width
    seconds: tuple[Seconds, ...]
    spread: tuple[Seconds, ...] = ()
    mean: tuple[Seconds, ...] = ()
    deviation: tuple[Seconds, ...] = ()

    @property
    def measured(self) -> dict[str, tuple[Seconds, ...]]:
        """What there is of it, by name; the medians always."""
        further = {"spread": self.spread, "mean": self.mean, "deviation": self.deviation}
        return {"seconds": self.seconds, **{name: values for name, values in further.items() if values}}


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One device running one network.

    `batches` are the batch sizes of every latency row, ascending. `power` maps utilisation to watts; `slowdown` maps
    utilisation to a factor on latency (1 at rest); `sharing[k - 1]` is the combined speed of k concurrent batches
    relative to one alone. `load_s` is a fixed time per instance load plus bytes over `load_bytes_per_s`.
    """

    device: str
    model: str
    source: str
    batches: tuple[int, ...]
    latency_rows: tuple[Latency, ...]
    load_s: Seconds
    load_bytes_per_s: float
    memory_bytes: Bytes
    power: Curve
    power_source: str = "estimated"
    slowdown: Curve = Curve((0.0, 1.0), (1.0, 1.0))
    sharing: tuple[float, ...] = (1.0,)
    notes: str = ""
    versions: dict[str, str] = {}

    def check(self) -> None:
        """Raises ProfileError where a length or a value makes no sense."""
        sizes = self.batches
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ProfileError(f"batches are {list(sizes)}; they must be at least one, ascending, from 1 on")
        if not self.latency_rows:
            raise ProfileError("there are no latency rows; `slim measure` writes them")
        for row in self.latency_rows:
            where = f"the row of segment {row.segment}, widths {row.previous_width} and {row.width}"
            for name, values in row.measured.items():
                if len(values) != len(sizes):
                    raise ProfileError(f"{where} has {len(values)} {name}; there are {len(sizes)} batch sizes")
                may_be_0 = name in ("spread", "deviation")
                if not all(isfinite(v) and (v > 0 or (may_be_0 and v == 0)) for v in values):
                    least = "0 or more" if may_be_0 else "above 0"
                    raise ProfileError(f"{where} has {name} {list(values)}; each must be finite and {least}")
        for name, curve in (("power", self.power), ("slowdown", self.slowdown)):
            if not curve.x or len(curve.x) != len(curve.y) or list(curve.x) != sorted(set(curve.x)):
                raise ProfileError(
                    f"{name} needs as many y as x, and x ascending; x is {list(curve.x)}, y is {list(curve.y)}"
                )
            may_be_0 = curve is self.power
            if not all(map(isfinite, curve.x)) or not all(
                isfinite(y) and (y > 0 or (may_be_0 and y == 0)) for y in curve.y
            ):
                least = "0 or more" if may_be_0 else "above 0"
                raise ProfileError(f"{name} has x {list(curve.x)} and y {list(curve.y)}; y must be finite and {least}")
        if not self.sharing or not all(isfinite(v) and v > 0 for v in self.sharing):
            raise ProfileError(f"sharing is {list(self.sharing)}; it must have one value at least, all above 0")
        if not self.load_bytes_per_s > 0 or not 0 <= self.load_s < inf:
            raise ProfileError(
                f"load_bytes_per_s is {self.load_bytes_per_s:g} and load_s {self.load_s:g}; the first must be above 0, "
                "the second finite and 0 or more"
            )

    @property
    def best_utilization(self) -> float:
        """Where the device does most: at a busy share u of the time, u / slowdown(u) of what it could do at rest."""
        return max((1.0, *[u for u in self.slowdown.x if 0 < u <= 1]), key=lambda u: u / self.slowdown(u))

    def load_time(self, size: Bytes) -> Seconds:
        return self.load_s + size / self.load_bytes_per_s

    def share(self, concurrent: int) -> float:
        """Speed of each of `concurrent` batches, relative to running alone."""
        return self.sharing[min(concurrent, len(self.sharing)) - 1] / concurrent


class LatencyTable:
    """Mean latency of every batch size 1..max_batch: linear between the measured sizes and beyond the last two."""

    def __init__(self, profile: Profile, max_batch: int) -> None:
        if not profile.latency_rows or list(profile.batches) != sorted(set(profile.batches)):
            raise ProfileError(f"profile of {profile.device}: no latency rows, or batch sizes not ascending")
        self.max_batch = max_batch
        self._rows: dict[tuple[int, Width | None, Width], list[Seconds]] = {}
        self._variation: dict[tuple[int, Width | None, Width], list[float]] = {}
        self.varies = any(row.deviation for row in profile.latency_rows)
        sizes = range(1, max_batch + 1)
        for row in profile.latency_rows:
            key, mean = (row.segment, row.previous_width, row.width), row.mean or row.seconds
            self._rows[key] = [0.0] + [_at(profile.batches, mean, size) for size in sizes]
            shares = [d / m for d, m in zip(row.deviation, mean, strict=True)] if row.deviation else [0.0] * len(mean)
            among = Curve(tuple(map(float, profile.batches)), tuple(shares))
            self._variation[key] = [0.0] + [among(size) for size in sizes]

    def seconds(self, segment: int, previous_width: Width | None, width: Width, batch: int) -> Seconds:
        """Mean time of a batch alone on the device. Raises ProfileError where the profile has no such row."""
        try:
            return self._rows[segment, previous_width, width][batch]
        except (KeyError, IndexError):
            raise ProfileError(
                f"profile has no latency for segment {segment}, previous width {previous_width}, width {width}, "
                f"batch {batch} (limit {self.max_batch}); measure it with `slim measure`"
            ) from None

    def variation(self, segment: int, previous_width: Width | None, width: Width, batch: int) -> float:
        """Standard deviation of that time between batches, over its mean; 0 where nobody measured it."""
        return self._variation[segment, previous_width, width][batch]


def _at(sizes: Sequence[int], seconds: Sequence[Seconds], size: int) -> Seconds:
    if len(sizes) == 1:
        return seconds[0] * size / sizes[0]
    i = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
    return max(seconds[i - 1] + slope * (size - sizes[i - 1]), min(seconds))
