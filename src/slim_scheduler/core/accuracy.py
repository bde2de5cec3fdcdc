"""Which items a network answers right at which width tuple: the table behind reward, simulator and bound.

Right or wrong, and the margin of the answer, per item and width tuple; a tuple that was not measured is answered by its
nearest neighbour. Its file is `setup/accuracy_files.py`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.errors import DataError
from slim_scheduler.core.types import WidthTuple


def tuple_name(widths: WidthTuple) -> str:
    """A width tuple as files and tables write it: `0.25,0.5,0.75,1`."""
    return ",".join(f"{width:g}" for width in widths)


class AccuracyTable:
    """Right or wrong per item for measured width tuples of one network.

    `split` is `test` (for evaluation) or `held-out` (held-out training images, for training a router). `margins` are
    those of the same tuples and items; without them nothing can be said of escalation.
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
    ) -> None:
        if not columns:
            raise DataError("an accuracy table needs at least one width tuple; run `slim accuracy`")
        self._columns = {tuple(widths): np.asarray(right, dtype=bool) for widths, right in columns.items()}
        self._margins = {tuple(widths): margin.astype(np.float16) for widths, margin in (margins or {}).items()}
        self.split, self.data, self.weights_sha256 = split, data, weights_sha256
        self.calibration = calibration
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
