"""Guarantees 24 and 25 for the parser: nothing that is sent breaks it or makes it grow."""

import gzip
import tracemalloc
import zlib

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slim_scheduler.serve.compression import inflate_now
from slim_scheduler.serve.refusal import Kind, Refusal
from tests.serve.hostile import CARD, LIMITS, Malformed, fuzz_one, malformed, parse

MIB = 1 << 20


def test_50_000_malformed_requests_are_refused_or_understood_without_growth():
    process = psutil.Process()
    for request in malformed(seed=1, count=5_000):  # what is allocated once, now
        parse(request)
    before = process.memory_info().rss
    understood = sum(parse(request) is not None for request in malformed(seed=2, count=45_000))
    assert 0 < understood < 30_000
    assert process.memory_info().rss - before < 32 * MIB


@given(st.binary(max_size=600))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_request_or_a_refusal(data):
    fuzz_one(data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5), st.lists))
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_request_or_a_refusal(value):
    import json

    text = json.dumps({"inputs": [{"name": "image", "shape": value, "datatype": "FP32", "data": value}]})
    parse(Malformed(text.encode("utf-8", "surrogatepass"), None, None))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_takes_no_more_memory_than_the_limit(encoding):
    bomb = (gzip.compress if encoding == "gzip" else zlib.compress)(bytes(256 * MIB), 9)
    tracemalloc.start()
    with pytest.raises(Refusal) as caught:
        inflate_now(bomb, encoding, MIB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.kind is Kind.TOO_LARGE
    assert peak < 3 * MIB


def test_numbers_are_counted_before_they_are_parsed():
    """A list of a million empty lists would take 50 times its text."""
    text = b'{"inputs":[{"name":"image","shape":[1,1,8,8],"datatype":"FP32","data":[' + b"[]," * 80_000 + b"1]}]}"
    tracemalloc.start()
    assert parse(Malformed(text, None, None)) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MIB
    assert len(text) < LIMITS.body_bytes
    assert CARD.item_elements == 64
