"""How much work can be done per second, from what was done while work waited."""

from slim_scheduler.core.types import Seconds

WINDOW: Seconds = 0.1  # of one look at the capacity, if it saw enough tasks
FIRST_WINDOW: Seconds = 0.02  # until then nothing is refused for its deadline, and a tenth of a second fills a queue
LEAST_TASKS = 32
LONGEST_WINDOW: Seconds = 2.0


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
