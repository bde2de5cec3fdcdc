"""One clock for the whole cluster: every server tells time as the dispatcher does.

The router measures the offset of each server's monotonic clock from the four times of every exchange, as NTP does,
and trusts the exchange that lost the least time on the way. Wall clocks are never read.
"""

import time
from collections import deque

from slim_scheduler.core.types import Seconds
from slim_scheduler.engine.clock import MonotonicClock

EXCHANGES = 64  # the best of so many recent ones: a few seconds, in which clocks drift apart by less than 1 ms


class OffsetEstimate:
    """The router's: what to add to a server's clock to get the dispatcher's."""

    def __init__(self) -> None:
        self._exchanges: deque[tuple[Seconds, Seconds]] = deque(maxlen=EXCHANGES)

    def add(self, sent: Seconds, polled: Seconds, replied: Seconds, received: Seconds) -> None:
        """`sent` and `received` on the dispatcher's clock, `polled` and `replied` on the server's."""
        on_the_way = (received - sent) - (replied - polled)
        self._exchanges.append((on_the_way, ((sent - polled) + (received - replied)) / 2))

    def clear(self) -> None:
        """The server may run on another machine now."""
        self._exchanges.clear()

    @property
    def offset(self) -> Seconds:
        return min(self._exchanges)[1]


class SharedClock(MonotonicClock):
    """The server's: the dispatcher's time as well as it is known. Never goes back when the offset is corrected."""

    def __init__(self, offset: Seconds) -> None:
        super().__init__()
        self.offset = offset
        self._last = float("-inf")

    def now(self) -> Seconds:
        self._last = max(self._last, time.monotonic() + self.offset)
        return self._last
