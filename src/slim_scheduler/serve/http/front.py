"""What HTTP requests mean: inference here, everything else to the routes.

`Connection` hands over requests that were read whole. An inference request is refused like the one before, or decoded
and either refused at once or begun, without an application in between, and without a task but for what is compressed,
or large. Every refusal becomes its status with `{"error": ...}`.
"""

import asyncio
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from slim_scheduler.serve.access import Guard
from slim_scheduler.serve.compression import inflate
from slim_scheduler.serve.decode import LONGEST_REMEMBERED, InferenceCall, InferHeader, call_of, read_header
from slim_scheduler.serve.encode import Answer, encode_answer
from slim_scheduler.serve.http import asgi
from slim_scheduler.serve.http.connection import Connection
from slim_scheduler.serve.http.fields import HeaderMap, compressed, traceparent, whole_number
from slim_scheduler.serve.http.reply import JSON, Field, Reply, refused
from slim_scheduler.serve.http.request import HttpRequest
from slim_scheduler.serve.http.routes import SMALL_BODY
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.metadata import ModelCard
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal, quote
from slim_scheduler.serve.repository import Served
from slim_scheduler.serve.service import Service

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import Ticket

log = logging.getLogger(__name__)

INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
BINARY = (b"content-type", b"application/octet-stream")
# Encoding takes about 1 ms for so many values: with more, it would hold up every other request.
ENCODED_INLINE = 8192
# Each takes up to twice `body_bytes` before the budget of all requests knows its size.
INFLATED_AT_ONCE = 2
JUST_READ = 0.01  # of its deadline: who waited longer may be refused for that, which says nothing of others


class _Refused(NamedTuple):
    """An offer that an engine refused, how it had been asked for, and what was said to it."""

    target: bytes
    headers: HeaderMap
    json: bytes  # which the numbers follow
    size: int  # of the body
    ticket: "Ticket"
    reply: Reply

    def is_like(self, request: HttpRequest) -> bool:
        """Whether this asks the same; numbers that follow the JSON part may be others."""
        return (
            len(request.body) == self.size
            # As tuples: a known head's fields are one object, which is equal to itself at once.
            and (request.target, request.headers) == (self.target, self.headers)
            and request.body.startswith(self.json)
        )


