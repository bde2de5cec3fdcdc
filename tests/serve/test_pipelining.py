"""Several requests on one connection, in pieces and in one piece: each gets its own answer, in order."""

import numpy as np
import pytest

from slim_scheduler.client.wire import request_head
from tests.serve.wire import Wire, metrics


def test_the_same_head_again_means_the_same_and_the_body_is_read_anew(server, images):
    with Wire(server.http) as wire:
        first = [wire.ask(image[None])[1] for image in images]
        again = [wire.ask(image[None])[1] for image in images]
    assert not np.allclose(first[0], first[1])
    assert np.allclose(first, again, atol=1e-4)


def test_a_wrong_body_is_refused_and_the_next_one_served(server, images):
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
def test_a_request_may_come_in_pieces(server, images, cut, fields):
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
def test_requests_in_one_piece_are_answered_in_order_the_wrong_ones_too(server, images, field):
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
        outer = request_head("POST", "/v2/models/digits/infer", wire.host, len(inner), {})
        wire.send(outer)
        wire.send(inner)  # begins a segment of its own, as a request would
        assert wire.answer()[0] == 400
        assert wire.silent()


def test_answers_are_counted(server, images):
    before = metrics(server.http)['slim_http_responses_total{status="200"}']
    with Wire(server.http) as wire:
        for _ in range(5):
            wire.ask(images[:1])
    assert metrics(server.http)['slim_http_responses_total{status="200"}'] == before + 5
