"""Which arrivals are taken, and which widths a request's constraints leave to the router.

Owns the waiting limit, the estimates of when to come back and of whether a deadline can be kept, and the resolution of
fixed widths and accuracy floors. The dispatcher asks; nothing here changes an item.
"""

from itertools import product
from typing import Protocol

from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Constraints, Request, Seconds, Width, WidthTuple

DEADLINE_SHARE = 0.5  # of the time to the deadline that may be filled: the rest is for what varies
WINDOW: Seconds = 0.1  # of one look at the capacity, if it saw enough tasks
FIRST_WINDOW: Seconds = 0.02  # until then nothing is refused for its deadline, and a tenth of a second fills a queue
LEAST_TASKS = 32
LONGEST_WINDOW: Seconds = 2.0
RETRY_AFTER_RANGE = (0.1, 10.0)  # seconds: sooner is a busy loop, later is a guess


class AccuracyPrior(Protocol):
    """Measured top-1 accuracy in [0, 1] of a complete width tuple."""

    def top1(self, widths: WidthTuple) -> float: ...


class Capacity:
    """How many items per second the servers, or the process before them, can do: what they did while work waited.

    Counts finished tasks, also of items that expired meanwhile: in a collapse nothing else would be seen. Only windows
    in which every arrival found work held up tell the rate; of the others it is that of the arrivals, and the servers
    can do at least that much.
    """

    def __init__(self, segments: int) -> None:
        self._segments = segments
        self._start: Seconds = 0.0
        self._tasks = 0
        self._always_waiting = False
        self._rate: float | None = None

    def arrived(self, held_up: int) -> None:
        if not held_up:
            self._always_waiting = False

    def worked(self, tasks: int, now: Seconds) -> None:
        self._tasks += tasks
        elapsed = now - self._start
        window = FIRST_WINDOW if self._rate is None else WINDOW
        if elapsed < window or (self._tasks < LEAST_TASKS and elapsed < LONGEST_WINDOW):
            return
        rate = self._tasks / self._segments / elapsed
        if self._always_waiting:
            self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        elif self._rate is not None:
            self._rate = max(self._rate, rate)
        self._start, self._tasks, self._always_waiting = now, 0, True

    def wait(self, in_flight: int) -> Seconds | None:
        """How long what was taken takes to end (Little's law). None: never been at capacity."""
        return in_flight / self._rate if self._rate else None


class Admission:
    """Arrival limits and width choices of one dispatcher."""

    def __init__(self, shape: ModelShape, max_waiting: int, accuracy: AccuracyPrior | None) -> None:
        self._shape = shape
        self._max_waiting = max_waiting
        self._accuracy = accuracy
        self._choices: dict[tuple[int, tuple[Constraints, WidthTuple]], tuple[Width, ...]] = {}
        self._window_start: Seconds = 0.0
        self._window_count = 0
        self._rate = 0.0  # items per second over the last full second
        self._capacity = Capacity(shape.segments)

    def refuse(
        self, request: Request, waiting: int, held_up: int, in_flight: int, now: Seconds
    ) -> tuple[str, Seconds | None] | None:
        """Why a request cannot be taken, and when to try again if that would help. None: take it.

        `waiting` counts tasks in the global FIFO, `held_up` those that no server had credit for, `in_flight` all items
        that were taken and have not ended.
        """
        if request.constraints is not None:
            wrong = self._unmet(request.constraints)
            if wrong is not None:
                return wrong, None
        if waiting + len(request.items) > self._max_waiting:
            reason = f"{waiting} items wait and {len(request.items)} more came; the limit is {self._max_waiting}"
            least, most = RETRY_AFTER_RANGE
            return reason, max(least, min(most, waiting / self._rate if self._rate else most))
        self._capacity.arrived(held_up)
        return self.too_late(request.deadline - now, in_flight) if request.deadline is not None and held_up else None

    def too_late(self, slack: Seconds, in_flight: int) -> tuple[str, Seconds] | None:
        """Why what has a deadline in `slack` is not taken while work is held up, and when to try again; None: take it.

        Work that would miss its deadline is not taken: beyond the peak, a FIFO would let all of it expire.
        """
        wait = self._capacity.wait(in_flight)
        if wait is None or wait <= DEADLINE_SHARE * slack:
            return None
        least, most = RETRY_AFTER_RANGE
        reason = f"about {wait * 1e3:.0f} ms of work wait and the deadline is in {slack * 1e3:.0f} ms"
        return reason, max(least, min(most, wait - DEADLINE_SHARE * slack))

    def widths(self, segment: int, bounds: tuple[Constraints, WidthTuple] | None) -> tuple[Width, ...]:
        """The widths a decision may choose. `bounds` pairs the constraints with the widths that ran so far."""
        if bounds is None:
            return self._shape.widths
        found = self._choices.get((segment, bounds))
        if found is None:
            found = self._choices[segment, bounds] = self._resolve(segment, *bounds)
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

    def _unmet(self, constraints: Constraints) -> str | None:
        shape = self._shape
        if constraints.widths is not None:
            wrong = [w for w in constraints.widths if w not in shape.widths]
            if wrong or len(constraints.widths) != shape.segments:
                served = ", ".join(f"{w:g}" for w in shape.widths)
                return f"widths {constraints.widths} cannot be served: need {shape.segments}, each one of {served}"
        floor = constraints.accuracy_floor
        if floor is not None:
            if self._accuracy is None:
                return "accuracy_floor needs a model with measured accuracy; run `slim accuracy` on it"
            best = self._best(constraints.widths or ())
            if not floor <= best:
                return f"accuracy_floor {floor:g} is above the best expected accuracy, {best:.4f}"
        return None

    def _resolve(self, segment: int, constraints: Constraints, prefix: WidthTuple) -> tuple[Width, ...]:
        if constraints.widths is not None:
            return (constraints.widths[segment],)
        assert constraints.accuracy_floor is not None
        reach = {width: self._best((*prefix, width)) for width in self._shape.widths}
        meets = tuple(width for width, best in reach.items() if best >= constraints.accuracy_floor)
        # A wider instance than requested may have led off the path: then the best that is left.
        return meets or (max(reach, key=lambda width: reach[width]),)

    def _best(self, prefix: WidthTuple) -> float:
        """The highest expected accuracy that a prefix can still reach."""
        assert self._accuracy is not None
        rest = self._shape.segments - len(prefix)
        return max(self._accuracy.top1((*prefix, *tail)) for tail in product(self._shape.widths, repeat=rest))
