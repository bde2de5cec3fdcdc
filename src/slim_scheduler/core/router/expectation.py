"""Expected accuracy as far as a router can know it: a head tells its previous width, not all the widths before.

What is unknown, before and after, is averaged over evenly. The table of whole width tuples is handed in.
"""

from itertools import product

from slim_scheduler.core.dispatch.admission import AccuracyPrior
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Width, WidthTuple


class Expectation:
    """Means of the measured top-1 over the width tuples that agree with what is known."""

    def __init__(self, shape: ModelShape, accuracy: AccuracyPrior) -> None:
        self._top1 = {widths: accuracy.top1(widths) for widths in product(shape.widths, repeat=shape.segments)}
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
