"""The router's talk with one life of a server: it asks what happened, all the time, and hears the answers in order.

A block travels with a question of its own, so that its report is the answer to it and needs no further call. Between
blocks, `QUESTIONS` are kept open. The talk ends with an error: of Ray, or because the life is over.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.types import Seconds
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.clock import OffsetEstimate
from slim_scheduler.engine.cluster.wire import Ask, Forget, Parcel, Told, cut, decode_told, encode

QUESTIONS = 2  # open at least: while one answer travels, the next can already be given
MOST_QUESTIONS = 8  # open at most: a server that runs many blocks as one batch answers fewer questions than it gets

Items = npt.NDArray[np.float32]
Hear = Callable[[Told], None]


class LifeOverError(Exception):
    """The actor runs, but the life it had is over."""


class Conversation:
    """`hear` gets every answer, in order. `forgotten` says what the server may forget since the last call."""

    def __init__(
        self,
        actor: Any,
        clock: MonotonicClock,
        offset: OffsetEstimate,
        forgotten: Callable[[], Forget],
        hear: Hear,
        hung_limit: Seconds,
    ) -> None:
        self._actor = actor
        self._clock = clock
        self._offset = offset
        self._forgotten = forgotten
        self._hear = hear
        self._hung_limit = hung_limit
        self._open: set[asyncio.Future[Any]] = set()
        self._early: dict[int, Told] = {}
        self._number = 0
        self._heard_at = clock.now()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def until_over(self) -> None:
        """Goes on until the life is over. Raises RayError, LifeOverError, or TimeoutError for one that says nothing."""
        self._ask_enough()
        try:
            while True:
                silent = self._clock.now() - self._heard_at
                await asyncio.wait([self._over], timeout=max(0.0, self._hung_limit - silent))
                if self._over.done():
                    return self._over.result()
                if self._clock.now() - self._heard_at >= self._hung_limit:
                    raise TimeoutError(f"no answer for {self._hung_limit:g} s")
        finally:
            self.close()

    def close(self) -> None:
        """No answer is heard any more."""
        self._over.cancel()
        for answer in self._open:
            answer.cancel()
        self._open.clear()

    def deliver(self, parcel: Parcel, items: Items | None) -> None:
        pieces = [] if items is None else cut(items)
        if len(self._open) < MOST_QUESTIONS and not self._over.done():
            self._ask(parcel, pieces)
        else:
            self._actor.deliver.remote(encode(parcel), *pieces)

    def _ask_enough(self) -> None:
        while len(self._open) < QUESTIONS:
            self._ask(None, [])

    def _ask(self, parcel: Parcel | None, pieces: list[Any]) -> None:
        sent = self._clock.now()
        ask = Ask(self._offset.offset, self._forgotten(), parcel)
        answer = asyncio.wrap_future(self._actor.tell.remote(encode(ask), *pieces).future())
        self._open.add(answer)
        answer.add_done_callback(partial(self._answered, sent))

    def _answered(self, sent: Seconds, answer: "asyncio.Future[Any]") -> None:
        self._open.discard(answer)
        if answer.cancelled():
            return
        error = answer.exception()  # asked for even after the end, or asyncio complains that nobody did
        if self._over.done():
            return
        try:
            if error is not None:
                raise error
            self._take(sent, answer.result())
            self._ask_enough()
        except Exception as end:
            self._over.set_exception(end)

    def _take(self, sent: Seconds, reply: bytes | None) -> None:
        if reply is None:
            raise LifeOverError("its process started again")
        told = decode_told(reply)
        self._heard_at = self._clock.now()
        self._offset.add(sent, told.asked_at, told.told_at, self._heard_at)
        self._early[told.number] = told
        while self._number in self._early:
            self._number += 1
            self._hear(self._early.pop(self._number - 1))
