"""How far this process is behind with the requests that it took.

The dispatcher refuses what its servers cannot do by the deadline. Where requests are so small that taking them is the
work, they wait before they get there: in this process. So it counts them from their first byte, knows how many it
answers per second when it has no pause, and looks whether its event loop runs late.
"""

import asyncio
import time

from slim_scheduler.core.admission import Capacity
from slim_scheduler.core.types import Seconds
from slim_scheduler.frontend.refusal import Kind, Refusal

# Of a deadline that may be filled by what was taken before: a request has waited a turn of the loop when it is read,
# and the turn that follows is as long.
SHARE = 0.4
LATE_SHARE = 0.1  # of a deadline that the loop must be late: else requests wait for servers, not for this process
TICK: Seconds = 0.02


class Pace:
    """Requests in hand, the rate at which they end while there is always one, and how late the loop runs."""

    def __init__(self) -> None:
        self._open = 0
        self._capacity = Capacity(segments=1)
        self._ticking = False
        self._due: Seconds = 0.0
        self._late: Seconds = 0.0

    def came(self) -> None:
        self._capacity.arrived(self._open)
        self._open += 1
        if not self._ticking:
            self._ticking = True
            self._late = 0.0
            self._next()

    def went(self) -> None:
        self._open -= 1
        self._capacity.worked(1, time.monotonic())

    def too_late(self, deadline: Seconds) -> Refusal | None:
        """The refusal of a request with this deadline, in seconds from now, if it would come too late."""
        wait = self._capacity.wait(self._open)
        if wait is None or wait <= SHARE * deadline or self._late <= LATE_SHARE * deadline:
            return None
        message = f"about {wait * 1e3:.0f} ms of requests wait and the deadline is in {deadline * 1e3:.0f} ms"
        return Refusal(Kind.UNAVAILABLE, message, max(0.1, wait - SHARE * deadline))

    def _next(self) -> None:
        self._due = time.monotonic() + TICK
        asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._late = time.monotonic() - self._due
        self._ticking = self._open > 0
        if self._ticking:
            self._next()
