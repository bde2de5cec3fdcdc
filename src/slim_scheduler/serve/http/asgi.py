"""Hands a request that was read whole to an ASGI application, and its answer to the connection.

Everything but inference goes this way: documents, health, metrics, the page, management. An answer that comes in one
piece is written with its length; one in pieces is chunked, and waits for a client that reads slowly.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from slim_scheduler.serve.http.connection import Connection
from slim_scheduler.serve.http.fields import compressed
from slim_scheduler.serve.http.reply import Field, refused
from slim_scheduler.serve.http.request import HttpRequest
from slim_scheduler.serve.refusal import DEFECT

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHUNKED = (b"transfer-encoding", b"chunked")
BODILESS = (204, 304)


class _Exchange:
    """One request and its answer, as the application sees them."""

    def __init__(self, connection: Connection, request: HttpRequest) -> None:
        self._connection = connection
        self._request = request
        self._received = False
        self._start: tuple[int, list[Field]] | None = None  # of an answer whose head is not out
        self._chunked = False
        self.begun = self.complete = False

    async def receive(self) -> Message:
        if self._received:
            await asyncio.Future()  # who waits for the client to go is cancelled when it is gone
        self._received = True
        return {"type": "http.request", "body": bytes(self._request.body), "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message["status"], [(name.lower(), value) for name, value in message.get("headers", ())]
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None:
            status, fields = self._start
            self._start = None
            self.begun = True
            if not more:
                self.complete = True
                fields = [field for field in fields if field[0] != b"content-length"]
                body = compressed(body, self._request.headers, fields)
                self._connection.answer(status, fields, body)
                return
            self._begin(status, fields)
        await self._piece(body, more)

    def _begin(self, status: int, fields: list[Field]) -> None:
        sized = any(name == b"content-length" for name, _ in fields)
        if not sized and status not in BODILESS and self._request.method != "HEAD":
            if self._request.version == "1.1":
                self._chunked = True
                fields.append(CHUNKED)
            else:
                self._request.keep_alive = False  # the end of the connection is the end of the answer
        self._connection.begin(status, fields)

    async def _piece(self, body: bytes, more: bool) -> None:
        if self._request.method == "HEAD":
            body = b""
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        self.complete = not more
        await self._connection.write(body, last=not more)


async def run(app: App, connection: Connection, request: HttpRequest, scheme: str) -> None:
    """Answers one request with an application."""
    exchange = _Exchange(connection, request)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.version,
        "method": request.method,
        "scheme": scheme,
        "path": request.path,
        "raw_path": request.target.partition(b"?")[0],
        "query_string": request.query,
        "root_path": "",
        "headers": request.fields,
        "client": connection.peer,
        "server": None,
    }
    try:
        await app(scope, exchange.receive, exchange.send)
    except Exception:
        log.exception("a defect of the server, in %s", request.path)
    if exchange.complete or connection.gone:
        return
    if exchange.begun:
        connection.abort()
    else:
        connection.answer(*refused(DEFECT))
