"""Which items run again after their first pass, and at which width tuple.

Three may ask for it, in this order: the request's `confidence_floor`, its `accuracy_floor`, which counts on plans of
two passes, and the router's escalation. The dispatcher asks once per finished first pass.
"""

from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.dispatch.admission import Admission
from slim_scheduler.core.dispatch.items import ItemFlight
from slim_scheduler.core.router.base import Escalation
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, WidthTuple


class SecondPass:
    """`calibration` turns margins into confidence; without it there are no confidence floors."""

    def __init__(
        self, shape: ModelShape, admission: Admission, escalation: Escalation | None, calibration: Calibration | None
    ) -> None:
        self._widest: WidthTuple = (max(shape.widths),) * shape.segments
        self._admission = admission
        self._escalation = escalation
        self._calibration = calibration

    def widths(self, flight: ItemFlight, margin: float | None, now: Seconds) -> WidthTuple | None:
        """The width tuple of an item's second pass; None: it is answered.

        A second pass is begun only where at least as much time is left as the first took, or where the first answer
        would not be taken.
        """
        if flight.first is not None or margin is None:
            return None
        second = self._wanted(flight, margin)
        request = flight.request.request
        if second is None or request.deadline is None or not request.anytime:
            return second
        return second if request.deadline - now >= now - request.arrival else None

    def _wanted(self, flight: ItemFlight, margin: float) -> WidthTuple | None:
        request, ran = flight.request.request, flight.widths
        constraints, floor = request.constraints, request.confidence_floor
        if floor is not None and self._calibration is not None:
            sure = self._calibration.confidence(ran[-1], margin) >= floor
            return None if sure or ran == self._widest else self._widest
        if constraints is None:
            return None if self._escalation is None else self._escalation.second(ran, margin)
        if constraints.widths is None and constraints.accuracy_floor is not None:
            return self._admission.second_for_floor(constraints.accuracy_floor, ran, margin)
        return None
