"""When a device rests because it would do more for it.

Where a profile's `u / slowdown(u)` peaks at a busy share u* below 1, a device that is busy all the time does less than
one that rests now and then. Each second that it is busy then owes 1 / u* - 1 s of rest, and idle time pays. Only the
server's own batches count: it knows of them at once, while a report of the device's utilisation is a telemetry period
old, and a device may have none.
"""

from slim_scheduler.core.server.window import CLOCK_SLACK
from slim_scheduler.core.types import Seconds

PAID_AHEAD: Seconds = 0.1  # busy time whose rest idle time may pay beforehand (lab/2026-11-windows.md)


class Rest:
    """The rest that a device owes: told when the device turns busy and idle, asked whether it rests.

    From any moment to the start of any batch the device is busy for at most u* of the time and `PAID_AHEAD` times
    1 - u*. `best_utilization` is u*, above 0 and at most 1.
    """

    __slots__ = ("_ahead", "_busy", "_each", "_owed", "_since")

    def __init__(self, best_utilization: float) -> None:
        self._each = 1 / best_utilization - 1  # owed per second busy
        self._ahead = -PAID_AHEAD * self._each
        self._owed: Seconds = self._ahead  # at `since`
        self._busy = False
        self._since: Seconds = float("-inf")

    def turn(self, busy: bool, now: Seconds) -> None:
        """The device is busy (or idle) from `now` on."""
        self._owed = self._at(now)
        self._busy, self._since = busy, now

    def due(self, now: Seconds) -> bool:
        """Whether nothing more may start: a device that is busy comes to an end, an idle one rests."""
        return self._at(now) > CLOCK_SLACK

    def until(self) -> Seconds | None:
        """When an idle device has rested, None where it owes nothing."""
        return self._since + self._owed if self._owed > CLOCK_SLACK and not self._busy else None

    def _at(self, now: Seconds) -> Seconds:
        passed = now - self._since
        return self._owed + passed * self._each if self._busy else max(self._owed - passed, self._ahead)
