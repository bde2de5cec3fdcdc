"""When what a front end offered comes in: a few requests between two looks at the sockets.

Which of them, and how many, is the dispatcher's decision (`core/dispatch/offers.py` says why they wait). This asks for
it in the event loop's next turn, or when the dispatcher said, and tells how much the loop's thread works.
"""

import asyncio
import time
from collections.abc import Callable

from slim_scheduler.core.types import Seconds

WINDOW: Seconds = 0.02  # of one look at the thread


class Intake:
    """Calls `turn` with the share of time that the thread works, and whether it waited as long as it was asked to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: Callable[[float, bool], None]) -> None:
        self._loop = loop
        self._turn = turn
        self._next: asyncio.Handle | None = None
        self._load = 0.0
        self._since, self._worked = time.monotonic(), time.thread_time()

    @property
    def due(self) -> bool:
        """Whether a turn is to come."""
        return self._next is not None

    def soon(self) -> None:
        """Something was offered."""
        if self._next is None:
            self._next = self._loop.call_soon(self._due, False)

    def after(self, seconds: Seconds | None) -> None:
        """The next turn comes then, instead of when it was planned; None: none is needed."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if seconds is None:
            return
        if seconds > 0:
            self._next = self._loop.call_later(seconds, self._due, True)
        else:
            self.soon()

    def _due(self, after_pause: bool) -> None:
        self._next = None
        self._turn(self._share_of_work(), after_pause)

    def _share_of_work(self) -> float:
        """How much of the last window the loop's thread worked."""
        now, worked = time.monotonic(), time.thread_time()
        if now - self._since >= WINDOW:
            self._load = (worked - self._worked) / (now - self._since)
            self._since, self._worked = now, worked
        return self._load