class HttpFront:
    """What one listener serves. `inference`: whether that is part of it; `routes` are the rest."""

    def __init__(
        self, service: Service, guard: Guard, limits: Limits, routes: asgi.App, inference: bool = True
    ) -> None:
        self._service = service
        self._inference = inference
        self._guard = guard
        self._limits = limits
        self._routes = routes
        self._refused: dict[str, _Refused] = {}  # by model: the last, if the like of it may be refused too
        self._inflating = asyncio.Semaphore(INFLATED_AT_ONCE)
        self._inflaters = ThreadPoolExecutor(INFLATED_AT_ONCE, "inflate")  # goes on with what a lost client has sent
        self.responses: dict[int, int] = {}

    def check(self, request: HttpRequest, scheme: str) -> int:
        """Whether this client may ask this; returns how long the body may be. Raises Refusal."""
        self._guard.check(request.path, scheme, request.headers, request.version)
        if self._inference:
            request.infer = INFER.fullmatch(request.path)
        return SMALL_BODY if request.infer is None else self._limits.body_bytes

    def take(self, connection: Connection, request: HttpRequest) -> None:
        """Answers a request, now or later."""
        found = request.infer
        if found is None:
            connection.serve(asgi.run(self._routes, connection, request, connection.scheme))
            return
        try:
            if request.method != "POST":
                raise Refusal(Kind.NO_METHOD, f"{quote(request.method)} is not for infer; use POST")
            served = self._service.repository.find(found[1], found[2] or "")
            encoding = request.headers.get(b"content-encoding", b"identity")
            if encoding != b"identity":
                connection.serve(self._inflate(connection, request, served, encoding))
            elif not self._refused_again(connection, request, served):
                self._let_in(connection, request, served)
        except Refusal as refusal:
            self._answer(connection, request, refused(refusal))
        except Exception:
            log.exception("a defect of the server, in infer")
            self._answer(connection, request, refused(DEFECT))

    def _refused_again(self, connection: Connection, request: HttpRequest, served: Served) -> bool:
        """Whether this is like the last that the model refused, and is refused too, without being read."""
        last = self._refused.get(served.card.name)
        if last is None or not last.is_like(request):
            return False
        if not self._service.offer_again(served, last.ticket, request.read):
            del self._refused[served.card.name]
            return False
        status, fields, body = last.reply
        self._answer(connection, request, (status, fields.copy(), body))
        return True

    def _let_in(self, connection: Connection, request: HttpRequest, served: Served) -> None:
        """To the model's engine, unless it would be late or find the queue full: that is said before the numbers are
        looked at. Raises Refusal."""
        json_length = whole_number(request.headers, b"inference-header-content-length")
        header = read_header(request.body, json_length, served.card, self._limits)
        ticket = self._service.offer(served, header.asked, header.items, request.read)
        if ticket.refused is not None:
            reason, again = ticket.refused
            never = again is None
            said = f"cannot be met: {reason}" if never else reason
            status, fields, body = refused(Refusal(Kind.INVALID if never else Kind.UNAVAILABLE, said, again))
            self._remember(request, served, header, ticket, (status, fields.copy(), body))
            self._answer(connection, request, (status, fields, body))
            return
        try:
            call = self._call_of(header, request.body, served.card)
            ended = partial(self._ended, connection, request, served.card, call)
            trace = traceparent(request.headers)
            inference = self._service.begin(served, call, ended, trace, request.read, ticket)
        except BaseException:
            served.engine.withdraw(ticket)
            raise
        connection.when_lost(inference.cancel)

    def _call_of(self, header: InferHeader, body: bytes | bytearray, card: ModelCard) -> InferenceCall:
        """Reads the numbers; what they take meanwhile is reserved. Raises Refusal."""
        memory, size = self._service.memory, header.parsed_bytes
        memory.reserve(size)
        try:
            return call_of(header, body, card)
        finally:
            memory.release(size)

    def _remember(
        self, request: HttpRequest, served: Served, header: InferHeader, ticket: "Ticket", reply: Reply
    ) -> None:
        """A refusal that may be that of others too."""
        deadline, waited = header.asked.deadline, time.monotonic() - request.read
        if header.size <= LONGEST_REMEMBERED and (deadline is None or waited < JUST_READ * deadline):
            json, size = bytes(request.body[: header.size]), len(request.body)
            last = _Refused(request.target, request.headers, json, size, ticket, reply)
            self._refused[served.card.name] = last

    async def _inflate(self, connection: Connection, request: HttpRequest, served: Served, encoding: bytes) -> None:
        """The same for a body that is compressed."""
        try:
            async with self._inflating:
                named, most = encoding.decode("latin-1").strip().lower(), self._limits.body_bytes
                body = await inflate(request.body, named, most, self._inflaters)
                connection.hold(request, body)
            self._let_in(connection, request, served)
        except Refusal as refusal:
            self._answer(connection, request, refused(refusal))
        except Exception:
            log.exception("a defect of the server, in infer")
            self._answer(connection, request, refused(DEFECT))

    def _ended(
        self, connection: Connection, request: HttpRequest, card: ModelCard, call: InferenceCall, end: Answer | Refusal
    ) -> None:
        if connection.gone:
            return
        if isinstance(end, Refusal):
            self._answer(connection, request, refused(end))
        elif call.outputs and len(call.outputs) * end.logits.size > ENCODED_INLINE:
            connection.serve(self._encode_aside(connection, request, card, call, end))
        else:
            self._answer(connection, request, _reply(call, end, card, request))

    async def _encode_aside(
        self, connection: Connection, request: HttpRequest, card: ModelCard, call: InferenceCall, answer: Answer
    ) -> None:
        self._answer(connection, request, await asyncio.to_thread(_reply, call, answer, card, request))

    def _answer(self, connection: Connection, request: HttpRequest, reply: Reply) -> None:
        status, fields, body = reply
        if b"traceparent" in request.headers and (trace := traceparent(request.headers)):
            fields.append((b"traceparent", trace.encode()))
        status = connection.answer(status, fields, body)
        self.responses[status] = self.responses.get(status, 0) + 1


def _reply(call: InferenceCall, answer: Answer, card: ModelCard, request: HttpRequest) -> Reply:
    try:
        body, json_length = encode_answer(call, answer, card)
        fields: list[Field] = [JSON]
        if json_length is not None:
            fields = [BINARY, (b"inference-header-content-length", b"%d" % json_length)]
        return 200, fields, compressed(body, request.headers, fields)
    except Exception:
        log.exception("a defect of the server, in infer")
        return refused(DEFECT)
