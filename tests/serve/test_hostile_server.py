"""Guarantees 24 to 26 for the server as a whole: sockets, framing, slow clients, floods."""

import asyncio
import socket
import time

import numpy as np
import psutil
import pytest

from slim_scheduler.client.wire import ConnectionLostError, HttpConnection
from tests.serve.conftest import serving
from tests.serve.hostile import Malformed, malformed
from tests.serve.wire import call, exchange, infer, metrics

MIB = 1 << 20
PATH = b"/v2/models/digits/infer"


def head(method: bytes = b"POST", path: bytes = PATH, *fields: bytes) -> bytes:
    return b"\r\n".join((method + b" " + path + b" HTTP/1.1", b"Host: localhost", *fields, b"", b""))


def as_http(request: Malformed) -> bytes:
    fields = [b"Content-Length: %d" % len(request.body)]
    if request.length is not None:
        fields.append(b"Inference-Header-Content-Length: " + request.length)
    if request.encoding is not None:
        fields.append(b"Content-Encoding: " + request.encoding.encode())
    return head(b"POST", PATH, *fields) + request.body


async def send_all(port: int, requests: list[Malformed], callers: int = 16) -> list[int]:
    """Every request over kept connections; a new one where the server closed it."""
    statuses: list[int] = []
    waiting = iter(requests)

    async def caller() -> None:
        connection = await HttpConnection.open("127.0.0.1", port)
        for request in waiting:
            try:
                status, _, _ = await asyncio.wait_for(connection.send(as_http(request)), 20)
            except ConnectionLostError:
                status = 0
            statuses.append(status)
            if not connection.open_for_more or status in (0, 408, 431):
                connection.close()
                connection = await HttpConnection.open("127.0.0.1", port)
        connection.close()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return statuses


@pytest.fixture
def process(server) -> psutil.Process:
    return psutil.Process(server.process.pid)


async def test_thousands_of_malformed_requests_do_no_harm(server, process, images):
    await send_all(server.http, list(malformed(11, 500)))
    before = process.memory_info().rss
    statuses = await send_all(server.http, list(malformed(12, 4000)))
    assert len(statuses) == 4000
    assert {status for status in statuses if status >= 500} <= {503}
    assert sum(status == 400 for status in statuses) > 2000
    assert statuses.count(0) == 0
    assert process.memory_info().rss - before < 48 * MIB
    assert infer(server.http, images)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 4096,
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        head(b"G\x00T"),
        head(b"POST", PATH, b"Content-Length: -5"),
        head(b"POST", PATH, b"Content-Length: 5", b"Content-Length: 6"),
        head(b"POST", PATH, b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        head(b"POST", PATH, b"Transfer-Encoding: chunked") + b"zz\r\n",
        head(b"POST", PATH, b"Transfer-Encoding: gzip"),
        head(b"GET", b"/" + b"a" * 100_000),
        head(b"GET", b"/", b"X: " + b"a" * 100_000),
        head(b"GET", b"/", *[b"X-%d: 1" % i for i in range(500)]),
        head(b"GET", b"/%ff%fe%00"),
        head(b"GET", b"//evil.example/%2e%2e/"),
    ],
    ids=range(15),
)
def test_what_is_not_http_is_refused(server, data, images):
    reply = exchange(server.http, data)
    assert reply[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 404"), reply[:200]
    assert infer(server.http, images)[0] == 200


def test_a_flood_of_tiny_chunks_or_trailers_is_cut_off(server, process):
    before = process.memory_info().rss
    chunked = head(b"POST", PATH, b"Transfer-Encoding: chunked", b"Inference-Header-Content-Length: 0")
    for flood in (b"1\r\nx\r\n" * 400_000, b"0\r\nX: " + b"a" * 2_000_000, b"1;" + b"e" * 2_000_000):
        reply = exchange(server.http, chunked + flood)
        assert reply[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b""), reply[:100]
    assert process.memory_info().rss - before < 32 * MIB


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server):
    began = time.monotonic()
    status, _, reply = call(server.http, "POST", PATH.decode(), b"", content_length=str(10**12))
    assert status == 413
    assert "at most 67108864" in reply["error"]
    assert time.monotonic() - began < 2


def test_a_chunked_body_is_counted_while_it_comes(server, process):
    before = process.memory_info().rss
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.http), timeout=20) as wire:
        wire.sendall(head(b"POST", PATH, b"Transfer-Encoding: chunked"))
        try:
            for _ in range(1200):  # 75 MiB
                wire.sendall(chunk)
        except OSError:
            pass
        assert wire.recv(64).startswith(b"HTTP/1.1 413")
    assert process.memory_info().rss - before < 160 * MIB


def test_slow_clients_are_let_go(tmp_path, images):
    with serving(tmp_path, "--head-timeout-s", "0.5", "--body-timeout-s", "0.5") as server:
        slow = [
            b"",
            b"POST /v2/mod",
            head(b"POST", PATH, b"Content-Length: 1000") + b"abc",
            head(b"POST", PATH, b"Content-Length: 1000", b"Expect: 100-continue"),
        ]
        wires = [socket.create_connection(("127.0.0.1", server.http), timeout=5) for _ in slow]
        for wire, data in zip(wires, slow, strict=True):
            wire.sendall(data)
        for wire in wires:
            received = b""
            while piece := wire.recv(4096):  # ends, because the server closes
                received += piece
            assert b"HTTP/1.1 408" in received
            wire.close()
        assert infer(server.http, images)[0] == 200


def test_uncompressed_size_counts_and_not_the_wire_size(server):
    import gzip

    bomb = gzip.compress(bytes(80 * MIB), 1)
    assert len(bomb) < MIB
    status, _, reply = call(server.http, "POST", PATH.decode(), bomb, content_encoding="gzip")
    assert (status, "at least" in reply["error"]) == (413, True)


def test_more_items_than_one_request_may_carry_are_refused(server):
    status, _, reply = infer(server.http, np.zeros((4097, 1, 8, 8), np.float32))
    assert status == 400
    assert "split it" in reply["error"]


def test_conservation_holds_after_all_this(server):
    found = metrics(server.http)
    received = found['slim_items_received_total{model="digits"}']
    ended = sum(value for name, value in found.items() if name.startswith("slim_items_total{"))
    assert received == ended + found['slim_items_in_flight{model="digits"}']
