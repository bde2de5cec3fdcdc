"""One connection without a network: what happens to the bytes that come before, with and after a short request."""

import time
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from slim_scheduler.serve.http.connection import Connection, connection_class
from slim_scheduler.serve.http.known import InferHead
from slim_scheduler.serve.limits import Limits

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Front:
    """Takes every request, and answers when it is told to."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    def plain_infer(self, scope: Any) -> InferHead:
        headers = dict(scope["headers"])
        return InferHead("m", "", int(headers[b"content-length"]), None, headers)

    def take(self, connection: Connection, head: InferHead, body: memoryview) -> None:
        self.taken.append(bytes(body))


class Transport:
    def __init__(self) -> None:
        self.written, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


@pytest.fixture
async def wire() -> tuple[Connection, Front, Transport]:
    front, transport = Front(), Transport()
    made = connection_class(Limits())
    config = uvicorn.Config(front, http=made, ws="none", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    connection = made(config, ServerState(), {})
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, front, transport


def request(body: bytes, size: int | None = None) -> bytes:
    length = len(body) if size is None else size
    return b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % length + body


async def test_a_body_does_not_outlive_its_request(wire):
    connection, front, _ = wire
    connection.data_received(request(b"x" * 60_000))
    assert front.taken == [b"x" * 60_000]
    connection.answer_whole(OK)
    assert not connection.cycle.body


async def test_a_server_that_stops_closes_when_the_half_read_request_is_answered(wire):
    connection, front, transport = wire
    connection.data_received(request(b"01234", size=10))
    connection.shutdown()
    connection.data_received(b"56789")
    assert front.taken == [b"0123456789"]
    assert not transport.closed
    connection.answer_whole(OK)
    assert (transport.written, transport.closed) == (OK, True)


async def test_what_came_early_is_kept_when_the_server_stops(wire):
    connection, front, transport = wire
    connection.data_received(request(b"AAA") + request(b"01234", size=10))
    connection.data_received(b"56789")
    connection.shutdown()
    connection.answer_whole(OK)
    assert front.taken == [b"AAA", b"0123456789"]
    connection.answer_whole(OK)
    assert (transport.written, transport.closed) == (2 * OK, True)


async def test_a_client_is_not_slow_while_its_bytes_wait_here(wire):
    connection, front, transport = wire
    second = request(b"0123456789")
    connection.data_received(request(b"AAA") + second[:20])
    connection.data_received(second[20:])
    connection.sweep(time.monotonic() + 1000.0)
    assert transport.written == b""
    connection.answer_whole(OK)
    assert front.taken == [b"AAA", b"0123456789"]
    connection.sweep(time.monotonic() + 1.0)
    assert transport.written == OK


async def test_what_cannot_be_read_closes_after_the_answer_before_it(wire):
    connection, front, transport = wire
    connection.data_received(request(b"AAA") + b"XX\x00 no HTTP\r\n\r\n")
    assert (front.taken, transport.written) == ([b"AAA"], b"")
    connection.answer_whole(OK)
    assert (transport.written, transport.closed) == (OK, True)
