"""What an infer request may look like on the wire, and what is refused before it costs anything."""

import json
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from slim_scheduler.serve.decode import LARGEST_INPUT, InferenceCall, call_of, decode_infer, read_header
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.metadata import ModelCard
from slim_scheduler.serve.parameters import Asked, OutputForm, asked_of
from slim_scheduler.serve.refusal import Kind, Refusal


def tensor(images: np.ndarray, **more: Any) -> dict[str, Any]:
    datatype = "FP32" if images.dtype == np.float32 else "UINT8"
    return {"name": "image", "shape": list(images.shape), "datatype": datatype, **more}


def binary(images: np.ndarray, **more: Any) -> tuple[bytes, int]:
    document = {"inputs": [tensor(images, parameters={"binary_data_size": images.nbytes})], **more}
    head = json.dumps(document).encode()
    return head + images.tobytes(), len(head)


def as_json(images: np.ndarray, data: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": [tensor(images, data=data)], **more}).encode()


def refusal(card: ModelCard, body: bytes, length: int | None = None, limits: Limits | None = None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        decode_infer(body, length, card, limits or Limits())
    return caught.value


def decoded(card: ModelCard, body: bytes, length: int | None = None) -> InferenceCall:
    return decode_infer(body, length, card, Limits())


def test_binary_tensor_is_a_view_of_the_body(card, images):
    body, length = binary(images)
    items = decoded(card, body, length).items
    assert np.array_equal(items, images)
    assert not items.flags.owndata


@pytest.mark.parametrize("indent", [None, 2, 8])
@pytest.mark.parametrize("nested", [True, False])
def test_json_data_may_be_flat_or_nested(card, images, nested, indent):
    data = images.tolist() if nested else images.ravel().tolist()
    body = json.dumps(json.loads(as_json(images, data, id="x")), indent=indent).encode()
    call = decoded(card, body)
    assert np.array_equal(call.items, images)
    assert call.request_id == "x"
    assert call.outputs == (OutputForm(),)


def test_pixels_are_accepted_as_uint8(card):
    pixels = np.arange(64, dtype=np.uint8).reshape(1, 1, 8, 8)
    for body, length in (binary(pixels), (as_json(pixels, pixels.tolist()), None)):
        items = decoded(card, body, length).items
        assert items.dtype == np.uint8
        assert np.array_equal(items, pixels)


def test_channels_last_is_turned_where_the_metadata_says_so():
    card = ModelCard("photos", (4, 5, 3), "NHWC", 10, 1, (1.0,))
    images = np.random.default_rng(0).standard_normal((2, 4, 5, 3), dtype=np.float32)
    body, length = binary(images)
    assert np.array_equal(decoded(card, body, length).items, images.transpose(0, 3, 1, 2))


def test_raw_body_is_one_tensor_and_answered_in_binary(card, images):
    call = decoded(card, images.tobytes(), 0)
    assert np.array_equal(call.items, images)
    assert call.outputs == (OutputForm(binary=True),)


def test_what_triton_reserves_for_itself_is_let_through(card, images):
    body, length = binary(images, parameters={"triton_enable_empty_final_response": True})
    assert decoded(card, body, length).asked == Asked()


def test_a_misspelt_output_parameter_is_refused_with_the_nearest(card, images):
    body, length = binary(images, outputs=[{"name": "logits", "parameters": {"clasification": 3}}])
    assert (
        "output parameter clasification does not exist; nearest: classification" in refusal(card, body, length).message
    )


def test_an_image_in_the_other_order_of_axes_is_told_which_layout_to_ask_for(card, images):
    last = msgspec.structs.replace(card, layout="NHWC", item_shape=(8, 8, 1))
    body, length = binary(images)
    assert "(channels last); start the server with --layout NCHW" in refusal(last, body, length).message


def test_outputs_follow_their_own_parameters_before_the_default(card, images):
    body, length = binary(
        images,
        parameters={"binary_data_output": True},
        outputs=[
            {"name": "logits", "parameters": {"binary_data": False}},
            {"name": "logits", "parameters": {"classification": 3}},
        ],
    )
    assert decoded(card, body, length).outputs == (OutputForm(0, False), OutputForm(3, True))


def test_constraints_are_read(card, images):
    body, length = binary(
        images,
        parameters={"deadline_ms": 50, "timeout": 20_000, "accuracy_floor": 0.9, "priority": 2, "width": 0.5},
    )
    assert decoded(card, body, length).asked == Asked(0.02, 0.9, (0.5, 0.5, 0.5, 0.5), 2)


def test_how_sure_an_answer_must_be_is_read(card, images):
    body, length = binary(images, parameters={"confidence_floor": "0.8", "anytime": False})
    assert decoded(card, body, length).asked == Asked(confidence_floor=0.8, anytime=False)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"deadline_ms": float("nan")}, "infer request"),
        ({"deadline_ms": "nan"}, "a number"),
        ({"deadline_ms": "1e999"}, "finite"),
        ({"deadline_ms": "5_0"}, "a number"),
        ({"deadline_ms": "\u0665\u0660"}, "a number"),
        ({"widths": "0.5,0.5,0_0.5,0.5"}, "a number"),
        ({"deadline_ms": -1}, "deadline_ms is -1"),
        ({"deadline_ms": 0}, "above 0"),
        ({"deadline_ms": 1e9}, "deadline_ms is 1000000000; it must be above 0 and at most 86400000"),
        ({"deadline_ms": True}, "a number"),
        ({"deadline_ms": "soon"}, "a number"),
        ({"deadline_ms": 10**400}, "a number"),
        ({"timeout": 1.5}, "whole number"),
        ({"accuracy_floor": 1.5}, "from 0 to 1"),
        ({"confidence_floor": -0.1}, "from 0 to 1"),
        ({"anytime": 1}, "true or false"),
        ({"priority": -1}, "priority is -1"),
        ({"priority": 2**64}, "from 0 to 1000"),
        ({"width": 0.6}, "available: 0.25, 0.5, 0.75, 1"),
        ({"widths": "0.5,0.5"}, "4 segments"),
        ({"width": 0.5, "widths": "0.5,0.5,0.5,0.5"}, "both set"),
        ({"unmet": "maybe"}, "refuse or answer"),
        ({"sequence_id": 7}, "no state"),
        ({"deadline_ms": {"nested": 1}}, "infer request"),
        ({"binary_data_output": 1}, "true or false"),
        ({"widht": 0.5}, "parameter widht does not exist; nearest: width; available: accuracy_floor"),
        ({"deadline": 5}, "nearest: deadline_ms"),
        ({"x" * 5000: 1}, "does not exist"),
    ],
)
def test_parameters_without_meaning_are_refused_with_their_range(card, images, parameters, words):
    body, length = binary(images, parameters=parameters)
    assert words in refusal(card, body, length).message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "picture"}, "one input, image"),
        ({"datatype": "FP16"}, "available: FP32, UINT8"),
        ({"shape": [3, 8, 8]}, "expects [-1, 1, 8, 8]"),
        ({"shape": [3, 1, 8, 9]}, "expects"),
        ({"shape": [3, 8, 8, 1]}, "expects [-1, 1, 8, 8] (channels first); start the server with --layout NHWC"),
        ({"shape": [0, 1, 8, 8]}, "1 to 4096"),
        ({"shape": [2**31, 1, 8, 8]}, "1 to 4096"),
        ({"shape": [-1, 1, 8, 8]}, "infer request"),
        ({"shape": [1] * 30}, "at most 8"),
        ({"shape": [2, 1, 8, 8]}, "needs 512"),
        ({"parameters": {"binary_data_size": 767}}, "needs 768"),
        ({"parameters": {"binary_data_size": 10**12}}, "are left for it"),
        ({"parameters": {"binary_data_size": -1}}, "are left for it"),
        ({"parameters": {"binary_data_size": "768"}}, "are left for it"),
        ({"parameters": {"shared_memory_region": "x"}}, "shared memory is off"),
        ({"data": [1.0]}, "send one of them"),
    ],
)
def test_lying_tensors_are_refused(card, images, change, words):
    document = {"inputs": [{**tensor(images, parameters={"binary_data_size": images.nbytes}), **change}]}
    head = json.dumps(document).encode()
    assert words in refusal(card, head + images.tobytes(), len(head)).message


