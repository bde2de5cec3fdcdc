"""The HTTP side: inference as raw ASGI, everything else handed to the routes.

The hot path makes no request object and copies no body. Every request passes the guard first, or begins with a head
that passed it before; every refusal becomes its status with `{"error": ...}`.
"""

import asyncio
import logging
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from slim_scheduler.core.types import Seconds
from slim_scheduler.frontend.body import Disconnected, Held, inflate, read_body
from slim_scheduler.frontend.connection import Connection, answer_bytes
from slim_scheduler.frontend.decode import Buffer, decode_infer
from slim_scheduler.frontend.encode import encode_answer
from slim_scheduler.frontend.guard import Guard
from slim_scheduler.frontend.intake import IN_HAND, SHARE, Intake, Known
from slim_scheduler.frontend.known import InferHead
from slim_scheduler.frontend.limits import Limits
from slim_scheduler.frontend.refusal import DEFECT, Kind, Refusal, invalid, quote
from slim_scheduler.frontend.reply import JSON, Field, Reply, content_length, refused, refused_early, whole_seconds
from slim_scheduler.frontend.service import Service

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import SlimEngine

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
HeaderList = list[Field]

INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer/?")
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
BINARY = (b"content-type", b"application/octet-stream")
SMALLEST_COMPRESSED = 1024  # a TCP segment; below it compression only costs time
MOST_DIGITS = 18
LEAST_WAIT = 0.001  # seconds: below it nobody is late, and nothing is looked up
# Requests that need more than a body and an answer, or whose head is another one every time.
NOT_LEARNT = frozenset((b"content-encoding", b"expect", b"traceparent", b"upgrade"))


