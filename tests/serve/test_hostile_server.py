"""Guarantees 24 to 26 for the server as a whole: sockets, framing, slow clients, floods."""

import asyncio
import json
import socket
import time

import numpy as np
import psutil
import pytest

from slim_scheduler.client.wire import ConnectionLostError, HttpConnection
from slim_scheduler.serve.access import Access
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.server import Ports, running
from slim_scheduler.setup.config import config_from
from tests.serve.conftest import serving
from tests.serve.hostile import Malformed, malformed
from tests.serve.wire import Wire, call, exchange, infer, metrics

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


@pytest.mark.parametrize("word", [b"h2c", b"websocket", b"TLS/1.0", b"anything"])
def test_a_request_in_the_body_of_an_offer_to_upgrade_is_not_answered(server, images, word):
    with Wire(server.http) as wire:
        smuggled = wire.request(images[:1])
        wire.send(
            head(b"POST", PATH, b"Connection: Upgrade", b"Upgrade: " + word, b"Content-Length: %d" % len(smuggled))
        )
        time.sleep(0.3)  # who reads the head alone may take the rest for a request
        wire.send(smuggled)
        assert wire.answer()[0] == 400, "the body is no infer request"
        wire.send(head(b"GET", b"/v2/nothing"))
        assert wire.answer()[0] == 404, "the next answer is the next request's"


@pytest.mark.parametrize("word", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_answered_and_so_is_what_comes_behind_it(server, images, word):
    with Wire(server.http) as wire:
        wire.send(wire.request(images[:1], connection="Upgrade", upgrade=word) + wire.request(images[1:2]))
        assert [wire.answer()[0] for _ in range(2)] == [200, 200]


def chunked(body: bytes) -> bytes:
    return b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


IMAGE = bytes(256)
RAW = b"Inference-Header-Content-Length: 0\r\n"
COUNTED = b"Content-Length: 256\r\n\r\n" + IMAGE


@pytest.mark.parametrize(
    ("start", "fields", "status"),
    [
        (b"POST %s HTTP/1.1", b"Host: localhost:evil.com\r\n" + COUNTED, 400),
        (b"POST %s HTTP/1.1", b"Host: [::1]evil.com\r\n" + COUNTED, 400),
        (b"POST %s HTTP/1.1", b"Host: localhost:80:80\r\n" + COUNTED, 400),
        (b"POST http://evil.com%s HTTP/1.1", b"Host: localhost\r\n" + COUNTED, 400),
        (b"POST http://localhost@evil.com%s HTTP/1.1", b"Host: localhost\r\n" + COUNTED, 400),
        (b"POST ftp://localhost%s HTTP/1.1", b"Host: localhost\r\n" + COUNTED, 400),
        (
            b"POST %s HTTP/1.1",
            b"Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + chunked(IMAGE),
            400,
        ),
        (b"POST %s HTTP/1.0", b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(IMAGE), 400),
        (b"POST %s HTTP/1.1", b"Host: localhost\r\nExpect: 200-ok\r\n" + COUNTED, 417),
        (b"POST %s HTTP/2.0", b"Host: localhost\r\n" + COUNTED, 400),
        (b"POST %s#x HTTP/1.1", b"Host: localhost\r\n" + COUNTED, 400),
    ],
    ids=[
        "a port that is none", "a host behind brackets", "two ports", "another host in the target",
        "another host behind a user", "another scheme", "gzip and chunked", "chunked in 1.0", "another expectation",
        "another version", "a fragment",
    ],
)  # fmt: skip
def test_an_inference_that_can_be_read_in_two_ways_is_refused(server, start, fields, status):
    with Wire(server.http) as wire:
        wire.send(start % PATH + b"\r\n" + RAW + fields)
        assert wire.answer()[0] == status
        assert wire.closed()
    with Wire(server.http) as wire:  # the same without what is wrong
        wire.send(b"POST %s HTTP/1.1\r\n" % PATH + RAW + b"Host: localhost\r\n" + COUNTED)
        assert wire.answer()[0] == 200


@pytest.mark.parametrize("text", ["5_000", "\u0665\u0660\u0660\u0660", "\uff15\uff10\uff10\uff10"])
def test_digits_that_json_does_not_have_are_no_deadline(server, images, text):
    document = {
        "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": images[0].ravel().tolist()}],
        "parameters": {"deadline_ms": text},
    }
    status, _, reply = call(server.http, "POST", PATH.decode(), document)
    assert status == 400
    assert "a number" in reply["error"]


def test_a_flood_of_tiny_chunks_or_trailers_is_cut_off(server, process):
    before = process.memory_info().rss
    chunked = head(b"POST", PATH, b"Transfer-Encoding: chunked", b"Inference-Header-Content-Length: 0")
    for flood in (b"1\r\nx\r\n" * 400_000, b"0\r\nX: " + b"a" * 2_000_000, b"1;" + b"e" * 2_000_000):
        reply = exchange(server.http, chunked + flood)
        assert reply[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b""), reply[:100]
    assert process.memory_info().rss - before < 32 * MIB


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server):
    status, _, reply = call(server.http, "POST", PATH.decode(), b"", content_length=str(10**12))
    assert status == 413
    assert "at most 67108864" in reply["error"]


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


