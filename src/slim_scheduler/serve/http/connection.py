"""One client's connection: uvicorn's HTTP protocol, with limits that it leaves to others.

A short inference request goes past ASGI to `HttpFront.take` once it is whole; one whose head was served before goes
past the parser too (`known.py`). Adds what a hostile or vanished client makes necessary: a bound on everything that is
not body (heads, chunk framing, trailers), deadlines for slow senders and readers, and cancelling an inference whose
client is gone. The sweep over all connections runs once a second, so none of it costs a timer per request.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from slim_scheduler.serve.http.known import LONGEST_HEAD, InferHead, KnownHeads
from slim_scheduler.serve.limits import Limits

MOST_HEADERS = 128
SWEEP_S = 1.0


class Connection(HttpToolsProtocol):
    """Limits come from the class made by `connection_class`. `inference` is the task that the client waits for."""

    limits = Limits()
    heads = KnownHeads()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inference: asyncio.Task[Any] | None = None
        self.gone = False
        self._since: float | None = None  # when the request now arriving began; None between requests
        self._in_body = False
        self._fed = 0
        self._body_seen = 0
        self._unread_since: float | None = None
        self._idle_since: float | None = None  # when the last of our own answers left
        self._in_hand: RequestResponseCycle | None = None
        self._between = True  # no request has begun since the last one's end
        self._chunk = b""  # what came last, if a request begins with it
        self._whole_in_hand = False
        self._plain: InferHead | None = None  # of the short inference request that is arriving
        self._learn_from = b""  # the chunk that was all of the request in hand, if its head is new
        self._early = b""  # what came while a request was in hand
        self._ends = False  # nothing is taken after what is in hand
        self._broken = False  # what came after it cannot be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        if len(self.connections) > self.limits.connections:
            self._refuse(503, f"{self.limits.connections} connections are open; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if self.inference is not None:
            self.inference.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._whole_in_hand:
            self._early += data
            self.flow.pause_reading()
            return
        if self._between and self._is_idle():
            known = self.heads.find(data)
            if known is not None:
                self._take_known(*known, data)
                return
            self._chunk = data
        self._fed += len(data)
        super().data_received(data)
        # Everything that is not body: an honest request has a short head, and chunks longer than their framing.
        if self._fed - self._body_seen > self.limits.header_bytes + self._body_seen and not self.transport.is_closing():
            self._refuse(431, f"the head or framing has over {self.limits.header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._since = time.monotonic()
        self._idle_since = None
        self._in_body = False
        self._between = False
        self.scope["slim.chunk"], self._chunk = self._chunk, b""  # type: ignore[typeddict-unknown-key]
        self.scope["slim.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer must not pass for a header that was checked
        if len(self.headers) >= MOST_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        head = self.limits.header_bytes
        if self._fed > head and sum(len(name) + len(value) for name, value in self.headers) > head:
            raise ValueError("the head is too long")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_seen += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = None
        self._in_body = False
        self._between = True
        self._fed = self._body_seen = 0
        self.scope["slim.read"] = time.monotonic()  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()
        if self._plain is not None:
            head, self._plain = self._plain, None
            self._learn_from = self.scope.pop("slim.chunk")  # type: ignore[typeddict-item]
            body, self.cycle.body = self.cycle.body, bytearray()
            self._take(head, memoryview(body))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._in_hand = cycle
        if cycle.more_body and cycle.keep_alive and not self.flow.write_paused:  # else uvicorn knows better
            self._plain = self.app.plain_infer(cycle.scope)
        if self._plain is None:
            cycle.scope.pop("slim.chunk")  # type: ignore[typeddict-item]
            super()._start_asgi_task(cycle, app)

    # ---- short inference requests, and those whose head was served before

    def _is_idle(self) -> bool:
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.pipeline and not self.flow.write_paused and not self.transport.is_closing()

    def learn(self, head: InferHead) -> None:
        """Remembers the head of the request in hand, if that was one chunk from the request line to the body's end."""
        chunk, self._learn_from = self._learn_from, b""
        begin = len(chunk) - head.length
        # Exactly one empty line before the body, no second request after it: nothing else can have decided.
        if chunk.startswith(b"POST ") and chunk.find(b"\r\n\r\n", 0, LONGEST_HEAD) + 4 == begin:
            self.heads.learn(chunk[:begin], head)

    def _take_known(self, head: InferHead, begin: int, data: bytes) -> None:
        self._since = self._idle_since = None
        self._unset_keepalive_if_required()
        self._take(head, memoryview(data)[begin:])

    def _take(self, head: InferHead, body: memoryview) -> None:
        self._whole_in_hand = True
        self.app.take(self, head, body)

    def serve(self, inference: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs what answers the request in hand."""
        task = self.loop.create_task(inference)
        self.inference = task
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def answer_whole(self, answer: bytes) -> None:
        """Writes the whole answer, and goes on with what came meanwhile."""
        self.inference = None
        self._whole_in_hand = False
        self._learn_from = b""
        if self._in_hand is not None:
            self._in_hand.response_started = self._in_hand.response_complete = True
        if self.transport.is_closing():
            return
        self.transport.write(answer)
        if self.pipeline:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._idle_since = time.monotonic()
        if self._broken:
            self.transport.close()
            return
        if self._ends:
            super().shutdown()
        if self._early and not self.transport.is_closing():
            early, self._early = self._early, b""
            if self._since is not None:
                self._since = time.monotonic()  # it came in time, and waited here
            self.flow.resume_reading()
            self.data_received(early)

    def shutdown(self) -> None:
        if self._whole_in_hand or self._plain is not None:
            self._ends = True
        else:
            super().shutdown()

    def respond(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Writes the whole answer to the request in hand; False where only uvicorn's own way will do.

        That way looks at every header with two regular expressions and arms a timer after every answer, a sixth of an
        inference's time on the event loop. These headers are the server's own, and the sweep looks for idle clients.
        """
        cycle = self._in_hand
        if (
            cycle is None
            or cycle.response_started
            or cycle.disconnected
            or cycle.more_body
            or not cycle.keep_alive
            or self.flow.write_paused
        ):
            return False
        cycle.response_started = cycle.response_complete = True
        self.transport.write(answer_bytes(status, fields, body))
        cycle.message_event.set()
        if self.pipeline:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._idle_since = time.monotonic()
        return True

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not valid HTTP, or its head is too long")

    def sweep(self, now: float) -> None:
        """Ends the connection if its client has been too slow."""
        if self._since is not None and not self._whole_in_hand:
            limit = self.limits.body_timeout_s if self._in_body else self.limits.head_timeout_s
            if now - self._since > limit:
                if self.inference is not None:
                    self.inference.cancel()
                self._refuse(408, f"the request did not arrive within {limit:g} s")
                return
        if self._idle_since is not None and now - self._idle_since > self.limits.idle_timeout_s:
            self.transport.close()
        elif self.transport.get_write_buffer_size():
            if self._unread_since is None:
                self._unread_since = now
            elif now - self._unread_since > self.limits.write_timeout_s:
                self.transport.abort()
        else:
            self._unread_since = None

    def _refuse(self, status: int, message: str) -> None:
        """Answers without the application, and closes; what is in hand is answered first."""
        if self._whole_in_hand:
            self._broken = True
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of another answer there is no place for this one
            return
        body = msgspec.json.encode({"error": message})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        if status == 503:
            head += b"retry-after: 1\r\n"
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
        self.transport.close()


def answer_bytes(status: int, fields: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole answer, as it goes to the socket."""
    parts = [STATUS_LINE[status]]
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    parts += (b"\r\n", body)
    return b"".join(parts)


def connection_class(limits: Limits) -> type[Connection]:
    """The protocol class of a listener; uvicorn makes one object per connection and passes it no limits."""
    return type("Connection", (Connection,), {"limits": limits, "heads": KnownHeads()})


async def sweep_forever(connections: Any) -> None:
    """Looks for slow clients once a second, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        now = time.monotonic()
        for connection in list(connections):
            connection.sweep(now)
