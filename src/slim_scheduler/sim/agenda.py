"""Simulated time: what happens next. Deterministic, because ties are broken by priority and then by order of entry.

It knows nothing of what it runs: an entry is a function and its one argument.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from slim_scheduler.core.types import Seconds

# Of what happens at the same time, this comes first to last: what frees devices and tells of it before new work,
# routing after all arrivals, a sample of the device after what changed it, and the end of the run last of all.
FAULT, DEVICE, MESSAGE, ARRIVAL, ROUTE, SAMPLE, TIMER, END = range(8)


class Agenda:
    """The event heap and the simulated clock."""

    __slots__ = ("_heap", "_sequence", "now", "steps")

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.steps = 0  # so far
        self._heap: list[tuple[Seconds, int, int, Callable[[Any], None], Any]] = []
        self._sequence = 0

    def at(self, time: Seconds, priority: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """Calls `action(argument)` at `time`; at once, but after what is going on now, if that has passed."""
        self._sequence = sequence = self._sequence + 1
        heappush(self._heap, (time if time > self.now else self.now, priority, sequence, action, argument))

    def step(self) -> None:
        """Does exactly one thing: the next. Raises IndexError when there is none."""
        self.now, _, _, action, argument = heappop(self._heap)
        self.steps += 1
        action(argument)

    def __len__(self) -> int:
        return len(self._heap)