async def unread(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose client takes little of an answer before it reads."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.setblocking(False)
    await asyncio.get_running_loop().sock_connect(wire, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=wire, limit=4096)


async def test_answers_that_nobody_reads_are_bounded_and_hold_nobody_up(images):
    """Clients that send one request after the other and read no answer, each of which is longer than its request."""
    outputs = [{"name": "logits"}, {"name": "logits", "parameters": {"classification": 10}}]
    tensor = {"name": "image", "shape": [4096, 1, 8, 8], "datatype": "UINT8"}
    document = {"inputs": [{**tensor, "parameters": {"binary_data_size": 262144}}], "outputs": outputs}
    text = json.dumps(document).encode()
    fields = (b"Content-Length: %d" % (len(text) + 262144), b"Inference-Header-Content-Length: %d" % len(text))
    request = head(b"POST", PATH, *fields) + text + bytes(262144)
    server = {"name": "a", "device": "cpu"}
    config = config_from({"model": {"path": "models/digits"}, "servers": [server], "router": {"name": "jsq:0.25"}})
    async with running(config, Access(), Ports(0), limits=Limits(held_bytes=8 * MIB)) as ports:
        statuses, wires = [], []
        while 503 not in statuses and len(wires) < 64:
            reader, writer = await unread(ports.http)
            wires.append(writer)
            writer.write(request * 16)  # more answers than any kernel takes before the client reads
            statuses.append(int((await reader.readline()).split()[1]))
        assert statuses[0] == 200
        assert statuses[-1] == 503
        for _ in range(20):
            assert (await asyncio.to_thread(call, ports.http, "GET", "/v2/health/live"))[0] == 200
        for writer in wires:
            writer.transport.abort()
        while (await asyncio.to_thread(infer, ports.http, images))[0] != 200:
            await asyncio.sleep(0.01)


async def test_numbers_that_are_read_from_json_count_as_memory_meanwhile():
    server = {"name": "a", "device": "cpu"}
    config = config_from({"model": {"path": "models/digits"}, "servers": [server], "router": {"name": "jsq:0.25"}})

    def statuses(port: int) -> list[int]:
        tensors = [
            {"name": "image", "shape": [n, 1, 8, 8], "datatype": "UINT8", "data": [1] * 64 * n} for n in (1000, 1)
        ]
        return [call(port, "POST", PATH.decode(), {"inputs": [tensor]})[0] for tensor in tensors]

    async with running(config, Access(), Ports(0), limits=Limits(held_bytes=2 * MIB)) as ports:
        assert await asyncio.to_thread(statuses, ports.http) == [503, 200]
    async with running(config, Access(), Ports(0), limits=Limits(held_bytes=6 * MIB)) as ports:
        assert await asyncio.to_thread(statuses, ports.http) == [200, 200]


def test_clients_that_leave_in_the_middle_leave_no_word_in_the_log(tmp_path, images):
    with serving(tmp_path, "--head-timeout-s", "0.5") as server:
        for turn in range(30):
            with Wire(server.http) as wire:
                wire.send(wire.request(images[:1]) * (1 + turn % 5) + wire.request(images)[: turn * 20])
                if turn % 3 == 0:
                    wire.end()
                elif turn % 2 == 0:
                    wire.answer()
        for data in (
            b"\x00" * 100,
            head(b"G\x00T"),
            head(b"GET", b"//"),
            head(b"GET", b"/v2")[:-2],
            b"PRI * HTTP/2.0\r\n\r\n",
        ):
            exchange(server.http, data)
        assert infer(server.http, images)[0] == 200
        assert server.stop() == 0
        assert [line for line in server.errors if " INFO " not in line] == []


def test_a_path_of_slashes_is_no_page_and_leads_nowhere(server):
    for path in (b"//", b"///", b"//evil.example", b"/v2//", b"/v2/models//"):
        assert exchange(server.http, head(b"GET", path))[:12] == b"HTTP/1.1 404"
    assert exchange(server.http, head(b"GET", b"/v2/"))[:12] == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs": [%s], "inputs": [%s]}',
        b'{"inputs": [%s], "parameters": {"width": 1, "width": 0.5}, "x": [%s]}',
        b'{"inputs": [%s], "other": {"a": 1, "\\u0061": 2}, "x": [%s]}',
    ],
)
def test_a_key_that_comes_twice_is_refused(server, text):
    one = b'{"name": "image", "shape": [1, 1, 8, 8], "datatype": "UINT8", "data": [' + b",".join([b"1"] * 64) + b"]}"
    status, _, reply = call(server.http, "POST", PATH.decode(), text % (one, one))
    assert status == 400
    assert "twice" in reply["error"]
    assert call(server.http, "POST", PATH.decode(), b'{"id": null, "a:b": 1, "inputs": [%s]}' % one)[0] == 200
    assert call(server.management, "POST", "/v2/repository/index", b'{"ready": true, "ready": false}')[0] == 400