def test_bytes_that_nobody_accounts_for_are_refused(card, images):
    body, length = binary(images)
    assert "accounts for" in refusal(card, body + b"x", length).message
    assert "left for it" in refusal(card, body[:-1], length).message
    assert "the body has only" in refusal(card, body, len(body) + 1).message


@pytest.mark.parametrize("data", [[], [1.0], [[1.0, 2.0]], "text", None, 5, [None] * 192, [1e999] * 192, [[]] * 192])
def test_json_data_of_another_size_or_kind_is_refused(card, images, data):
    assert refusal(card, as_json(images, data)).kind is Kind.INVALID


def test_pixels_out_of_range_are_refused(card):
    pixels = np.zeros((1, 1, 8, 8), np.uint8)
    for wrong in (256, -1, 1.5, True):
        assert refusal(card, as_json(pixels, [wrong] + [0] * 63)).kind is Kind.INVALID


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(card, images, value):
    images[1, 0, 3, 3] = value
    body, length = binary(images)
    assert "not finite" in refusal(card, body, length).message


@pytest.mark.parametrize("value", [1.1e6, -1.1e6, 3e38, -3e38])
def test_values_beyond_any_pixel_are_refused_with_the_value_and_the_limit(card, images, value):
    images[1, 0, 3, 3] = value
    body, length = binary(images)
    message = refusal(card, body, length).message
    assert f"{abs(value):g}" in message
    assert "1e+06" in message


