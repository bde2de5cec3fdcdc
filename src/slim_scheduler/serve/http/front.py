"""The HTTP side: inference as raw ASGI, everything else handed to the routes.

The hot path makes no request object and copies no body. Every request passes the guard first, or begins with a head
that passed it before; every refusal becomes its status with `{"error": ...}`.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from slim_scheduler.serve.access import Guard
from slim_scheduler.serve.compression import inflate
from slim_scheduler.serve.decode import Buffer, InferenceCall, decode_infer
from slim_scheduler.serve.encode import encode_answer
from slim_scheduler.serve.http.admission import turned_away
from slim_scheduler.serve.http.body import Disconnected, read_body
from slim_scheduler.serve.http.connection import Connection, answer_bytes
from slim_scheduler.serve.http.fields import check_repeats, compressed, traceparent, whole_number
from slim_scheduler.serve.http.intake import IN_HAND, Intake, Known
from slim_scheduler.serve.http.known import InferHead, Template
from slim_scheduler.serve.http.reply import JSON, Field, Reply, content_length, refused, refused_early, whole_seconds
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal, quote
from slim_scheduler.serve.repository import Served
from slim_scheduler.serve.service import Service

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer/?")
BINARY = (b"content-type", b"application/octet-stream")
# Requests that need more than a body and an answer.
SPECIAL = frozenset((b"content-encoding", b"expect", b"upgrade", b"transfer-encoding"))
ALIKE = 0.0005  # seconds in which little changes that a refusal depends on
SHORT = 1 << 16  # bytes of a body that uvicorn reads without asking


class HttpFront:
    """The ASGI application of one listener."""

    def __init__(
        self,
        service: Service,
        guard: Guard,
        limits: Limits,
        routes: App,
        inference: bool = True,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._service = service
        self._inference = inference
        self._guard = guard
        self._limits = limits
        self._routes = routes
        self._memory = memory or MemoryBudget(limits.held_bytes)
        self._intakes: dict[str, Intake] = {}  # by model
        self._last_refused: tuple[Template | None, float, bytes] = None, 0.0, b""  # what was asked, until when it holds
        self.responses: dict[int, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; uvicorn's lifespan is off
        headers = dict(scope["headers"])
        path = scope["path"]
        try:
            if len(headers) < len(scope["headers"]):
                check_repeats(scope["headers"])
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
            declared = whole_number(headers, b"content-length")
            body = await read_body(receive, declared, self._limits.body_bytes, self._memory)
            held = len(body)
            encoding = headers.get(b"content-encoding", b"identity")
            if encoding != b"identity":
                body = await inflate(body, encoding.decode("latin-1").strip().lower(), self._limits.body_bytes)
                self._memory.reserve(len(body))
                held += len(body)
            head = InferHead(name, version, held, whole_number(headers, b"inference-header-content-length"), headers)
            served = self._service.repository.find(name, version)  # again: reading a body takes a while
            read = scope.get("slim.read") or time.monotonic()
            call = self._let_in(served, head, body, read)
            fields, reply = await self._answer(served, call, headers, read)
        except asyncio.CancelledError:
            if connection is not None and connection.gone:
                return  # nobody is left to answer; the engine has dropped the work
            raise
        finally:
            self._memory.release(held)
            if connection is not None:
                connection.inference = None
        await self._reply(200, fields, reply, headers, scope, send)

    async def _answer(
        self, served: Served, call: InferenceCall, headers: dict[bytes, bytes], read: float
    ) -> tuple[list[Field], bytes]:
        """Infer and encode. `read`: when the request was. Raises Refusal."""
        answer = await self._service.infer(served, call, traceparent(headers), read)
        if call.lesson is not None:
            served.templates.learn(*call.lesson)
        reply, json_length = encode_answer(call, answer, served.card)
        fields: list[Field] = [JSON]
        if json_length is not None:
            fields = [BINARY, (b"inference-header-content-length", b"%d" % json_length)]
        return fields, compressed(reply, headers, fields)

    # ---- short requests: past ASGI, through the intake

    def plain_infer(self, scope: Scope) -> InferHead | None:
        """The meaning of a head that just came, if it passes the guard and is that of a short inference request; None:
        it takes the long way, on which it may be refused."""
        found = INFER.fullmatch(scope["path"]) if self._inference and scope["method"] == "POST" else None
        headers = dict(scope["headers"]) if found is not None else {}
        if found is None or len(headers) < len(scope["headers"]) or not SPECIAL.isdisjoint(headers):
            return None
        try:
            length = whole_number(headers, b"content-length")
            if length is None or length > min(SHORT, self._limits.body_bytes):
                return None
            self._guard.check(scope["path"], scope["scheme"], headers)
            self._service.repository.find(found[1], found[2] or "")
            json_length = whole_number(headers, b"inference-header-content-length")
        except Refusal:
            return None
        return InferHead(found[1], found[2] or "", length, json_length, headers)

    def take(self, connection: Connection, head: InferHead, body: memoryview) -> None:
        """A whole short request, or one whose head was served before: refused at once, or it waits for its turn."""
        read = time.monotonic()
        try:
            served, intake = self._service.repository.find(head.name, head.version), self._intake(head.name)
            template = served.templates.find(bytes(body[: head.json_length])) if head.json_length else None
            if template is not None and b"traceparent" not in head.headers:
                refusal = self._like_the_last(served, template, intake, read)
                if refusal is not None:
                    connection.answer_whole(refusal)
                    served.count_refused(template.items, time.monotonic() - read)
                    self._count(Kind.UNAVAILABLE)
                    return
            call = self._let_in(served, head, body, read)
            self._memory.reserve(len(body))
        except Refusal as refusal:
            self._answer_whole(connection, head, refused(refusal))
        except Exception:
            log.exception("a defect of the server, in infer")
            self._answer_whole(connection, head, refused(DEFECT))
        else:
            intake.put(Known(connection, head, served, call, read))

    def _like_the_last(self, served: Served, template: Template, intake: Intake, now: float) -> bytes | None:
        """The refusal of a request whose JSON part was answered before, as bytes; None: it is let in.

        One like it that was refused within the last `ALIKE` seconds is answer enough.
        """
        last, until, refusal = self._last_refused
        if last is template and now < until:
            return refusal
        late = turned_away(served.engine, template.asked.deadline, template.items, intake)
        if late is None:
            return None
        refusal = refused_early(late[0], whole_seconds(late[1]))
        self._last_refused = template, now + ALIKE, refusal
        return refusal

    def _let_in(self, served: Served, head: InferHead, body: Buffer, read: float) -> InferenceCall:
        """Decodes. Raises Refusal, also for who would be late."""
        call = decode_infer(body, head.json_length, served.card, self._limits, served.templates)
        asked, items = call.asked, len(call.items)
        if asked.accuracy_floor is None:  # a floor may be one that is never met, which the dispatcher knows
            late = turned_away(served.engine, asked.deadline, items, self._intake(head.name))
            if late is not None:
                served.count_refused(items, time.monotonic() - read)
                raise Refusal(Kind.UNAVAILABLE, *late)
        return call

    def _intake(self, name: str) -> Intake:
        """That of a model that is served."""
        intake = self._intakes.get(name)
        if intake is None:
            intake = self._intakes[name] = Intake(self._begin, partial(self._most_in_hand, name))
        return intake

    def _most_in_hand(self, name: str) -> int:
        """What the servers have at a time, or two batches: more would wait in the engine, where refusing costs more."""
        served = self._service.repository.served.get(name)
        views = served.engine.servers.values() if served is not None else ()
        return max(IN_HAND, sum(view.limit for view in views if view.up))

    def _begin(self, known: Known) -> asyncio.Future[None] | None:
        if known.connection.gone:
            self._memory.release(known.head.length)
            return None
        task = known.connection.serve(self._infer_known(known))
        task.add_done_callback(partial(self._ended, known))
        return task

    def _ended(self, known: Known, task: asyncio.Future[None]) -> None:
        self._memory.release(known.head.length)
        if task.cancelled() and not known.connection.gone:
            known.connection.transport.close()  # the server stops, and no answer will come

    async def _infer_known(self, known: Known) -> None:
        """The same as `_infer`, without ASGI."""
        connection, head = known.connection, known.head
        try:
            fields, reply = await self._answer(known.served, known.call, head.headers, known.read)
            answer: Reply = 200, fields, reply
            if b"traceparent" not in head.headers:  # it would be another head every time
                connection.learn(head)
        except Refusal as refusal:
            answer = refused(refusal)
        except asyncio.CancelledError:
            if connection.gone:
                return
            raise
        except Exception:
            log.exception("a defect of the server, in infer")
            answer = refused(DEFECT)
        self._answer_whole(connection, head, answer)

    def _answer_whole(self, connection: Connection, head: InferHead, answer: Reply) -> None:
        status, fields, reply = answer
        connection.answer_whole(answer_bytes(status, self._finish(status, fields, reply, head.headers), reply))

    async def _refuse(self, refusal: Refusal, headers: dict[bytes, bytes], scope: Scope, send: Send) -> None:
        status, fields, body = refused(refusal)
        await self._reply(status, fields, body, headers, scope, send)

    async def _reply(
        self, status: int, fields: list[Field], body: bytes, headers: dict[bytes, bytes], scope: Scope, send: Send
    ) -> None:
        fields = self._finish(status, fields, body, headers)
        connection = scope.get("slim.connection")
        if connection is not None and scope["method"] == "POST" and connection.respond(status, fields, body):
            return
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    def _count(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def _finish(self, status: int, fields: list[Field], body: bytes, headers: dict[bytes, bytes]) -> list[Field]:
        """Counts an answer, and adds the fields that every answer has."""
        self._count(status)
        fields.append(content_length(body))
        if b"traceparent" in headers and (trace := traceparent(headers)):
            fields.append((b"traceparent", trace.encode()))
        return fields
