"""The router's channel to one session of a server: it polls what happened, all the time, and takes replies in order.

A block travels with a question of its own, so that its report is the answer to it and needs no further call. Between
blocks, `OPEN_POLLS` are kept open. The channel ends with an error: of Ray, or because the session is over.
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
from slim_scheduler.engine.cluster.wire import BlockMessage, Forget, Poll, PollReply, cut, decode_reply, encode

OPEN_POLLS = 2  # open at least: while one answer travels, the next can already be given
MOST_OPEN_POLLS = 8  # open at most: a server that runs many blocks as one batch answers fewer polls than it gets

Items = npt.NDArray[np.float32]
OnReply = Callable[[PollReply], None]


class SessionEndedError(Exception):
    """The actor runs, but the session it had is over."""


class Channel:
    """`on_reply` gets every reply, in order. `forgotten` says what the server may forget since the last call."""

    def __init__(
        self,
        actor: Any,
        clock: MonotonicClock,
        offset: OffsetEstimate,
        forgotten: Callable[[], Forget],
        on_reply: OnReply,
        hung_limit: Seconds,
    ) -> None:
        self._actor = actor
        self._clock = clock
        self._offset = offset
        self._forgotten = forgotten
        self._on_reply = on_reply
        self._hung_limit = hung_limit
        self._open: set[asyncio.Future[Any]] = set()
        self._early: dict[int, PollReply] = {}
        self._number = 0
        self._heard_at = clock.now()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def until_over(self) -> None:
        """Goes on until the session is over. Raises RayError, SessionEndedError, or TimeoutError for a silent one."""
        self._keep_open()
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
        """No reply is taken any more."""
        self._over.cancel()
        for answer in self._open:
            answer.cancel()
        self._open.clear()

    def deliver(self, message: BlockMessage, items: Items | None) -> None:
        pieces = [] if items is None else cut(items)
        if len(self._open) < MOST_OPEN_POLLS and not self._over.done():
            self._poll(message, pieces)
        else:
            self._actor.deliver.remote(encode(message), *pieces)

    def _keep_open(self) -> None:
        while len(self._open) < OPEN_POLLS:
            self._poll(None, [])

    def _poll(self, message: BlockMessage | None, pieces: list[Any]) -> None:
        sent = self._clock.now()
        poll = Poll(self._offset.offset, self._forgotten(), message)
        answer = asyncio.wrap_future(self._actor.poll.remote(encode(poll), *pieces).future())
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
            self._keep_open()
        except Exception as end:
            self._over.set_exception(end)

    def _take(self, sent: Seconds, answer: bytes | None) -> None:
        if answer is None:
            raise SessionEndedError("its process started again")
        reply = decode_reply(answer)
        self._heard_at = self._clock.now()
        self._offset.add(sent, reply.polled_at, reply.replied_at, self._heard_at)
        self._early[reply.number] = reply
        while self._number in self._early:
            self._number += 1
            self._on_reply(self._early.pop(self._number - 1))
