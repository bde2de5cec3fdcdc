"""One client's connection: an asyncio protocol on httptools, the same for every request.

It reads requests one after the other, whole and within the limits, hands each to the front, and writes the answers in
the order of the requests. What a request means is the front's; which connections there are, and when they must end, is
the listener's. Time limits are looked at by the listener's sweep, so that none of them costs a timer per request.
"""

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, Protocol

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from slim_scheduler.serve.compression import too_large
from slim_scheduler.serve.http.known import KnownHeads
from slim_scheduler.serve.http.outbox import Outbox
from slim_scheduler.serve.http.reply import Field, content_length, head_bytes, refused
from slim_scheduler.serve.http.request import HttpRequest, check_head
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal, invalid

log = logging.getLogger(__name__)


class ConnectionState(IntEnum):
    """Where a connection is. A request may be answered while the next one arrives: then the answer decides."""

    HEAD = 0  # the first head is awaited, or a head is arriving
    BODY = 1  # a body is arriving
    ANSWERING = 2  # a whole request is in hand, or its answer is not all sent; what comes meanwhile waits
    IDLE = 3  # between two requests
    LINGERING = 4  # the last answer is out; what still comes is dropped, so that no reset overtakes the answer
    CLOSED = 5


HEAD, BODY, ANSWERING, IDLE, LINGERING, CLOSED = ConnectionState
MOVES: dict[ConnectionState, tuple[ConnectionState, ...]] = {
    HEAD: (BODY, ANSWERING, CLOSED),
    BODY: (ANSWERING, CLOSED),
    ANSWERING: (
        IDLE,
        HEAD,
        BODY,
        LINGERING,
        CLOSED,
    ),
    IDLE: (
        HEAD,
        BODY,
        ANSWERING,
        CLOSED,
    ),
    LINGERING: (CLOSED,),
    CLOSED: (),
}

UNCOUNTED_BYTES = 16 * 1024  # of unsent answers per connection, which are not worth counting
SLICE = 4096  # bytes given to the parser at a time where requests may end: what it reads ahead is bounded by it
MOST_WAITING = 64 * 1024  # bytes behind the request in hand that are taken from the socket
MOST_FIELDS = 128
LINGER_S = 2.0
ABSENT_S = 2.0  # an answer that takes no longer is simply sent
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = (b"connection", b"close")
KEEP = (b"connection", b"keep-alive")


class Front(Protocol):
    """Who knows what requests mean."""

    def check(self, request: HttpRequest, scheme: str) -> int:
        """The longest body that this head may have. Raises Refusal for a request that is not served."""

    def take(self, connection: "Connection", request: HttpRequest) -> None:
        """Takes a whole request, for which it calls `answer`, `begin` and `write`, or `serve` now or later; `when_lost`
        where somebody wants to know."""


class Owner(Protocol):
    """What a connection is told by its listener."""

    front: Front
    limits: Limits
    memory: MemoryBudget
    heads: KnownHeads
    outbox: Outbox
    loop: asyncio.AbstractEventLoop
    connections: "set[Connection]"
    tasks: "set[asyncio.Task[None]]"
    ending: bool


