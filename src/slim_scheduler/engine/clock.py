"""The live host's time: monotonic seconds since the run began. Wall time is never read, so setting it changes nothing.

`Timers` turns the machines' `WakeAt` commands into calls on the event loop. It owns no decision: a wake-up that comes
late is only late, and a spare one does no harm.
"""

import asyncio
import heapq
import time
from collections.abc import Callable

from slim_scheduler.core.types import Seconds


class MonotonicClock:
    """Seconds since `restart`, unaffected by changes of the wall clock."""

    def __init__(self) -> None:
        self._origin = time.monotonic()

    def restart(self) -> None:
        self._origin = time.monotonic()

    def now(self) -> Seconds:
        return time.monotonic() - self._origin


class Timers:
    """Calls `fire(name)` at or after each time asked for. One handle on the loop, for the earliest."""

    def __init__(self, clock: MonotonicClock, fire: Callable[[str], None]) -> None:
        self._clock = clock
        self._fire = fire
        self._heap: list[tuple[Seconds, str]] = []
        self._asked: set[tuple[Seconds, str]] = set()
        self._handle: asyncio.TimerHandle | None = None

    def wake(self, name: str, at: Seconds) -> None:
        if (at, name) in self._asked:
            return
        self._asked.add((at, name))
        heapq.heappush(self._heap, (at, name))
        if self._heap[0] == (at, name):
            self._arm()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._heap.clear()
        self._asked.clear()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        wait = max(0.0, self._heap[0][0] - self._clock.now())
        self._handle = asyncio.get_running_loop().call_later(wait, self._due)

    def _due(self) -> None:
        self._handle = None
        due: dict[str, None] = {}  # ordered, one call per machine however many of its timers are due
        now = self._clock.now()
        while self._heap and self._heap[0][0] <= now:  # the loop may call up to its resolution too early
            entry = heapq.heappop(self._heap)
            self._asked.discard(entry)
            due[entry[1]] = None
        for name in due:
            self._fire(name)
        if self._heap and self._handle is None:
            self._arm()
