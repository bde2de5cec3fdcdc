"""One connection without a network: bytes in, bytes out, in every order that clients can think of."""

import asyncio
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slim_scheduler.serve.access import Access, Guard
from slim_scheduler.serve.http.connection import CLOSED, MOVES, SLICE, Connection, ConnectionState
from slim_scheduler.serve.http.known import LONGEST_HEAD, MOST, KnownHeads
from slim_scheduler.serve.http.outbox import Outbox
from slim_scheduler.serve.http.request import HttpRequest
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget

HOST = b"Host: localhost\r\n"


class Front:
    """Takes every request, and answers with its path and body when it is told to (or at once)."""

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self.taken: list[bytes] = []
        self.waiting: list[tuple[Connection, HttpRequest]] = []
        self._guard = Guard(Access())

    def check(self, request: HttpRequest, scheme: str) -> int:
        self._guard.check(request.path, scheme, request.headers, request.version)
        request.infer = re.fullmatch("/infer", request.path)
        return 1 << 20

    def take(self, connection: Connection, request: HttpRequest) -> None:
        self.taken.append(bytes(request.body))
        self.waiting.append((connection, request))
        if self.at_once:
            self.answer()

    def answer(self, body: bytes | None = None) -> None:
        connection, request = self.waiting.pop(0)
        connection.answer(200, [], request.path.encode() + b" " + bytes(request.body) if body is None else body)