class Connection(asyncio.Protocol):
    """A client's connection. `state` is where it is, `gone` whether the client is."""

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self.state = HEAD
        self._before = HEAD
        self._owner = owner
        self._limits = owner.limits
        self._memory = owner.memory
        self.scheme = "http"
        self.peer: tuple[str, int] | None = None
        self._parser = HttpRequestParser(self)
        self._incoming: HttpRequest | None = None  # the request that is being read
        self._in_hand: HttpRequest | None = None  # the one that is being answered
        self._requests: deque[HttpRequest] = deque()  # whole ones that wait behind it
        self._waiting = bytearray()  # what came behind them
        self._paused = False  # nothing more is taken from the socket
        self._last = False  # nothing is read after what was read
        self._ended: float | None = None  # when the client sent its end; it may still read
        self._advancing = False
        self._upgrading = False
        self._missing = 0  # bytes of the body that are still to come, where its length was said
        self._overhead = self._body = 0  # bytes of the request being read: all, and its body's
        self._task: asyncio.Task[None] | None = None
        self._lost: Callable[[], None] | None = None  # whom to tell if the client goes before it has its answer
        self._begun = False  # the answer in hand has its head out
        self._since = time.monotonic()  # when this state began
        self._unsent = 0  # bytes of answers that count as held until the socket has taken all
        self._unsent_since = 0.0  # since when its client has taken none of them
        self._left = 0  # bytes that its client had not taken at the last sweep
        self._writable: asyncio.Event | None = None

    @property
    def gone(self) -> bool:
        return self.state is CLOSED

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is none of asyncio's classes
        if transport.get_extra_info("ssl_object") is not None:
            self.scheme = "https"
        self.transport.set_write_buffer_limits(high=UNCOUNTED_BYTES, low=0)
        peer = transport.get_extra_info("peername")
        self.peer = (str(peer[0]), int(peer[1])) if peer else None
        owner = self._owner
        owner.connections.add(self)
        if len(owner.connections) > self._limits.connections:
            text = f"{self._limits.connections} connections are open; try again later"
            self._refuse(Refusal(Kind.UNAVAILABLE, text, 1.0))
            self._advance()

    def data_received(self, data: bytes) -> None:
        if self._last:
            return
        if self.state is ANSWERING:
            self._waiting += data
            if len(self._waiting) > MOST_WAITING:
                self._pause_reading(True)
            return
        if len(data) <= (self._missing or SLICE):
            if self._incoming is None:
                self._begin_with(data)
            else:
                self._feed(data)
        else:
            self._waiting += data
            self._read_waiting()
        self._advance()

    def eof_received(self) -> bool:
        self._ended = time.monotonic()
        # What was asked is answered. TLS has no half-closed connections.
        return self.state is ANSWERING and self.scheme == "http"

    def connection_lost(self, error: Exception | None) -> None:
        self._move(CLOSED)
        self._owner.connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        self._sent()
        for request in (self._in_hand, *self._requests, self._incoming):
            if request is not None:
                self._release(request)
        self._requests.clear()
        self._incoming = self._in_hand = None
        lost, self._lost = self._lost, None
        if lost is not None:
            lost()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.Event()
        self._unsent_since = time.monotonic()
        self._left = 0

    def resume_writing(self) -> None:
        self._sent()

    # ---- the front's side

    def serve(self, answering: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs what answers the request in hand; cancelled when the client is gone."""
        task = self._task = self._owner.loop.create_task(answering)
        self._owner.tasks.add(task)
        task.add_done_callback(self._served)
        return task

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Calls if the client is gone before the request in hand is answered."""
        self._lost = tell

    def hold(self, request: HttpRequest, body: bytes) -> None:
        """Gives the request in hand another body, that which was in it. Raises Refusal where there is no room."""
        self._memory.reserve(len(body))
        request.reserved += len(body)
        request.body = body

    def answer(self, status: int, fields: list[Field], body: bytes) -> int:
        """Writes the whole answer to the request in hand; returns its status.

        That is 503 instead where answers that clients do not read take all the memory that there is for them.
        """
        request = self._in_hand
        if request is None:
            return status  # the client is gone
        try:
            self._memory.reserve(len(body))
        except Refusal as refusal:
            status, fields, body = refused(refusal)
            self._memory.used += len(body)  # little, and it must be said
        head = head_bytes(status, (*fields, content_length(body), *self._connection_fields(request)))
        self._write(head if request.method == "HEAD" else head + body, len(body))
        self._finish()
        return status

    def begin(self, status: int, fields: list[Field]) -> None:
        """Writes the head of an answer in pieces."""
        self._begun = True
        if self._in_hand is not None:
            self._write(head_bytes(status, (*fields, *self._connection_fields(self._in_hand))), 0)

    async def write(self, data: bytes, last: bool) -> None:
        """Writes a piece of an answer; returns when the client may have another."""
        if not self.gone:
            self._memory.reserve(len(data))
            self._write(data, len(data))
        while self._writable is not None and not self.gone:
            await self._writable.wait()
        if last and not self.gone:
            self._finish()

    def abort(self) -> None:
        """Breaks the connection off: an answer cannot be completed, or there is no more time."""
        self.transport.abort()

    # ---- the listener's side

    def sweep(self, now: float) -> None:
        """Ends the connection if its client has been too slow."""
        if self._unsent:
            left = self.transport.get_write_buffer_size() + _queued(self.transport, termios.TIOCOUTQ)
            if left < self._left:
                self._unsent_since = now
            self._left = left
            if now - self._unsent_since > self._limits.write_timeout_s:
                self.transport.abort()
                return
        spent = now - self._since
        if self.state in (HEAD, BODY):
            limit = self._limits.head_timeout_s if self.state is HEAD else self._limits.body_timeout_s
            if spent > limit:
                self._refuse(Refusal(Kind.TOO_SLOW, f"the request did not arrive within {limit:g} s"))
                self._advance()
        elif self.state is IDLE:
            if spent > self._limits.idle_timeout_s:
                self.transport.close()
        elif self.state is LINGERING:
            if spent > LINGER_S and not self._unsent:
                self.transport.close()
        elif self._ended is not None and self.state is ANSWERING:
            # Who has sent its end may read on, or be gone, which nothing tells before something is sent to it.
            waits = self._in_hand is not None and not self._begun and self._in_hand.version == "1.1"
            if waits and now - self._ended > ABSENT_S:
                self.transport.write(INTERIM)

    def close_if_quiet(self, now: float, seconds: float) -> None:
        """Ends the connection where for so long nothing has been asked or answered, and nothing has come just now."""
        between = self.state is IDLE or (self.state is HEAD and self._incoming is None)
        if between and now - self._since >= seconds and not _queued(self.transport, termios.FIONREAD):
            self.transport.close()

    # ---- reading

    def _begin_with(self, data: bytes) -> None:
        """Reads what begins a request, and may be all of it."""
        heads = self._owner.heads
        request = heads.find(data)
        if request is not None:
            try:
                self._memory.reserve(len(request.body))
            except Refusal as refusal:
                self._refuse(refusal)
            else:
                request.reserved = len(request.body)
                self._whole(request)
            return
        self._feed(data)
        if self._incoming is None and len(self._requests) == 1 and not self._last:
            heads.learn(data, self._requests[0])

    def _feed(self, data: bytes) -> None:
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._read_again(data[upgrade.args[0] :])
        except HttpParserError as error:
            if not self._last:
                self._refuse(_why(error))
        # Everything that is not body: an honest request has a short head, and chunks longer than their framing.
        if self._overhead - self._body > self._limits.header_bytes + self._body and not self._last:
            text = f"the head or framing has over {self._limits.header_bytes} bytes"
            self._refuse(Refusal(Kind.HEAD_TOO_LARGE, text))

    def _read_waiting(self) -> None:
        waiting = self._waiting
        while waiting and not self._requests and not self._last:
            size = self._missing or SLICE
            piece = bytes(waiting[:size])
            del waiting[:size]
            self._feed(piece)

    def _pause_reading(self, pause: bool) -> None:
        if pause is not self._paused:
            self._paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _read_again(self, rest: bytes) -> None:
        """Reads a request with an Upgrade field as if it had none, as a server may (RFC 9110, 7.8).

        The parser takes such a request for one without a body, so a new one gets the head again, without that field.
        """
        request = self._incoming
        assert request is not None
        self._upgrading = False
        self._parser = HttpRequestParser(self)
        self._overhead = 0
        lines = [b"%s %s HTTP/%s" % (request.method.encode(), request.target, request.version.encode())]
        lines += [b"%s: %s" % field for field in request.fields if field[0] != b"upgrade"]
        self._feed(b"\r\n".join((*lines, b"", b"")))
        while rest and not self._last:
            size = self._missing or SLICE
            piece, rest = rest[:size], rest[size:]
            self._feed(piece)

    def on_message_begin(self) -> None:
        self._incoming = HttpRequest()

    def on_url(self, url: bytes) -> None:
        assert self._incoming is not None
        self._incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._incoming
        assert request is not None
        if request.whole_head:
            return  # a trailer must not pass for a header that was checked
        if len(request.fields) >= MOST_FIELDS:
            raise Refusal(Kind.HEAD_TOO_LARGE, f"the head has over {MOST_FIELDS} fields")
        request.fields.append((name.lower(), value.rstrip(b" \t")))  # RFC 9112, 5.1

    def on_headers_complete(self) -> None:
        request, parser = self._incoming, self._parser
        assert request is not None
        request.method = parser.get_method().decode("ascii")
        request.version = parser.get_http_version()
        if parser.should_upgrade() and request.method != "CONNECT":
            self._upgrading = True
            return
        request.keep_alive = parser.should_keep_alive()
        check_head(request)
        request.limit = self._owner.front.check(request, self.scheme)
        length = request.headers.get(b"content-length")
        if length is not None:
            self._missing = int(length)
            if self._missing > request.limit:
                raise too_large(self._missing, request.limit)
        request.whole_head = True

    def on_body(self, body: bytes) -> None:
        request = self._incoming
        assert request is not None
        size = len(body)
        if request.reserved + size > request.limit:
            raise too_large(request.reserved + size, request.limit)
        self._memory.reserve(size)
        request.reserved += size
        self._body += size
        if self._missing:
            self._missing -= size
        if not request.body:
            request.body = body
        elif isinstance(request.body, bytearray):
            request.body += body
        else:
            request.body = bytearray(request.body) + body

    def on_message_complete(self) -> None:
        request = self._incoming
        if self._upgrading or request is None:
            return
        self._incoming = None
        self._missing = self._overhead = self._body = 0
        self._whole(request)
        if not request.keep_alive:
            self._last = True

    def _whole(self, request: HttpRequest) -> None:
        request.read = time.monotonic()
        self._requests.append(request)

    def _refuse(self, refusal: Refusal) -> None:
        """What is being read is answered so, in its turn, and nothing is read after it."""
        request = self._incoming or HttpRequest()
        self._release(request)
        self._incoming = None
        request.refusal, request.keep_alive = refusal, False
        self._last = True
        self._requests.append(request)

    # ---- the order of things

    def _advance(self) -> None:
        """Takes whole requests one after the other, until one has to wait; then to the state that follows."""
        if self._advancing:
            return
        self._advancing = True
        while self._in_hand is None and not self._unsent and not self.gone and not self.transport.is_closing():
            if self._requests:
                self._move(ANSWERING)
                request = self._in_hand = self._requests.popleft()
                if request.refusal is None:
                    self._owner.front.take(self, request)
                else:
                    self.answer(*refused(request.refusal))
            elif self._last:
                self._linger()
                break
            elif self._waiting:
                self._read_waiting()
            else:
                self._wait()
                break
        self._advancing = False

    def _wait(self) -> None:
        """For the next request, or the rest of one."""
        if self._ended is not None:
            self._owner.outbox.write_now()
            self.transport.close()
            return
        if self.state is ANSWERING:
            self._pause_reading(False)
        request = self._incoming
        if request is None:
            if self.state is ANSWERING:
                self._move(IDLE)
        elif not request.whole_head:
            self._move(HEAD)
        else:
            if request.waits_for_continue:
                request.waits_for_continue = False
                if not request.reserved:
                    self._owner.outbox.write_now()  # the answer before goes first
                    self.transport.write(INTERIM)
            self._move(BODY)

    def _finish(self) -> None:
        """The request in hand is answered."""
        if self._in_hand is not None:
            self._release(self._in_hand)
        self._in_hand = None
        self._begun = False
        self._task = self._lost = None
        self._advance()

    def _linger(self) -> None:
        self._owner.outbox.write_now()
        self._move(LINGERING)
        self._waiting.clear()
        if self._ended is not None or self.scheme == "https":
            self.transport.close()
        else:
            self._pause_reading(False)
            self.transport.write_eof()

    def _move(self, state: ConnectionState) -> None:
        if state is self.state:
            return
        if state not in MOVES[self.state]:
            raise AssertionError(f"connection: {self._before.name}, {self.state.name}, then {state.name}")
        self._before, self.state = self.state, state
        self._since = time.monotonic()

    # ---- writing

    def _connection_fields(self, request: HttpRequest) -> tuple[Field, ...]:
        """What the client is told of the connection; decides whether this answer is the last."""
        alone = not self._requests and self._incoming is None and not self._waiting
        if not request.keep_alive or (alone and (self._owner.ending or self._ended is not None)):
            self._last = True
            return (CLOSE,)
        return (KEEP,) if request.version == "1.0" else ()

    def _write(self, data: bytes, reserved: int) -> None:
        """`reserved` bytes of the budget are released when the socket has taken all."""
        outbox = self._owner.outbox
        if self._advancing and not self._requests and not self._waiting:
            outbox.write_soon(self.transport, data)
        else:
            outbox.write_now()
            self.transport.write(data)
        if self._writable is not None:  # the transport has said that it cannot send
            self._unsent += reserved
        else:
            self._memory.release(reserved)

    def _sent(self) -> None:
        self._memory.release(self._unsent)
        self._unsent = 0
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self.state is LINGERING:
            self._since = time.monotonic()
        self._advance()

    def _release(self, request: HttpRequest) -> None:
        self._memory.release(request.reserved)
        request.reserved = 0
        request.body = b""

    def _served(self, task: asyncio.Task[None]) -> None:
        self._owner.tasks.discard(task)
        if task.cancelled() and not self.gone:
            self.transport.close()  # the server stops, and no answer will come


def _queued(transport: asyncio.Transport, queue: int) -> int:
    """Bytes in the kernel: that have come and were not read (FIONREAD), or that the client has not taken (TIOCOUTQ)."""
    with contextlib.suppress(OSError):
        number = transport.get_extra_info("socket").fileno()
        return int.from_bytes(fcntl.ioctl(number, queue, bytes(4)), sys.byteorder)
    return 0


def _why(error: HttpParserError) -> Refusal:
    """What to say of what the parser did not take, or a callback of ours refused."""
    cause = error.__context__
    if isinstance(cause, Refusal):
        return cause
    if isinstance(error, HttpParserCallbackError) and cause is not None:
        log.error("a defect of the server, in reading a request", exc_info=cause)
        return DEFECT
    return invalid("the request is not valid HTTP")
