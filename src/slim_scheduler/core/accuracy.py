"""Which items a network answers right at which width tuple: the table behind reward, simulator and bound.

Right or wrong, and the margin of the answer, per item and width tuple; a tuple that was not measured is answered by its
nearest neighbour. Its file is `setup/accuracy_files.py`'s. `AccuracyPrior` is as much of it as admission and routers
need; `Expectation` is what a router can expect of an item whose widths it knows in part.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.errors import DataError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Width, WidthTuple


def tuple_name(widths: WidthTuple) -> str:
    """A width tuple as files and tables write it: `0.25,0.5,0.75,1`."""
    return ",".join(f"{width:g}" for width in widths)


class AccuracyPrior(Protocol):
    """Measured top-1 accuracy in [0, 1] of a complete width tuple."""

    def top1(self, widths: WidthTuple) -> float: ...


AGREEMENT = "agreement"  # how `data` begins where nobody knows what is right


class AccuracyTable:
    """Right or wrong per item for measured width tuples of one network.

    `split` is `test` (for evaluation) or `held-out` (held-out training images, for training a router). `margins` are
    those of the same tuples and items; without them nothing can be said of escalation. `precision` is what the network
    computed in.
    """

    def __init__(
        self,
        columns: Mapping[WidthTuple, npt.NDArray[np.bool_]],
        *,
        split: str,
        data: str,
        weights_sha256: str = "",
        margins: Mapping[WidthTuple, npt.NDArray[np.float16]] | None = None,
        calibration: Calibration | None = None,
        precision: str = "fp32",
    ) -> None:
        if not columns:
            raise DataError("an accuracy table needs at least one width tuple; run `slim accuracy`")
        self._columns = {tuple(widths): np.asarray(right, dtype=bool) for widths, right in columns.items()}
        self._margins = {tuple(widths): margin.astype(np.float16) for widths, margin in (margins or {}).items()}
        self.split, self.data, self.weights_sha256 = split, data, weights_sha256
        self.calibration = calibration
        self.precision = precision
        self.tuples: tuple[WidthTuple, ...] = tuple(sorted(self._columns))
        self.segments = len(self.tuples[0])
        self.widths = tuple(sorted({width for widths in self.tuples for width in widths}))
        self.items = len(self._columns[self.tuples[0]])
        sizes = [len(column) for columns in (self._columns, self._margins) for column in columns.values()]
        if self.items < 1 or set(sizes) != {self.items} or any(len(t) != self.segments for t in self.tuples):
            raise DataError(
                f"accuracy table of {data}: its columns differ in items or segments; run `slim accuracy` again"
            )
        if self._margins and self._margins.keys() != self._columns.keys():
            raise DataError(
                f"accuracy table of {data}: margins and answers differ in tuples; run `slim accuracy` again"
            )
        self._top1 = {widths: float(right.mean()) for widths, right in self._columns.items()}
        self._nearest: dict[WidthTuple, WidthTuple] = {}
        self._priors: dict[WidthTuple, float] = {}

    @property
    def agreement(self) -> str:
        """What the shares of right answers are where the images had no labels: agreement with whom on what; else
        empty."""
        return self.data if self.data.startswith(AGREEMENT) else ""

    def correct(self, widths: WidthTuple) -> npt.NDArray[np.bool_]:
        """Right or wrong for each item, (items,), at a whole width tuple."""
        return self._columns[self._measured(tuple(widths))]

    @property
    def has_margins(self) -> bool:
        return bool(self._margins)

    def margin(self, widths: WidthTuple) -> npt.NDArray[np.float16]:
        """Difference of the two highest softmax values of each item's answer, (items,), in [0, 1]."""
        if not self._margins:
            raise DataError(f"accuracy table of {self.data} has no margins; run `slim accuracy` again")
        return self._margins[self._measured(tuple(widths))]

    def top1(self, widths: WidthTuple) -> float:
        """Share of items answered right, in [0, 1]."""
        return self._top1[self._measured(tuple(widths))]

    def prior(self, prefix: WidthTuple) -> float:
        """Expected top-1 of an item that ran `prefix` so far: the mean over all completions (method, section 4)."""
        prefix = tuple(prefix)
        if prefix not in self._priors:
            rest = self.segments - len(prefix)
            if rest < 0:
                raise DataError(f"width tuple {prefix} is longer than the network's {self.segments} segments")
            completions = itertools.product(self.widths, repeat=rest)
            self._priors[prefix] = float(np.mean([self.top1(prefix + tail) for tail in completions]))
        return self._priors[prefix]

    def percentages(self) -> dict[str, float]:
        """Top-1 in percent by tuple name, as `slim accuracy --json` prints it."""
        return {tuple_name(widths): round(100 * self._top1[widths], 2) for widths in self.tuples}

    def _measured(self, widths: WidthTuple) -> WidthTuple:
        """The tuple itself where measured, else the nearest (sum of absolute differences; ties to the narrower)."""
        if widths in self._columns:
            return widths
        if widths not in self._nearest:
            if len(widths) != self.segments:
                raise DataError(f"width tuple {widths} has {len(widths)} widths, the network {self.segments} segments")
            self._nearest[widths] = min(
                self.tuples, key=lambda t: (sum(abs(a - b) for a, b in zip(t, widths, strict=True)), t)
            )
        return self._nearest[widths]


class Expectation:
    """Means of the measured top-1 over the width tuples that agree with what is known: a head tells its previous
    width, not all the widths before, and what is unknown, before and after, is averaged over evenly."""

    def __init__(self, shape: ModelShape, accuracy: AccuracyPrior) -> None:
        self._top1 = {
            widths: accuracy.top1(widths) for widths in itertools.product(shape.widths, repeat=shape.segments)
        }
        self._known: dict[tuple[int, Width | None, WidthTuple], float] = {}
        self.mean = sum(self._top1.values()) / len(self._top1)

    def top1(self, segment: int, previous_width: Width | None, widths: WidthTuple) -> float:
        """Of an item whose last segment ran at `previous_width`, if it goes on with `widths` from `segment` on."""
        key = (segment, previous_width, widths)
        if key not in self._known:
            agree = [
                top1
                for whole, top1 in self._top1.items()
                if whole[segment : segment + len(widths)] == widths
                and (previous_width is None or whole[segment - 1] == previous_width)
            ]
            self._known[key] = sum(agree) / len(agree)
        return self._known[key]