def test_values_up_to_the_limit_are_taken(card, images):
    images[:] = LARGEST_INPUT  # the sum of their squares passes the limit's
    body, length = binary(images)
    assert (decode_infer(body, length, card, Limits()).items == images).all()


def test_more_tensors_than_allowed_are_refused(card, images):
    document = {"inputs": [tensor(images)] * 17}
    assert "17 inputs" in refusal(card, json.dumps(document).encode()).message
    document = {"inputs": [tensor(images, parameters={"binary_data_size": 0})] * 2}
    assert refusal(card, json.dumps(document).encode()).kind is Kind.INVALID


def test_deep_json_is_refused_without_harm(card):
    for text in (b"[" * 100_000, b'{"inputs":' * 20_000, b'{"x":' + b"[" * 200_000):
        assert refusal(card, text).kind is Kind.INVALID


MANY = 1_000_000


@pytest.mark.parametrize(
    "beside",
    [
        b'"x":[' + b"{}," * MANY + b"{}]",
        b'"x":[' + b"1," * MANY + b"1]",
        b'"inputs":[' + b"{}," * MANY + b"{}]",
        b'"inputs":[{"name":"image","shape":[' + b"1," * MANY + b'1],"datatype":"UINT8","data":[1]}]',
        b'"parameters":{"widths":[' + b"1," * MANY + b"1]}",
        b'"parameters":{"data":[' + b"1," * MANY + b"1]}",
    ],
)
def test_json_beside_the_numbers_is_bounded_before_anything_is_built_of_it(card, beside):
    pixels = np.ones((1, 1, 8, 8), np.uint8)
    body = b"{" + beside + b"," + as_json(pixels, pixels.ravel().tolist())[1:]
    tracemalloc.start()
    try:
        found = refusal(card, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.kind is Kind.TOO_LARGE
    assert found.message == "the JSON has over 65536 bytes beside its tensors' data; send less of them"
    assert peak < 2 * len(body)


@pytest.mark.parametrize("more", [{"id": "a:b"}, {"other": [1, {"a": 2}]}])
def test_numbers_are_not_read_to_find_a_key_that_comes_twice(card, more):
    pixels = np.random.default_rng(3).random((2000, 1, 8, 8), np.float32)
    body = as_json(pixels, pixels.tolist(), **more)
    tracemalloc.start()
    try:
        header = read_header(body, None, card, Limits())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)
    assert np.array_equal(call_of(header, body, card).items, pixels)
    assert "the key id twice" in refusal(card, b'{"id":"x","id":"x","y":1,' + body[1:]).message


@pytest.mark.parametrize("shape", [(1000, 1, 8, 8), (200, 3, 16, 16), (2000, 3, 2, 2)])
@pytest.mark.parametrize("nested", [True, False])
def test_what_numbers_take_while_they_are_read_is_known_before(shape, nested):
    card = ModelCard("any", shape[1:], "NCHW", 10, 1, (1.0,))
    pixels = np.ones(shape, np.uint8)
    body = json.dumps(
        json.loads(as_json(pixels, (pixels if nested else pixels.ravel()).tolist())), separators=(",", ":")
    )
    header = read_header(body.encode(), None, card, Limits())
    tracemalloc.start()
    try:
        call_of(header, body.encode(), card)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= header.parsed_bytes < 2 * peak


def test_widths_are_counted_before_they_are_looked_at(card):
    with pytest.raises(Refusal, match="widths has 1000 values; digits has 4 segments"):
        asked_of({"widths": [float("nan")] * 1000}, card)


def test_json_part_has_its_own_limit(card, images):
    body = as_json(images, images.ravel().tolist())
    assert refusal(card, body, None, Limits(json_bytes=100)).kind is Kind.TOO_LARGE


def test_ids_that_cannot_be_sent_back_are_refused(card, images):
    body, length = binary(images, id="\ud800")
    assert refusal(card, body, length).kind is Kind.INVALID
    body, length = binary(images, id="x" * 2000)
    assert "at most 1024" in refusal(card, body, length).message
