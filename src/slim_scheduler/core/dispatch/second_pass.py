"""Which items run again after their first pass, and at which width tuple.

Three may ask for it, in this order: the request's `confidence_floor`, its `accuracy_floor`, which counts on plans of
two passes, and, where a request has neither, the router's escalation. The dispatcher asks once per finished first pass.

Where the first answer is good enough at the deadline, a second pass has to fit like an arrival: into half of the time
that is left. Its expected time is the first pass's, times a ratio: what second passes took lately, over what the first
ones of those items took. So beyond the peak first passes get the devices. Where no second pass ends the ratio goes back
to 1, and they are tried again.
"""

from math import exp

from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.dispatch.admission import DEADLINE_SHARE, Admission
from slim_scheduler.core.dispatch.items import ItemFlight
from slim_scheduler.core.router.base import Escalation
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, WidthTuple

REMEMBERED = 100  # second passes over which times are averaged
FADES: Seconds = 1.0  # time constant with which the ratio goes back to 1 while none ends


class SecondPass:
    """`calibration` turns margins into confidence; without it there are no confidence floors."""

    def __init__(
        self, shape: ModelShape, admission: Admission, escalation: Escalation | None, calibration: Calibration | None
    ) -> None:
        self._widest: WidthTuple = (max(shape.widths),) * shape.segments
        self._admission = admission
        self._escalation = escalation
        self._calibration = calibration
        self._first: Seconds = 0.0  # mean time of the first passes of items whose second one ended lately
        self._second: Seconds = 0.0
        self._last: Seconds = 0.0  # when one ended

    def ended(self, flight: ItemFlight, now: Seconds) -> None:
        """An item was answered, or its deadline came. If it was on a second pass, that took so long at least."""
        request = flight.request.request
        if flight.first is not None and request.deadline is not None and request.anytime:
            self._first += (flight.again_since - request.arrival - self._first) / REMEMBERED
            self._second += (now - flight.again_since - self._second) / REMEMBERED
            self._last = now

    def _ratio(self, now: Seconds) -> float:
        """How many times as long as the first a second pass is expected to take."""
        if self._first <= 0:
            return 1.0
        return 1.0 + (self._second / self._first - 1.0) * exp((self._last - now) / FADES)

    def widths(self, flight: ItemFlight, margin: float | None, now: Seconds) -> WidthTuple | None:
        """The width tuple of an item's second pass; None: it is answered."""
        if flight.first is not None or margin is None:
            return None
        second = self._wanted(flight, margin)
        request = flight.request.request
        if second is None or request.deadline is None or not request.anytime:
            return second
        expected = self._ratio(now) * (now - request.arrival)
        return second if expected <= DEADLINE_SHARE * (request.deadline - now) else None

    def _wanted(self, flight: ItemFlight, margin: float) -> WidthTuple | None:
        request, ran = flight.request.request, flight.widths
        constraints, floor = request.constraints, request.confidence_floor
        if floor is not None and self._calibration is not None:
            if self._calibration.confidence(ran[-1], margin) < floor:
                return None if ran == self._widest else self._widest
            if constraints is None:
                return None
        if constraints is None:
            return None if self._escalation is None else self._escalation.second(ran, margin)
        if constraints.widths is None and constraints.accuracy_floor is not None:
            return self._admission.second_for_floor(constraints.accuracy_floor, ran, margin)
        return None