class Transport(asyncio.Transport):
    """A socket that takes everything, or nothing while `stuck`."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.ended, self.closed, self.stuck = b"", False, False, False
        self.unread = 0
        self.full: Callable[[], None] = lambda: None
        self.socket, self.client = socket.socketpair()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

    def write(self, data: Any) -> None:
        assert not self.ended
        self.written += data
        if self.stuck:
            self.unread += len(data)
            self.full()

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread


class Owner:
    def __init__(self, front: Front, **limits: Any) -> None:
        self.front = front
        self.limits = Limits(**limits)
        self.memory = MemoryBudget(self.limits.held_bytes)
        self.connections: set[Connection] = set()
        self.tasks: set[Any] = set()
        self.ending = False
        self.heads = KnownHeads()
        self.outbox = Outbox(lambda write: write())
        self.loop = None


class Wire:
    def __init__(self, at_once: bool = True, **limits: Any) -> None:
        self.front = Front(at_once)
        self.owner = Owner(self.front, **limits)
        self.connect()

    def connect(self) -> None:
        self.transport = Transport()
        self.connection = Connection(self.owner)
        self.transport.full = self.connection.pause_writing
        self.connection.connection_made(self.transport)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)

    def answers(self) -> list[tuple[int, bytes, bytes]]:
        """Status, Connection field and body of every answer so far; interim ones too."""
        found, rest = [], self.transport.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            fields = dict(line.split(b": ", 1) for line in lines)
            size = int(fields.get(b"content-length", 0))
            found.append((int(first.split()[1]), fields.get(b"connection", b""), rest[:size]))
            rest = rest[size:]
        return found

    def statuses(self) -> list[int]:
        return [status for status, _, _ in self.answers()]


def request(body: bytes = b"", path: bytes = b"/a", *, size: int | None = None, fields: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % (len(body) if size is None else size)
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + fields + length + b"\r\n" + body


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
CHUNKED = (
    b"POST /c HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nA: b\r\n\r\n"
)


def test_requests_cut_anywhere_are_answered_in_order():
    stream = b"".join(
        (
            request(b"one"),
            CHUNKED,
            request(b"", b"/two"),
            request(request(b"smuggled"), b"/inner", fields=UPGRADE),
            request(b"x" * 3 * SLICE, b"/long"),
            b"\r\n",
            request(b"", b"/upgrade", fields=b"Connection: upgrade\r\nUpgrade: websocket\r\n"),
            b"GET http://localhost/absolute?q=1 HTTP/1.1\r\n" + HOST + b"\r\n",
        )
    )
    inner = request(b"smuggled")
    expected = [b"/a one", b"/c abcde", b"/two ", b"/inner " + inner, b"/long " + b"x" * 3 * SLICE]
    expected += [b"/upgrade ", b"/absolute "]
    rng = np.random.default_rng(3)
    for cuts in range(200):
        ends = sorted({*rng.integers(1, len(stream), cuts % 20).tolist(), len(stream)})
        for at_once in (True, False):
            wire = Wire(at_once)
            for begin, end in zip([0, *ends], ends, strict=False):
                wire.send(stream[begin:end])
                while not at_once and wire.front.waiting and rng.random() < 0.5:
                    wire.front.answer()
            while wire.front.waiting:
                wire.front.answer()
            assert [body for _, _, body in wire.answers()] == expected
            assert set(wire.statuses()) == {200}
            assert wire.connection.state is ConnectionState.IDLE
            assert wire.owner.memory.used == 0


class NothingKnown(KnownHeads):
    def find(self, data: bytes) -> HttpRequest | None:
        return None


@pytest.mark.parametrize("seed", range(20))
def test_a_head_that_is_known_means_what_it_means_read(seed, monkeypatch):
    """The same bytes in the same pieces, byte for byte the same answers, whether or not heads are remembered."""
    monkeypatch.setattr(time, "time", lambda: 0.0)  # an answer has its date
    rng = np.random.default_rng(seed)
    path = b"/infer"
    said = [request(b"x" * size, path) for size in (0, 3, 3, 40)]
    said += [request(b"abc", path, size=size) for size in (2, 4)]  # a byte too many, or too few
    said += [request(b"abc", path, fields=b"X: %d\r\n\r\n" % n) for n in range(2)]  # the head ends before its length
    said += [request(b"abc", path, fields=fields) for fields in (b"Expect: 100-continue\r\n", b"Connection: close\r\n")]
    said += [request(request(b"in", path), path, fields=UPGRADE), CHUNKED, request(b"abc", b"/other"), b"\r\n"]
    said += [request(b"abc", path) * 2, b"POST /infer HTTP/1.1\r\n"]
    wires = [Wire(), Wire()]
    wires[1].owner.heads = NothingKnown()
    often = [0.1, 0.4, 0.2, *[0.3 / (len(said) - 3)] * (len(said) - 3)]
    found = 0
    for _ in range(30):
        pieces = [said[at] for at in rng.choice(len(said), 6, p=often)]
        for wire in wires:
            wire.connect()
            wire.send(*pieces)
        found += wires[0].owner.heads.find(request(b"xxx", path)) is not None
        assert wires[0].transport.written == wires[1].transport.written
        assert (wires[0].transport.ended, wires[0].front.taken) == (wires[1].transport.ended, wires[1].front.taken)
        for wire in wires:
            wire.connection.connection_lost(None)
            assert wire.owner.memory.used == 0
    assert found > 20, "nothing was remembered, so nothing was tested"


def test_no_more_heads_are_remembered_than_there_is_room_for():
    wire = Wire()
    for number in range(3 * MOST):
        wire.send(request(b"", b"/infer", fields=b"X: %d\r\n" % number))
    assert len(wire.owner.heads) <= MOST
    wire.send(request(b"", b"/infer", fields=b"X: " + b"x" * LONGEST_HEAD + b"\r\n"))
    assert len(wire.owner.heads) <= MOST
    assert set(wire.statuses()) == {200}


def test_what_is_answered_while_reading_goes_out_later_and_in_order():
    wire = Wire()
    later: list[Callable[[], None]] = []
    wire.owner.outbox = Outbox(later.append)
    wire.send(request(b"1"))
    assert (wire.front.taken, wire.transport.written) == ([b"1"], b"")
    later.pop()()
    assert [body for _, _, body in wire.answers()] == [b"/a 1"]
    wire.send(request(b"2"))
    wire.send(request(b"3") + request(b"4"))
    wire.front.at_once = False
    wire.send(request(b"5"))
    wire.front.answer()
    wire.front.at_once = True
    wire.send(request(b"6", fields=b"Connection: close\r\n"))
    assert wire.transport.ended, "and nothing is written after the end"
    assert [body for _, _, body in wire.answers()] == [b"/a %d" % number for number in range(1, 7)]
    for write in later:
        write()
    assert len(wire.answers()) == 6


def test_an_answer_for_a_client_that_has_gone_keeps_no_other_back():
    wires = [Wire(), Wire()]
    outbox = Outbox(lambda write: None)
    for wire in wires:
        wire.owner.outbox = outbox
        wire.send(request(b"1"))
    wires[0].transport.abort()
    outbox.write_now()
    assert [wire.statuses() for wire in wires] == [[], [200]]


@pytest.mark.parametrize("word", [b"h2c", b"websocket", b"TLS/1.0", b"anything"])
def test_an_upgrade_is_not_taken_up_and_its_body_is_a_body(word):
    wire = Wire()
    inner = request(b"smuggled", b"/inner")
    wire.send(request(b"", size=len(inner), fields=b"Connection: Upgrade\r\nUpgrade: " + word + b"\r\n"))
    assert wire.front.taken == []
    wire.send(inner)
    assert wire.front.taken == [inner]
    assert wire.statuses() == [200]
    wire.send(request(b"", b"/next"))
    assert wire.statuses() == [200, 200]


def test_white_space_after_a_field_is_no_part_of_it():
    wire = Wire()
    wire.send(b"GET /a HTTP/1.1\r\nHost: localhost:8000 \t \r\nConnection: close \r\n\r\n")
    assert wire.statuses() == [200]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost:evil.com\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1]evil.com\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost evil.com\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost:80:80\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.com\r\n\r\n", 403),
        (b"GET http://evil.com/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET http://localhost@evil.com/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET ftp://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"CONNECT / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 200-ok\r\nContent-Length: 3\r\n\r\nabc", 417),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1048577\r\n\r\n", 413),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"1" * 70_000, 431),
        (b"\x16\x03\x01\x02\x00\x01", 400),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused_and_the_connection_ends(head, status):
    wire = Wire()
    wire.send(head + request(b"", b"/behind"))
    assert wire.front.taken == []
    (answer,) = wire.answers()
    assert answer[:2] == (status, b"close")
    assert b'{"error":' in answer[2]
    assert wire.transport.ended, "what the client still sends must not reset the connection before it has read this"
    assert not wire.transport.closed
    wire.send(b"more")
    assert wire.connection.eof_received() is False
    wire.connection.connection_lost(None)
    assert wire.owner.memory.used == 0


def test_what_cannot_be_read_is_answered_after_what_came_before_it():
    wire = Wire(at_once=False)
    wire.send(request(b"AAA") + b"XX\x00 no HTTP\r\n\r\n")
    assert (wire.front.taken, wire.transport.written) == ([b"AAA"], b"")
    wire.front.answer()
    assert wire.statuses() == [200, 400]


def test_a_client_that_has_sent_its_end_gets_all_its_answers():
    wire = Wire(at_once=False)
    wire.send(request(b"1") + request(b"2") + request(b"half", size=10))
    assert wire.connection.eof_received() is True
    wire.front.answer()
    assert not wire.transport.closed
    wire.front.answer()
    assert [body for _, _, body in wire.answers()] == [b"/a 1", b"/a 2"]
    assert wire.transport.closed


def test_a_client_that_has_sent_its_end_and_waits_is_asked_whether_it_is_there():
    wire = Wire(at_once=False)
    wire.send(request(b"1"))
    wire.connection.eof_received()
    now = time.monotonic()
    wire.connection.sweep(now + 1.0)
    assert wire.statuses() == []
    wire.connection.sweep(now + 3.0)
    wire.front.answer()
    assert wire.statuses() == [100, 200]
    wire = Wire(at_once=False)
    wire.send(b"GET /a HTTP/1.0\r\n" + HOST + b"\r\n")
    wire.connection.eof_received()
    wire.connection.sweep(time.monotonic() + 3.0)
    wire.front.answer()
    assert wire.statuses() == [200], "HTTP/1.0 has no interim answers"


def test_http_1_0_keeps_the_connection_where_it_is_asked_to():
    wire = Wire()
    wire.send(b"GET /a HTTP/1.0\r\n" + HOST + b"Connection: Keep-Alive\r\n\r\n")
    wire.send(b"GET /b HTTP/1.0\r\n" + HOST + b"Expect: 200-ok\r\nConnection: Keep-Alive\r\n\r\n")
    assert [(status, field) for status, field, _ in wire.answers()] == [(200, b"keep-alive")] * 2
    wire.send(b"GET /c HTTP/1.0\r\n" + HOST + b"\r\n")
    assert wire.answers()[-1][1] == b"close"
    assert wire.transport.ended


def test_who_waits_for_continue_is_told_so_in_turn():
    wire = Wire(at_once=False)
    wire.send(request(b"1") + request(b"", size=3, fields=b"Expect: 100-continue\r\n"))
    assert wire.transport.written == b""
    wire.front.answer()
    wire.send(b"abc")
    wire.front.answer()
    assert wire.statuses() == [200, 100, 200]


def test_continue_comes_after_the_answer_that_was_still_to_be_written():
    wire = Wire()
    wire.send(request(b"1") + request(b"", size=3, fields=b"Expect: 100-continue\r\n"))
    wire.send(b"abc")
    assert wire.statuses() == [200, 100, 200]


def test_a_refusal_comes_instead_of_continue():
    wire = Wire()
    wire.send(request(b"", size=1 << 30, fields=b"Expect: 100-continue\r\n"))
    assert wire.statuses() == [413]


def test_the_last_answer_of_each_connection_says_so_when_the_server_ends():
    wire = Wire(at_once=False)
    wire.send(request(b"1") + request(b"2", size=3))
    wire.owner.ending = True
    wire.front.answer()
    wire.send(b"34")
    wire.front.answer()
    assert [(field, body) for _, field, body in wire.answers()] == [(b"", b"/a 1"), (b"close", b"/a 234")]
    assert wire.transport.ended


def test_a_connection_that_was_quiet_is_let_go_and_no_other():
    wire = Wire(at_once=False)
    now = wire.connection._since
    wire.connection.close_if_quiet(now + 0.5, 1.0)
    wire.send(request(b"1", size=2))
    wire.connection.close_if_quiet(now + 10.0, 1.0)
    wire.send(b"2")
    wire.connection.close_if_quiet(now + 10.0, 1.0)
    assert not wire.transport.closed
    wire.front.answer()
    wire.transport.client.send(b"P")
    wire.connection.close_if_quiet(now + 10.0, 1.0)
    assert not wire.transport.closed, "it asks just now"
    wire.transport.socket.recv(1)
    wire.connection.close_if_quiet(now + 10.0, 1.0)
    assert wire.transport.closed


def test_answers_that_are_not_read_count_and_their_reader_is_not_served_meanwhile():
    wire = Wire(at_once=False, held_bytes=1000)
    wire.transport.stuck = True
    wire.send(request(b"1") + request(b"2"))
    wire.front.answer(b"x" * 900)
    assert wire.owner.memory.used >= 900
    assert wire.front.taken == [b"1"]
    other = Wire(at_once=False)
    other.connection._memory = wire.owner.memory
    other.send(request(b"3"))
    other.front.answer(b"y" * 900)
    assert other.statuses() == [503]
    wire.transport.unread, wire.transport.stuck = 0, False
    wire.connection.resume_writing()
    assert wire.front.taken == [b"1", b"2"]
    wire.front.answer(b"z" * 900)
    assert wire.statuses() == [200, 200]
    assert wire.owner.memory.used == 0


def test_a_client_that_does_not_read_is_let_go_and_its_bytes_are_released():
    wire = Wire(at_once=False)
    wire.transport.stuck = True
    wire.send(request(b"1"))
    wire.front.answer(b"x" * 900)
    wire.connection.sweep(wire.connection._since + 29.0)
    assert not wire.transport.closed
    wire.connection.sweep(wire.connection._since + 31.0)
    assert wire.transport.closed
    wire.connection.connection_lost(None)
    assert wire.owner.memory.used == 0


@pytest.mark.parametrize("where", ["transport", "kernel"])
def test_a_client_that_reads_slowly_gets_its_whole_answer(where):
    wire = Wire(at_once=False)
    wire.transport.stuck = True
    wire.send(request(b"1"))
    wire.front.answer(b"x" * 900)
    if where == "kernel":
        for _ in range(10):
            wire.transport.socket.sendall(b"x" * 90)  # counted until all of it was read
    now = wire.connection._since
    for _ in range(10):
        now += 20.0
        wire.connection.sweep(now)
        if where == "kernel":
            wire.transport.client.recv(90)
        else:
            wire.transport.unread -= 1
    assert not wire.transport.closed
    wire.connection.sweep(now)
    wire.connection.sweep(now + 29.0)
    assert not wire.transport.closed
    wire.connection.sweep(now + 31.0)
    assert wire.transport.closed


def test_what_is_read_ahead_is_bounded_however_small_the_requests_are():
    wire = Wire(at_once=False)
    tiny = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
    wire.send(tiny * 6000)
    assert len(wire.connection._requests) <= SLICE // len(tiny) + 1
    for _ in range(6000):
        wire.front.answer()
    assert wire.statuses() == [200] * 6000


def test_a_client_is_not_slow_while_its_bytes_wait_here():
    wire = Wire(at_once=False)
    second = request(b"0123456789")
    wire.send(request(b"AAA") + second[:20], second[20:])
    wire.connection.sweep(wire.connection._since + 1000.0)
    assert wire.transport.written == b""
    wire.front.answer()
    assert wire.front.taken == [b"AAA", b"0123456789"]


@pytest.mark.parametrize("sent", [b"", b"POST /a HT", request(b"abc", size=1000)])
def test_a_client_that_is_too_slow_is_told_and_let_go(sent):
    wire = Wire()
    wire.send(*filter(None, (sent,)))
    wire.connection.sweep(wire.connection._since + 9.0)
    assert wire.transport.written == b""
    wire.connection.sweep(wire.connection._since + 31.0)
    assert wire.statuses() == [408]
    assert wire.transport.ended
    wire.connection.sweep(wire.connection._since + 3.0)
    assert wire.transport.closed


def test_more_connections_than_there_may_be_are_refused():
    wire = Wire(connections=1)
    second = Transport()
    Connection(wire.owner).connection_made(second)
    assert b" 503 " in second.written
    assert second.ended


def test_a_client_that_leaves_leaves_nothing_behind():
    wire = Wire(at_once=False)
    wire.send(request(b"1" * 100) + request(b"2" * 100) + request(b"3" * 50, size=100))
    assert wire.owner.memory.used == 250
    wire.connection.connection_lost(None)
    assert wire.owner.memory.used == 0
    wire.front.answer()
    assert wire.transport.written == b""
    assert wire.owner.connections == set()


def test_no_other_moves_are_made():
    for state, allowed in MOVES.items():
        for other in ConnectionState:
            connection = Wire().connection
            connection.state = state
            if other is state or other in allowed:
                connection._move(other)
                assert connection.state is other
            else:
                with pytest.raises(AssertionError, match=f"{state.name}, then {other.name}"):
                    connection._move(other)
    assert MOVES[CLOSED] == ()
