"""Requests whose head was served before go past the parser: nothing that a client can see may change by it."""

import socket

import numpy as np
import pytest

from slim_scheduler.client.client import infer_body
from slim_scheduler.client.wire import request_head
from slim_scheduler.serve.http.known import LONGEST_HEAD, MOST, InferHead, KnownHeads, Template, Templates
from slim_scheduler.serve.parameters import NOTHING_ASKED
from tests.serve.wire import metrics


class Wire:
    """One kept connection, for bytes at any time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20.0)
        self._read = self._socket.makefile("rb")
        self._host = f"127.0.0.1:{port}"

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self._read.close()
        self._socket.close()

    def request(self, image: np.ndarray, **fields: str) -> bytes:
        body, length = infer_body(image)
        head = {"inference-header-content-length": str(length)} | fields
        return request_head("POST", "/v2/models/digits/infer", self._host, len(body), head) + body

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> tuple[int, np.ndarray]:
        """Status and logits of the next answer; no logits for an error."""
        status = int(self._read.readline().split()[1])
        fields = {}
        while line := self._read.readline().strip():
            name, _, value = line.partition(b": ")
            fields[name] = value
        body = self._read.read(int(fields[b"content-length"]))
        begin = int(fields.get(b"inference-header-content-length", len(body)))
        return status, np.frombuffer(body[begin:], "<f4")

    def ask(self, image: np.ndarray) -> tuple[int, np.ndarray]:
        self.send(self.request(image))
        return self.answer()

    def silent(self) -> bool:
        """No further answer comes."""
        self._socket.settimeout(0.3)
        try:
            return not self._socket.recv(1)
        except TimeoutError:
            return True


def test_the_same_head_again_means_the_same_and_the_body_is_read_anew(server, images):
    with Wire(server.http) as wire:
        first = [wire.ask(image[None])[1] for image in images]
        again = [wire.ask(image[None])[1] for image in images]
    assert not np.allclose(first[0], first[1])
    assert np.allclose(first, again, atol=1e-4)


def test_a_wrong_body_under_a_known_head_is_refused_and_the_next_one_served(server, images):
    with Wire(server.http) as wire:
        right = wire.ask(images[:1])[1]
        good = wire.request(images[:1])
        wire.send(good.replace(b'"FP32"', b'"FP99"'))
        assert wire.answer()[0] == 400
        wire.send(good[:-4] + np.float32(np.nan).tobytes())
        assert wire.answer()[0] == 400
        status, logits = wire.ask(images[:1])
    assert status == 200
    assert np.allclose(logits, right, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"x-new": "1"}])
@pytest.mark.parametrize("cut", [1, 20, 200, -1])
def test_a_request_may_come_in_pieces_known_or_not(server, images, cut, fields):
    with Wire(server.http) as wire:
        right = wire.ask(images[:1])[1]
        data = wire.request(images[:1], **fields)
        wire.send(data[:cut])
        assert wire.silent() is True
        wire.send(data[cut:])
        wire._socket.settimeout(20.0)
        status, logits = wire.answer()
    assert status == 200
    assert np.allclose(logits, right, atol=1e-4)


def test_pipelined_requests_are_answered_in_order(server, images):
    with Wire(server.http) as wire:
        right = [wire.ask(image[None])[1] for image in images]
        for image in images:  # one after the other without waiting, then all in one piece
            wire.send(wire.request(image[None]))
        in_turn = [wire.answer()[1] for _ in images]
        wire.send(b"".join(wire.request(image[None]) for image in images))
        at_once = [wire.answer()[1] for _ in images]
    assert np.allclose(in_turn, right, atol=1e-4)
    assert np.allclose(at_once, right, atol=1e-4)


@pytest.mark.parametrize("field", ["x-new", "traceparent"])
def test_new_heads_in_one_piece_are_answered_in_order_the_wrong_ones_too(server, images, field):
    with Wire(server.http) as wire:
        right = [wire.ask(image[None])[1] for image in images]
        value = f"00-{'1' * 32}-{'2' * 16}-01"
        requests = [wire.request(image[None], **{field: value}) for image in images]
        lost = wire.request(images[:1], **{field: value}).replace(b"models/digits", b"models/absent")
        wrong = wire.request(images[:1], **{field: value}).replace(b'"FP32"', b'"FP99"')
        wire.send(b"".join([requests[0], wrong, requests[1], lost, *requests[2:]]))
        answers = [wire.answer() for _ in range(len(images) + 2)]
    assert [status for status, _ in answers] == [200, 400, 200, 404, *[200] * (len(images) - 2)]
    assert np.allclose([logits for status, logits in answers if status == 200], right, atol=1e-4)


def test_a_request_inside_a_body_is_no_request(server, images):
    with Wire(server.http) as wire:
        inner = wire.request(images[:1])
        assert wire.ask(images[:1])[0] == 200
        outer = request_head("POST", "/v2/models/digits/infer", wire._host, len(inner), {})
        wire.send(outer)
        wire.send(inner)  # begins a segment of its own, as a known request would
        assert wire.answer()[0] == 400
        assert wire.silent()


def test_only_whole_requests_teach(server, images):
    """A body with an empty line in it must not be cut elsewhere next time."""
    with Wire(server.http) as wire:
        body = b'{"inputs": \r\n\r\n []}'
        data = request_head("POST", "/v2/models/digits/infer", wire._host, len(body), {}) + body
        for _ in range(3):
            wire.send(data)
            assert wire.answer()[0] == 400
        assert wire.ask(images[:1])[0] == 200


def test_answers_to_known_requests_are_counted(server, images):
    before = metrics(server.http)['slim_http_responses_total{status="200"}']
    with Wire(server.http) as wire:
        for _ in range(5):
            wire.ask(images[:1])
    assert metrics(server.http)['slim_http_responses_total{status="200"}'] == before + 5


def test_heads_are_found_only_whole_and_alone_and_their_number_is_bounded():
    heads = KnownHeads()
    raw = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\n\r\n"
    head = InferHead("m", "", 3, None, {})
    heads.learn(raw, head)
    assert heads.find(raw + b"abc") == (head, len(raw))
    for other in (raw + b"ab", raw + b"abcd", raw, b"\r\n" + raw + b"abc", raw.lower() + b"abc", b"abc"):
        assert heads.find(other) is None
    assert heads.find(b"x" * LONGEST_HEAD + raw) is None
    for number in range(2 * MOST):
        heads.learn(b"%d" % number, head)
    assert len(heads._heads) <= MOST


def test_the_number_of_templates_is_bounded():
    templates = Templates()
    for number in range(2 * MOST):
        templates.learn(b"%d" % number, Template("FP32", [1, 1, 8, 8], NOTHING_ASKED, (), 1))
    assert len(templates._templates) <= MOST
    assert templates.find(b"%d" % (2 * MOST - 1)) is not None
