"""A message cut on the wire says the same as one that protobuf parsed whole."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from slim_scheduler.serve.grpc.message import _varint, bytes_of_varints, outline
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.refusal import Refusal
from tests.serve.test_hostile_rpc import malformed

floats = st.lists(st.floats(width=32, allow_nan=False), max_size=20)
pixels = st.lists(st.integers(0, 255), max_size=200)


@st.composite
def requests(draw: Any) -> Any:
    request = pb.ModelInferRequest(model_name=draw(st.text(max_size=5)), id=draw(st.text(max_size=5)))
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(name=draw(st.text(max_size=3)), shape=draw(st.lists(st.integers(-5, 2**40))))
        tensor.contents.fp32_contents.extend(draw(floats))
        tensor.contents.uint_contents.extend(draw(pixels))
        tensor.parameters["a"].bool_param = True
    for _ in range(draw(st.integers(0, 2))):
        request.outputs.add(name="logits").parameters["classification"].int64_param = draw(st.integers(0, 9))
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=300), max_size=4)))
    return request


@settings(max_examples=200, deadline=None)
@given(requests())
def test_what_is_cut_out_and_what_is_left_are_the_whole(request):
    cut = outline(request.SerializeToString(), Limits())
    assert [bytes(piece) for piece in cut.raw] == list(request.raw_input_contents)
    fp32 = np.concatenate([np.array(tensor.contents.fp32_contents, "<f4") for tensor in request.inputs] or [[]])
    assert b"".join(cut.fp32) == fp32.astype("<f4").tobytes()
    given_pixels = [value for tensor in request.inputs for value in tensor.contents.uint_contents]
    assert bytes_of_varints(memoryview(b"".join(cut.uint))) == bytes(given_pixels)
    left = pb.ModelInferRequest()
    left.CopyFrom(request)
    del left.raw_input_contents[:]
    for tensor in left.inputs:
        tensor.ClearField("contents")
    assert pb.ModelInferRequest.FromString(cut.head) == left


@pytest.mark.parametrize("value", [256, 300, 2**14, 2**31, 2**32 - 1])
def test_integers_that_are_no_pixels_are_refused(value):
    contents = pb.InferTensorContents(uint_contents=[1, value, 2])
    (_, packed) = contents.SerializeToString()[:2], contents.SerializeToString()[2:]
    with pytest.raises(Refusal, match="above 255"):
        bytes_of_varints(memoryview(packed))


def test_no_bytes_are_a_defect():
    """Whatever comes: an outline or a refusal that can be printed."""
    refusals = []
    for _, wire in malformed(5, 5000):
        try:
            outline(wire, Limits())
        except Refusal as refusal:
            refusals.append(refusal.message)
    assert all(message.isprintable() for message in refusals)
    assert len(refusals) > 1000


def test_what_is_left_is_bounded_before_it_is_parsed():
    with pytest.raises(Refusal, match="65536 bytes beside"):
        outline(b"\x1a\x80\x80\x04" + bytes(65536), Limits())
    with pytest.raises(Refusal, match="17 pieces of tensor data"):
        outline(b"\x3a\x00" * 17, Limits())


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x2a\x02\x32\x00", b"\x0a\x00"])
def test_fields_are_counted_though_they_are_empty(field):
    """Each costs an iteration on the event loop; 8 MiB of them are 8 kB as gzip."""
    many = field * 2**22
    with pytest.raises(Refusal, match="over 4096 fields"):
        outline(b"\x2a" + _varint(len(many)) + many, Limits(header_bytes=2**24, tensors=2**24))


def test_the_fields_of_all_inputs_count_together():
    contents = b"\x2a\x00" * 100
    tensor = b"\x2a" + _varint(len(contents)) + contents
    outline(tensor * 40, Limits())
    with pytest.raises(Refusal, match="over 4096 fields"):
        outline(tensor * 41, Limits())
