"""Requests that were read and wait for this process, which takes a few between two looks at its sockets.

Who may come in, and who of those that wait comes next, is the engine's dispatcher's decision (`core/dispatch/offers.py`
says why they wait). This keeps the requests, tells how much the event loop's thread works, and begins those that are
named.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from slim_scheduler.core.messages import TakeOffered
from slim_scheduler.core.types import RequestId, Seconds
from slim_scheduler.serve.decode import InferenceCall

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import Offer, SlimEngine
    from slim_scheduler.serve.http.connection import Connection
    from slim_scheduler.serve.http.request import HttpRequest
    from slim_scheduler.serve.repository import Served

WINDOW: Seconds = 0.02  # of one look at the thread


class WaitingRequest(msgspec.Struct):
    """A request that was read whole and understood, and may come in."""

    connection: "Connection"
    request: "HttpRequest"
    served: "Served"
    call: InferenceCall
    offer: "Offer"


Begin = Callable[[WaitingRequest], "asyncio.Future[None] | None"]


class Intake:
    """The requests that were offered to one engine. Each connection has one at most, which bounds them.

    `begin` begins a request and returns what is done when it is answered, or None where nobody waits for it any more.
    """

    def __init__(self, engine: "SlimEngine", begin: Begin) -> None:
        self.engine = engine
        self._begin = begin
        self._waiting: dict[RequestId, WaitingRequest] = {}
        self._next: asyncio.Handle | None = None
        self._load = 0.0
        self._since, self._worked = time.monotonic(), time.thread_time()
        engine.on_take(self._take)

    def put(self, waiting: WaitingRequest) -> None:
        self._waiting[waiting.offer.request_id] = waiting
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self, after_pause: bool = False) -> None:
        self._next = None
        if self.engine.running:
            self.engine.turn_front(self._share_of_work(), after_pause)
        else:  # another has taken its place, and serves them
            self._take(TakeOffered(tuple(self._waiting)))

    def _take(self, command: TakeOffered) -> None:
        for request_id in command.requests:
            waiting = self._waiting.pop(request_id)
            task = self._begin(waiting)
            if task is None:
                self.engine.withdraw(waiting.offer)
            else:
                task.add_done_callback(partial(self._ended, waiting.offer))
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._waiting:
            loop = asyncio.get_running_loop()
            if command.again is None:
                self._next = loop.call_soon(self._turn)
            else:
                self._next = loop.call_later(command.again - self.engine.now(), self._turn, True)

    def _ended(self, offer: "Offer", _: object) -> None:
        self.engine.withdraw(offer)  # in case it was cancelled before it came to the engine

    def _share_of_work(self) -> float:
        """How much of the last window the loop's thread worked."""
        now, worked = time.monotonic(), time.thread_time()
        if now - self._since >= WINDOW:
            self._load = (worked - self._worked) / (now - self._since)
            self._since, self._worked = now, worked
        return self._load
