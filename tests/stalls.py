"""How long this process itself stood still: what a test of a time forgives on a machine that does other things, too.

A task asks the event loop to be called again every few milliseconds and notes how late that was. Whatever kept it
(other processes on the cores, a long computation, garbage collection) kept everything else of this process as well.
"""

import asyncio

LOOK = 0.005
GRAIN = 0.003  # how late a timer of asyncio is on an idle machine: no stall


class Stalls:
    """Made on a running event loop, whose clock it uses."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # (due, came)
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK
            await asyncio.sleep(LOOK)
            came = loop.time()
            if came - due > GRAIN:
                self._late.append((due, came))

    def longest(self, seconds: float) -> float:
        """The longest single stall in the last so many seconds."""
        since = asyncio.get_running_loop().time() - seconds
        return max([came - due for due, came in self._late if came >= since], default=0.0)

    def between(self, begin: float, end: float) -> float:
        """How long the loop stood still from `begin` to `end`, on its own clock. Call it after the next look."""
        overlaps = (min(came, end) - max(due, begin) for due, came in self._late if came > begin and due < end)
        return sum(overlap for overlap in overlaps if overlap > 0.0)

    async def settled(self) -> None:
        """Waits until what happened so far has been looked at."""
        await asyncio.sleep(2 * LOOK)
