"""When a message may be read, so that all that are on their way together take a bounded part of memory.

gRPC tells nobody how long a message is before it is there, and takes memory for all of it once somebody reads. Until
then a call takes no more than its flow-control window. So the number of calls that read at a time is bounded: a few,
in the order in which they came; a few more whose message comes slowly, so that they do not keep the others waiting;
and streams, which always read.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpc.aio import EOF

from slim_scheduler.core.types import Bytes, Seconds
from slim_scheduler.serve.allocator import give_back
from slim_scheduler.serve.grpc.message import inflated, is_compressed
from slim_scheduler.serve.limits import MIB, Limits
from slim_scheduler.serve.refusal import Kind, Refusal

AT_ONCE = 4  # of 60 MiB they take about 400 MiB: one of them at a time is copied twice on its way to Python
BRIEF: Seconds = 2.0
SLOW = 2
STREAMS = 8
LARGE: Bytes = MIB  # after such a message, and compressed ones, free memory goes back to the system
GIVE_BACK_AFTER: Seconds = 2.0


class Reader:
    """Reads the messages of all calls of one listener."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(AT_ONCE)
        self._slow = 0
        self._streams = 0
        self._giving_back = False

    async def read(self, context: Any) -> bytes | None:
        """The one message of a call, decompressed; None where the client sends none. Raises Refusal."""
        try:
            async with asyncio.timeout(self._limits.head_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise Refusal(
                Kind.UNAVAILABLE, f"{AT_ONCE} messages are being read and more wait; try again later", 1.0
            ) from None
        turn = _Turn()
        timer = asyncio.get_running_loop().call_later(BRIEF, self._takes_long, turn)
        try:
            async with turn.until:
                message = await self._message(context)
            timer.cancel()
            return None if message is None else await inflated(message, self._limits.body_bytes)
        except TimeoutError:
            raise self._too_slow(turn.slow) from None
        finally:
            timer.cancel()
            if turn.slow:
                self._slow -= 1
            else:
                self._places.release()

    def _takes_long(self, turn: "_Turn") -> None:
        """Lets another call read, and this one read on, if not too many do already."""
        if self._slow == SLOW:
            turn.until.reschedule(0.0)
            return
        turn.slow = True
        turn.until.reschedule(asyncio.get_running_loop().time() + self._limits.body_timeout_s - BRIEF)
        self._slow += 1
        self._places.release()

    def _too_slow(self, slow: bool) -> Refusal:
        if slow:
            return Refusal(Kind.TOO_SLOW, f"the message did not arrive within {self._limits.body_timeout_s:g} s")
        reason = f"the message did not arrive within {BRIEF:g} s, and {SLOW} others that take longer are being read"
        return Refusal(Kind.UNAVAILABLE, f"{reason}; try again later", 1.0)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """While a stream is open. Raises Refusal where too many are."""
        if self._streams == STREAMS:
            raise Refusal(
                Kind.UNAVAILABLE, f"{STREAMS} streams are open; use ModelInfer, which has no such limit, or wait", 1.0
            )
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def read_stream(self, context: Any) -> bytes | None:
        """An open stream's next message, decompressed; None at its end. Raises Refusal."""
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                message = await self._message(context)
        except TimeoutError:
            raise Refusal(
                Kind.TOO_SLOW, f"no message came within {self._limits.idle_timeout_s:g} s; open another stream"
            ) from None
        return None if message is None else await inflated(message, self._limits.body_bytes)

    async def _message(self, context: Any) -> bytes | None:
        message = await context.read()
        if message is EOF:
            return None
        if (len(message) >= LARGE or is_compressed(message)) and not self._giving_back:
            self._giving_back = True
            asyncio.get_running_loop().call_later(GIVE_BACK_AFTER, self._give_back)
        received: bytes = message
        return received

    def _give_back(self) -> None:
        self._giving_back = False
        asyncio.get_running_loop().run_in_executor(None, give_back)


class _Turn:
    """One call's reading: when it is ended, and whether it is one of the slow ones."""

    def __init__(self) -> None:
        self.until = asyncio.timeout(None)
        self.slow = False
