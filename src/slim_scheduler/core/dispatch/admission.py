"""Which requests are taken, and which widths a request's constraints leave to the router.

Owns the waiting limit, the estimates of when to come back and of whether a deadline can be kept, for both queues: what
a front end has read and offered (`offers.py`), and what the dispatcher has. Owns the resolution of fixed widths and
accuracy floors too. The dispatcher asks; nothing here changes an item.
"""

from collections.abc import Sequence
from itertools import product

from slim_scheduler.core.accuracy import AccuracyPrior
from slim_scheduler.core.dispatch.capacity import Capacity
from slim_scheduler.core.dispatch.offers import Offers
from slim_scheduler.core.router.escalation import Choice, is_wider
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Request, Seconds, TaskConstraints, Width, WidthTuple

DEADLINE_SHARE = 0.5  # of the time to the deadline that may be filled: the rest is for what varies
FULL_RETRY_AFTER: Seconds = 1.0
MOST_CHOICES = 4096  # combinations of constraints and widths so far that are remembered
RETRY_AFTER_RANGE = (0.1, 10.0)  # seconds: sooner is a busy loop, later is a guess


class Admission:
    """Arrival limits and width choices of one dispatcher. `pairs` are plans of two passes that a floor may count on;
    `calibrated`: answers have a confidence."""

    def __init__(
        self,
        shape: ModelShape,
        max_waiting: int,
        accuracy: AccuracyPrior | None,
        calibrated: bool = False,
        pairs: Sequence[Choice] = (),
    ) -> None:
        self._shape = shape
        self._max_waiting = max_waiting
        self._accuracy = accuracy
        self._calibrated = calibrated
        self._pairs = pairs
        self._choices: dict[tuple[int, TaskConstraints, WidthTuple], tuple[Width, ...]] = {}
        self._window_start: Seconds = 0.0
        self._window_count = 0
        self._rate = 0.0  # items per second over the last full second
        self._capacity = Capacity(shape.segments)
        self._most_accurate = self._best(()) if accuracy is not None else 0.0
        self.offers = Offers()

    def refuse_offer(
        self, request: Request, waiting: int, held_up: int, in_flight: int, now: Seconds
    ) -> tuple[str, Seconds | None] | None:
        """Why a request that a front end has read may not come in, and when to try again if that would help. None: it
        waits there.

        The counts are those of `refuse`.
        """
        items, offers = len(request.items), self.offers
        wrong = self.unmet(request.constraints, request.confidence_floor)
        if wrong is not None:
            return wrong, None
        if items > self._max_waiting:
            return self._too_large(items)
        if waiting + offers.items + items > self._max_waiting:
            return f"the queue is full: {items} items came and the limit is {self._max_waiting}", FULL_RETRY_AFTER
        if request.deadline is not None:
            late = self._late_offer(request.deadline - now, held_up, in_flight, now)
            if late is not None:
                return late
        offers.add(request)
        return None

    def _late_offer(self, slack: Seconds, held_up: int, in_flight: int, now: Seconds) -> tuple[str, Seconds] | None:
        wait = self.offers.wait(now)
        if slack <= 0:
            return "the deadline passed before the request could be taken; allow more time", wait
        if wait > DEADLINE_SHARE * slack:
            return f"an answer takes {wait * 1e3:.0f} ms at this load and the deadline is in {slack * 1e3:.4g} ms", wait
        if not held_up and not self.offers.items:
            return None
        return self.too_late(slack, in_flight + self.offers.items)

    def refuse(
        self, request: Request, waiting: int, held_up: int, in_flight: int, now: Seconds
    ) -> tuple[str, Seconds | None] | None:
        """Why a request cannot be taken, and when to try again if that would help. None: take it.

        `waiting` counts tasks in the global FIFO, `held_up` those that no server had credit for, `in_flight` all items
        that were taken and have not ended.
        """
        wrong = self.unmet(request.constraints, request.confidence_floor)
        if wrong is not None:
            return wrong, None
        if len(request.items) > self._max_waiting:
            return self._too_large(len(request.items))
        if waiting + len(request.items) > self._max_waiting:
            reason = f"{waiting} items wait and {len(request.items)} more came; the limit is {self._max_waiting}"
            least, most = RETRY_AFTER_RANGE
            return reason, max(least, min(most, waiting / self._rate if self._rate else most))
        self._capacity.arrived(held_up)
        return self.too_late(request.deadline - now, in_flight) if request.deadline is not None and held_up else None

    def _too_large(self, items: int) -> tuple[str, None]:
        return f"{items} items came at once and at most {self._max_waiting} may wait; send fewer in one request", None

    def too_late(self, slack: Seconds, in_flight: int) -> tuple[str, Seconds] | None:
        """Why what has a deadline in `slack` is not taken while work is held up, and when to try again; None: take it.

        Work that would miss its deadline is not taken: beyond the peak, a FIFO would let all of it expire.
        """
        wait = self._capacity.wait(in_flight)
        if wait is None or wait <= DEADLINE_SHARE * slack:
            return None
        least, most = RETRY_AFTER_RANGE
        reason = f"about {wait * 1e3:.0f} ms of work wait and the deadline is in {slack * 1e3:.4g} ms"
        return reason, max(least, min(most, wait - DEADLINE_SHARE * slack))

    def widths(self, segment: int, constraints: TaskConstraints, ran: WidthTuple) -> tuple[Width, ...]:
        """The widths that constraints leave to a decision; `ran` so far."""
        found = self._choices.get((segment, constraints, ran))
        if found is None:
            if len(self._choices) >= MOST_CHOICES:  # clients choose the floors
                self._choices.clear()
            found = self._choices[segment, constraints, ran] = self._resolve(segment, constraints, ran)
        return found

    def completed(self, now: Seconds) -> None:
        """Counts an answered item towards the rate that retry-after is estimated from."""
        elapsed = now - self._window_start
        if elapsed >= 1.0:
            self._rate = self._window_count / elapsed
            self._window_start, self._window_count = now, 0
        self._window_count += 1

    def worked(self, tasks: int, now: Seconds) -> None:
        """A batch of so many tasks came back."""
        self._capacity.worked(tasks, now)

    def second_for_floor(self, floor: float, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The second width tuple of an item with an accuracy floor that ran so; None: it is answered.

        The cheapest plan of two passes that begins so and meets the floor says whether. Where none does, a wider
        instance led off the path that was meant, and all go again at the widest.
        """
        assert self._accuracy is not None
        if self._accuracy.top1(ran) >= floor:
            return None
        plans = [pair for pair in self._pairs if pair.first == ran and pair.accuracy >= floor]
        if plans:
            plan = min(plans, key=lambda pair: (pair.again, pair.threshold, pair))
            second = plan.second if margin < plan.threshold else None
            return second if second is not None and is_wider(second, ran) else None
        widest = (max(self._shape.widths),) * self._shape.segments
        return widest if self._accuracy.top1(widest) > self._accuracy.top1(ran) else None

    def unmet(self, constraints: TaskConstraints | None, confidence_floor: float | None) -> str | None:
        """Why what a request asks beyond an answer can never be met; None: it can."""
        if confidence_floor is not None and not self._calibrated:
            return "confidence_floor needs a model whose answers were measured; run `slim accuracy` on it"
        shape = self._shape
        if constraints is None:
            return None
        if constraints.widths is not None:
            wrong = [w for w in constraints.widths if w not in shape.widths]
            if wrong or len(constraints.widths) != shape.segments:
                served = ", ".join(f"{w:g}" for w in shape.widths)
                return f"widths {constraints.widths} cannot be served: need {shape.segments}, each one of {served}"
        floor = constraints.accuracy_floor
        if floor is not None:
            if self._accuracy is None:
                return "accuracy_floor needs a model with measured accuracy; run `slim accuracy` on it"
            best = self._most_accurate if constraints.widths is None else self._accuracy.top1(constraints.widths)
            if not floor <= best:
                whose = "the best" if constraints.widths is None else "these widths'"
                return f"accuracy_floor {floor:g} is above {whose} expected accuracy, {best:.4f}; ask for at most that"
        return None

    def _resolve(self, segment: int, constraints: TaskConstraints, prefix: WidthTuple) -> tuple[Width, ...]:
        if constraints.widths is not None:
            return (constraints.widths[segment],)
        assert constraints.accuracy_floor is not None
        reach = {width: self._best((*prefix, width)) for width in self._shape.widths}
        meets = tuple(width for width, best in reach.items() if best >= constraints.accuracy_floor)
        # A wider instance than requested may have led off the path: then the best that is left.
        return meets or (max(reach, key=lambda width: reach[width]),)

    def _best(self, prefix: WidthTuple) -> float:
        """The highest expected accuracy that a prefix can still reach, in one pass or in two."""
        assert self._accuracy is not None
        rest = self._shape.segments - len(prefix)
        in_two = [pair.accuracy for pair in self._pairs if pair.first[: len(prefix)] == prefix]
        in_one = [self._accuracy.top1((*prefix, *tail)) for tail in product(self._shape.widths, repeat=rest)]
        return max(in_one + in_two)
