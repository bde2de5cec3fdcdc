"""The measures that tables show: which key, under what title, in what unit, and which direction is better.

The terminal's tables, the page's and a comparison's all read this list, so that a number looks the same everywhere.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slim_scheduler.core.errors import RecordError


@dataclass(frozen=True, slots=True)
class Measure:
    """One column. `key` is the summary's, nested keys joined by a dot; shown as value x scale with `unit`.

    `digits` after the point; None for three significant ones of the largest value that is shown together, where sizes
    differ much between clusters.
    """

    key: str
    title: str
    unit: str = ""
    scale: float = 1.0
    digits: int | None = 1
    better: Literal["low", "high"] | None = None

    def places(self, values: Iterable[float | None]) -> int:
        """How many digits after the point these values get, all of them alike."""
        if self.digits is not None:
            return self.digits
        largest = max((abs(v * self.scale) for v in values if v is not None), default=0.0)
        return max(0, 2 - math.floor(math.log10(largest))) if largest else 1

    def show(self, value: float | None, spread: float | None = None, places: int | None = None) -> str:
        """`value ± spread`; without `places`, those of the two alone."""
        if value is None:
            return "–"
        digits = self.places((value, spread)) if places is None else places
        shown = [v * self.scale for v in (value, spread) if v is not None]
        return " ± ".join(f"{v:,.{digits}f}".replace("-", "−") for v in shown)

    @property
    def is_energy(self) -> bool:
        return self.key.startswith("energy")

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


# What a user gets.
SERVED = (
    Measure("accuracy", "accuracy", "%", 100, 2, "high"),
    Measure("latency_s.mean", "latency mean", "ms", 1000, 1, "low"),
    Measure("latency_s.sd", "sd", "ms", 1000, 1, "low"),
    Measure("latency_s.p50", "p50", "ms", 1000, 1, "low"),
    Measure("latency_s.p99", "p99", "ms", 1000, 1, "low"),
    Measure("throughput_items_s", "throughput", "items/s", 1, 1, "high"),
    Measure("slo_attainment", "in time", "%", 100, 1, "high"),
    Measure("energy_per_item_j", "energy", "mJ/item", 1000, 1, "low"),
)
# Shown where some router runs items twice, and where the CPU time of runs was measured.
AGAIN = Measure("second_pass_share", "run again", "%", 100, 1)
CPU = Measure("cpu_s_per_item", "CPU", "ms/item", 1000, 2, "low")
# What a router is rewarded for: eq. 7, and its terms.
REWARDED = (
    Measure("reward.mean", "reward", "per item", 1, None, "high"),
    Measure("block_latency_s.mean", "block latency", "ms", 1000, 1, "low"),
    Measure("block_latency_s.sd", "sd", "ms", 1000, 1, "low"),
    Measure("block_latency_s.p99", "p99", "ms", 1000, 1, "low"),
    Measure("energy_block_j.mean", "block energy", "J", 1, None, "low"),
    Measure("energy_block_j.sd", "sd", "J", 1, None, "low"),
    Measure("energy_block_j.p99", "p99", "J", 1, None, "low"),
    Measure("utilization_variance.mean", "utilisation variance", "", 1, 4),
    Measure("decision_us.mean", "decision", "µs", 1, 1, "low"),
)


def served(summaries: Iterable[dict[str, Any]]) -> tuple[Measure, ...]:
    """What a user gets, of some runs."""
    found = list(summaries)
    return (*SERVED, *[m for m in (AGAIN, CPU) if any(run.get(m.key) for run in found)])


def headline(summaries: Iterable[dict[str, Any]]) -> tuple[Measure, ...]:
    """What fits a terminal."""
    reward = [m for m in REWARDED if m.key == "reward.mean"]
    return (*[m for m in served(summaries) if m.key != "latency_s.sd"], *reward)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs with the half-width of its 95 % interval; None where a run does not know, or one run alone."""

    mean: float | None
    ci95: float | None
    runs: tuple[float | None, ...]


NOTHING = Estimate(None, None, ())


def is_sure(difference: Estimate) -> bool:
    """Whether the 95 % interval of a difference excludes zero."""
    return difference.mean is not None and difference.ci95 is not None and abs(difference.mean) > difference.ci95


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and 95 % interval by Student's t. Unknown in one run is unknown for all."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Estimate(None, None, tuple(values))
    if len(known) == 1:
        return Estimate(known[0], None, tuple(values))
    from scipy.special import stdtrit

    half = float(stdtrit(len(known) - 1, 0.975) * np.std(known, ddof=1) / np.sqrt(len(known)))
    return Estimate(float(np.mean(known)), half, tuple(values))


def flatten(summary: dict[str, Any], prefix: str = "") -> dict[str, float | None]:
    """The numbers of a summary by dotted key; texts and truth values are no measures."""
    flat: dict[str, float | None] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            flat[prefix + key] = value
    return flat


def value_of(key: str, flat: Mapping[str, float | None]) -> float | None:
    """A flattened summary's value of a key that others have. A width that a run never used has share 0 there."""
    return flat.get(key, 0.0 if key.startswith("width_share.") else None)


def keys_of(flats: Iterable[Mapping[str, float | None]]) -> list[str]:
    """The keys that any of some flattened summaries has; the seed is no measure."""
    return list(dict.fromkeys(key for flat in flats for key in flat if key != "seed"))


def aggregate(summaries: Iterable[dict[str, Any]]) -> dict[str, Estimate]:
    """One estimate per key over the runs of one router."""
    flats = [flatten(summary) for summary in summaries]
    if not flats:
        raise RecordError("no runs to compare; give at least one seed")
    return {key: estimate([value_of(key, flat) for flat in flats]) for key in keys_of(flats)}
