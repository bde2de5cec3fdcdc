"""Requests that were read and understood and wait for this process, a few at a time between two looks at the sockets.

The dispatcher refuses what its servers cannot do by the deadline. Where requests are so small that taking them is the
work, the event loop is never idle and they wait here. Who would be answered too late is refused at once, for a fraction
of what an answer costs. When that is follows from how many are unanswered and how many were taken per second while the
loop was never idle, which falls with what refusals and other processes cost, as it should.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from slim_scheduler.core.dispatch.admission import Capacity
from slim_scheduler.core.types import Seconds
from slim_scheduler.serve.decode import InferenceCall

if TYPE_CHECKING:
    from slim_scheduler.serve.http.connection import Connection
    from slim_scheduler.serve.http.request import HttpRequest
    from slim_scheduler.serve.repository import Served

AT_ONCE = 32  # a full batch; more would keep answers and refusals waiting
IN_HAND = 2 * AT_ONCE  # taken and not answered, at least, where the loop is never idle: one batch runs, one is prepared
BUSY = 0.7  # share of a window that the loop's thread works: the rest is what other processes take of its core
WINDOW: Seconds = 0.02
PAUSE: Seconds = 0.005  # longer than brief batches take


class WaitingRequest(msgspec.Struct):
    """A request that was read whole and understood."""

    connection: "Connection"
    request: "HttpRequest"
    served: "Served"
    call: InferenceCall


Take = Callable[[WaitingRequest], "asyncio.Future[None] | None"]


class Intake:
    """One model's requests in the order in which they were read. Each connection has one at most, which bounds
    them.

    `take` begins a request and returns what is done when it is answered, or None where nobody waits for it any more.
    `most` is how many may be in hand while the loop is busy.
    """

    def __init__(self, take: Take, most: Callable[[], int]) -> None:
        self.items = 0  # of the requests that wait, or were taken and have not come to the dispatcher
        self._take = take
        self._most = most
        self._in_hand = 0
        self._unanswered = 0  # items that wait or are in hand
        self._waiting: deque[WaitingRequest] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._busy = False
        self._began, self._worked = time.monotonic(), time.thread_time()
        self._capacity = Capacity(1)

    def put(self, waiting: WaitingRequest) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._capacity.arrived(self._unanswered if self._busy else 0)
        self._waiting.append(waiting)
        self.items += len(waiting.call.items)
        self._unanswered += len(waiting.call.items)

    def wait(self) -> Seconds:
        """How long until who comes now would be answered, as far as it depends on this process; 0 while that is not
        known and nobody waits."""
        first = time.monotonic() - self._waiting[0].request.read if self._waiting else 0.0
        return max(first, self._capacity.wait(self._unanswered) or 0.0)

    def _next(self, paused: bool = False) -> None:
        waiting, loop = self._waiting, asyncio.get_running_loop()
        self._pause = None
        self._look()
        room = min(AT_ONCE, self._most() - self._in_hand) if self._busy else AT_ONCE
        if room <= 0 or (room < AT_ONCE and not paused):
            # A batch that ends meanwhile makes room for a full one; where none does, the servers have more at a time.
            self._pause = loop.call_later(PAUSE, self._next, True)
            return
        taken = 0
        for _ in range(min(room, len(waiting))):
            request = waiting.popleft()
            items = len(request.call.items)
            taken += items
            task = self._take(request)
            if task is None:
                self._unanswered -= items
            else:
                self._in_hand += 1
                task.add_done_callback(partial(self._ended, items))
        self._capacity.worked(taken, time.monotonic())
        loop.call_soon(self._begun, taken)  # after the first steps of these tasks
        if waiting:
            loop.call_soon(self._next)

    def _begun(self, items: int) -> None:
        self.items -= items

    def _ended(self, items: int, _: object) -> None:
        self._in_hand -= 1
        self._unanswered -= items
        if self._pause is not None and self._most() - self._in_hand >= AT_ONCE:
            self._pause.cancel()
            self._pause = None
            asyncio.get_running_loop().call_soon(self._next)

    def _look(self) -> None:
        """Whether the loop's thread has worked for all of the last window."""
        now, worked = time.monotonic(), time.thread_time()
        if now - self._began >= WINDOW:
            self._busy = worked - self._worked >= BUSY * (now - self._began)
            self._began, self._worked = now, worked
