"""HTTP/1.1 as far as our clients need it: one request at a time on a kept connection, responses with a length.

An asyncio protocol without streams, because a load generator must cost less than the server it measures.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from slim_scheduler.core.errors import InputError, SlimError

PORTS = {"http": 80, "https": 443}  # where an address names none


class ConnectionLostError(SlimError):
    """The server closed the connection before an answer was complete."""


class HttpConnection(asyncio.Protocol):
    """One connection. `send` takes whole requests; `open_for_more` says whether it can take another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._length: int | None = None
        self._answer: asyncio.Future[tuple[int, dict[str, str], bytes]] | None = None
        self.open_for_more = False

    @classmethod
    async def open(cls, host: str, port: int) -> "HttpConnection":
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    async def send(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends a request; returns status, headers (lower case) and body. Raises ConnectionLostError."""
        if self._transport is None or not self.open_for_more:
            raise ConnectionLostError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self.open_for_more = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none of asyncio's classes
        self.open_for_more = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_for_more = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionLostError(f"the server closed the connection: {exc or 'no reason'}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._length is None and not self._read_head():
            return
        assert self._length is not None
        if len(self._buffer) < self._length:
            return
        body = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        self._length = None
        if self._headers.get("connection") == "close":
            self.open_for_more = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._status, self._headers, body))

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *rest = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self._status = int(first.split(" ", 2)[1])
        self._headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)
        }
        self._length = int(self._headers.get("content-length", 0))
        return True


class KeptConnections:
    """Connections to one server that no request uses just now."""

    def __init__(self) -> None:
        self._free: list[HttpConnection] = []

    def take(self) -> HttpConnection | None:
        """One that the server has not closed while nothing was sent on it; None where there is none."""
        while self._free:
            connection = self._free.pop()
            if connection.open_for_more:
                return connection
        return None

    def keep(self, connection: HttpConnection) -> None:
        if connection.open_for_more:
            self._free.append(connection)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()


def request_head(method: str, path: str, host: str, length: int, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a request with a body of `length` bytes."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Address(NamedTuple):
    """Where a server listens. `host` is without the brackets that an IPv6 address has in `authority`."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """As it stands in an address and in the Host field."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def split_address(url: str, schemes: Sequence[str]) -> Address:
    """An address of one of these schemes, the first where it names none. Raises InputError."""
    try:
        parts = urlsplit(url if "://" in url else f"{schemes[0]}://{url}")
        host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
        host = host.encode("idna").decode("ascii")
        good = parts.scheme in schemes and bool(host) and port > 0 and parts.port != 0
    except ValueError:  # a port that is no number or above 65535, a host that no name service would take
        good = False
    if not good:
        raise InputError(f"{url} is not an address; give {schemes[0]}://HOST:PORT, with a port from 1 to 65535")
    return Address(parts.scheme, host, port)


def model_path(model: str, action: str = "") -> str:
    """The path of a model, or of what is done with it. Raises InputError."""
    return f"/v2/models/{quote(sendable(model), safe='')}{action}"


def sendable(model: str) -> str:
    """A model's name. Raises InputError where it holds bytes of the command line that are no UTF-8."""
    try:
        model.encode()
    except UnicodeEncodeError:
        raise InputError(f"model {model!r} is not UTF-8; give the name of a served model") from None
    return model


def bearer(token: str) -> str:
    """The field that shows a token. Raises InputError."""
    if not (token.isascii() and token.isprintable()):
        raise InputError(
            "the token has characters beyond printable ASCII; look for a stray line end in --token or SLIM_TOKEN"
        )
    return f"Bearer {token}"