class HttpFront:
    """The ASGI application of one listener."""

    def __init__(
        self,
        service: Service,
        guard: Guard,
        limits: Limits,
        routes: App,
        inference: bool = True,
        held: Held | None = None,
    ) -> None:
        self._service = service
        self._inference = inference
        self._guard = guard
        self._limits = limits
        self._routes = routes
        self._held = held or Held(limits.held_bytes)
        self._intakes: dict[str, Intake] = {}  # by model
        self.responses: dict[int, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; uvicorn's lifespan is off
        headers = dict(scope["headers"])
        path = scope["path"]
        try:
            if len(headers) < len(scope["headers"]):
                _check_repeats(scope["headers"])
            self._guard.check(path, scope["scheme"], headers)
            if self._inference and path.startswith("/v2/models/"):
                found = INFER.fullmatch(path)
                if found is not None:
                    if scope["method"] != "POST":
                        raise Refusal(Kind.NO_METHOD, f"{quote(scope['method'])} is not for infer; use POST")
                    await self._infer(found[1], found[2] or "", scope, headers, receive, send)
                    return
        except Refusal as refusal:
            await self._refuse(refusal, headers, scope, send)
            return
        except Disconnected:
            return
        except Exception:
            log.exception("a defect of the server, in %s", path)
            await self._refuse(DEFECT, headers, scope, send)
            return
        if len(path) > 1 and path.endswith("/"):
            scope["path"] = path.rstrip("/")  # with and without: a redirect would lose a POST's body
        await self._routes(scope, receive, send)

    async def _infer(
        self, name: str, version: str, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        connection = scope.get("slim.connection")
        if connection is not None:
            connection.inference = asyncio.current_task()
        held = 0
        try:
            self._service.repository.find(name, version)
            declared = _length(headers, b"content-length")
            body = await read_body(receive, declared, self._limits.body_bytes, self._held)
            held = len(body)
            encoding = headers.get(b"content-encoding", b"identity")
            if encoding != b"identity":
                body = await inflate(body, encoding.decode("latin-1").strip().lower(), self._limits.body_bytes)
                self._held.take(len(body))
                held += len(body)
            head = InferHead(name, version, held, _length(headers, b"inference-header-content-length"), headers)
            fields, reply = await self._answer(head, body, time.monotonic())
        except asyncio.CancelledError:
            if connection is not None and connection.gone:
                return  # nobody is left to answer; the engine has dropped the work
            raise
        finally:
            self._held.give(held)
            if connection is not None:
                connection.inference = None
        if connection is not None and declared is not None and not NOT_LEARNT.intersection(headers):
            connection.learn(head, scope["slim.chunk"])
        await self._reply(200, fields, reply, headers, scope, send)

    async def _answer(self, head: InferHead, body: Buffer, arrived: float) -> tuple[HeaderList, bytes]:
        """Decode, infer, encode. `arrived`: when it was read. Raises Refusal."""
        served = self._service.repository.find(head.name, head.version)
        call = decode_infer(body, head.json_length, served.card, self._limits, served.templates)
        answer = await self._service.infer(served, call, _traceparent(head.headers), arrived)
        if call.lesson is not None:
            served.templates.learn(*call.lesson)
        reply, json_length = encode_answer(call, answer, served.card)
        fields: HeaderList = [JSON]
        if json_length is not None:
            fields = [BINARY, (b"inference-header-content-length", b"%d" % json_length)]
        if len(reply) >= SMALLEST_COMPRESSED:
            reply = _compress(reply, head.headers, fields)
        return fields, reply

    def take_known(self, connection: Connection, head: InferHead, body: memoryview) -> None:
        """A request whose head was served before, whole: refused at once, or it waits for its turn."""
        intake = self._intakes.get(head.name)
        if intake is None:
            intake = self._intakes[head.name] = Intake(self._serve_known, partial(self._most_in_hand, head.name))
        served, items = self._service.repository.served.get(head.name), 1
        template = None
        if served is not None and head.json_length:
            template = served.templates.find(bytes(body[: head.json_length]))
        if served is not None and template is not None:
            items = template.items
            refusal = _hopeless(served.engine, template.asked.deadline, items, intake)
            if refusal is not None:
                served.refused_early(items)
                self._count(Kind.UNAVAILABLE)
                connection.answer_known(refusal)
                return
        try:
            self._held.take(len(body))
        except Refusal as full:
            self._answer_known(connection, head, refused(full))
        else:
            intake.put((connection, head, body, items))

    def _most_in_hand(self, name: str) -> int:
        """What the servers have at a time, or two batches: more would wait in the engine, where refusing costs more."""
        served = self._service.repository.served.get(name)
        views = served.engine.servers.values() if served is not None else ()
        return max(IN_HAND, sum(view.limit for view in views if view.up))

    def _serve_known(self, known: Known, arrived: float) -> asyncio.Future[None] | None:
        connection, head, body, _ = known
        if connection.gone:
            self._held.give(len(body))
            return None
        task = connection.serve(self._infer_known(connection, head, body, arrived))
        task.add_done_callback(lambda _: self._held.give(len(body)))
        return task

    async def _infer_known(self, connection: Connection, head: InferHead, body: Buffer, arrived: float) -> None:
        """The same as `_infer`, without parser and guard."""
        try:
            fields, reply = await self._answer(head, body, arrived)
            answer: Reply = 200, fields, reply
        except Refusal as refusal:
            answer = refused(refusal)
        except asyncio.CancelledError:
            if connection.gone:
                return
            raise
        except Exception:
            log.exception("a defect of the server, in infer")
            answer = refused(DEFECT)
        self._answer_known(connection, head, answer)

    def _answer_known(self, connection: Connection, head: InferHead, answer: Reply) -> None:
        status, fields, reply = answer
        connection.answer_known(answer_bytes(status, self._finish(status, fields, reply, head.headers), reply))

    async def _refuse(self, refusal: Refusal, headers: dict[bytes, bytes], scope: Scope, send: Send) -> None:
        status, fields, body = refused(refusal)
        await self._reply(status, fields, body, headers, scope, send)

    async def _reply(
        self, status: int, fields: HeaderList, body: bytes, headers: dict[bytes, bytes], scope: Scope, send: Send
    ) -> None:
        fields = self._finish(status, fields, body, headers)
        connection = scope.get("slim.connection")
        if connection is not None and scope["method"] == "POST" and connection.respond(status, fields, body):
            return
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    def _count(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def _finish(self, status: int, fields: HeaderList, body: bytes, headers: dict[bytes, bytes]) -> HeaderList:
        """Counts an answer, and adds the fields that every answer has."""
        self._count(status)
        fields.append(content_length(body))
        if b"traceparent" in headers and (trace := _traceparent(headers)):
            fields.append((b"traceparent", trace.encode()))
        return fields


def _hopeless(engine: "SlimEngine", deadline: Seconds | None, items: int, intake: Intake) -> bytes | None:
    """The refusal of who finds the queue full, or would be late behind those who wait in the intake or the engine."""
    wait = intake.wait()
    if wait <= LEAST_WAIT and not engine.held_up:
        return None
    limit = engine.config.dispatch.max_waiting_items
    if engine.fifo_length + intake.items + items > limit:
        return refused_early(f"the queue is full: {items} items came and the limit is {limit}", 1)
    if deadline is None:
        return None
    if wait > SHARE * deadline:
        reason = f"requests wait {wait * 1e3:.0f} ms for this process and the deadline is in {deadline * 1e3:.0f} ms"
        return refused_early(reason, whole_seconds(wait))
    late = engine.too_late(deadline, intake.items)
    return None if late is None else refused_early(late[0], whole_seconds(late[1]))


def _length(headers: dict[bytes, bytes], name: bytes) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not text.isdigit() or len(text) > MOST_DIGITS:
        raise invalid(f"{name.decode().title()} is {quote(text.decode('latin-1'))}; it must be a whole number")
    return int(text)


def _traceparent(headers: dict[bytes, bytes]) -> str:
    trace = headers.get(b"traceparent", b"")
    return trace.decode() if trace and TRACEPARENT.fullmatch(trace) else ""


def _check_repeats(headers: HeaderList) -> None:
    """Two different answers to one question are how requests are smuggled past a check."""
    for name in (b"host", b"content-length", b"inference-header-content-length", b"authorization", b"origin"):
        if sum(field == name for field, _ in headers) > 1:
            raise invalid(f"the header {name.decode()} is given twice; send it once")


def _compress(body: bytes, headers: dict[bytes, bytes], fields: HeaderList) -> bytes:
    accepted = headers.get(b"accept-encoding", b"")
    if b"gzip" in accepted:
        fields.append((b"content-encoding", b"gzip"))
        stream = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
    elif b"deflate" in accepted:
        fields.append((b"content-encoding", b"deflate"))
        stream = zlib.compressobj(1)
    else:
        return body
    return stream.compress(body) + stream.flush()
