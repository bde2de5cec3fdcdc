"""From the body of an infer request to an `InferenceCall`: JSON, the binary tensor extension, or raw bytes.

Tensors are views of the body, never copies. Every size is checked against the limits and against what arrived before
anything is allocated for it; what does not fit is a `Refusal`. The gRPC front shares `image_from`.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.metadata import INPUT, OUTPUT, ModelCard
from slim_scheduler.serve.parameters import (
    NOTHING_ASKED,
    OUTPUT_FORMS,
    SHARED_MEMORY,
    Asked,
    OutputForm,
    Parameter,
    asked_of,
    refuse_unknown,
)
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote

Parameters = dict[str, Parameter]
Side = Annotated[int, Meta(ge=0, le=2**31)]
Buffer = bytes | bytearray | memoryview

DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}
LONGEST_ID = 1024
LARGEST_INPUT = 1e6  # normalised pixels are within about 10; raw 16-bit ones are still taken
NO_DATA = msgspec.Raw()
LONGEST_REMEMBERED = 512
# While they are read as JSON, numbers are a list (8 bytes each) of floats (24) and an array (8); rows are lists too.
PARSED_NUMBER_BYTES, PARSED_ROW_BYTES = 44, 128
_NOT_OPENING = re.compile(rb"[^\[ \t\r\n]")


class InputTensor(msgspec.Struct):
    """One entry of `inputs`; `data` stays text until its size is known to be right."""

    name: str
    shape: list[Side]
    datatype: str
    parameters: Parameters | None = None
    data: msgspec.Raw = NO_DATA


class OutputWish(msgspec.Struct):
    """One entry of `outputs`."""

    name: str
    parameters: Parameters | None = None


class InferBody(msgspec.Struct):
    """The JSON object of an infer request; unknown keys are ignored, as the protocol asks."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[OutputWish] | None = None


class _SizedTensor(msgspec.Struct):
    """Of an entry of `inputs`, the data alone: the rest is skipped, and nothing is built of it."""

    data: msgspec.Raw = NO_DATA


class _SizedBody(msgspec.Struct):
    inputs: list[_SizedTensor]


LOGITS_AS_JSON = (OutputForm(),)
LOGITS_AS_BYTES = (OutputForm(binary=True),)


class InferenceCall(msgspec.Struct, frozen=True):
    """A request that the engine can serve. `items` is `(items, channels, height, width)`, float32 or uint8, a view of
    the body."""

    items: np.ndarray[Any, Any]
    request_id: str = ""
    asked: Asked = NOTHING_ASKED
    outputs: tuple[OutputForm, ...] = LOGITS_AS_JSON


_BODY = msgspec.json.Decoder(InferBody)
_SIZED_BODY = msgspec.json.Decoder(_SizedBody)
# Numbers may come flat or nested as deep as the shape; by rank, so that depth is bounded by type.
_NUMBERS: list[Any] = []
_kind: Any = float
for _ in range(8):
    _kind = list[_kind]
    _NUMBERS.append(msgspec.json.Decoder(_kind))


class InferHeader(msgspec.Struct, frozen=True):
    """What an infer request says beside its numbers. `size` is where the JSON part ends; `data` are the numbers as JSON
    text, None where they follow the JSON part as bytes."""

    datatype: str
    shape: list[int]
    items: int
    size: int
    data: bytes | None = None
    request_id: str = ""
    asked: Asked = NOTHING_ASKED
    outputs: tuple[OutputForm, ...] = LOGITS_AS_JSON

    @property
    def parsed_bytes(self) -> int:
        """What the numbers take in memory while they are read from JSON text."""
        if self.data is None:
            return 0
        numbers = PARSED_NUMBER_BYTES * math.prod(self.shape)
        return numbers + PARSED_ROW_BYTES * self.data.count(b"[") + len(self.data)


def decode_infer(body: Buffer, json_length: int | None, card: ModelCard, limits: Limits) -> InferenceCall:
    """Reads a whole HTTP body. `json_length` is the Inference-Header-Content-Length, None where there was none."""
    return call_of(read_header(body, json_length, card, limits), body, card)


def read_header(body: Buffer, json_length: int | None, card: ModelCard, limits: Limits) -> InferHeader:
    """Reads everything of a body but the numbers, whose count and place are checked. Raises Refusal."""
    if json_length == 0:
        item_bytes = card.item_elements * 4
        if not body or len(body) % item_bytes:
            raise invalid(f"the raw body has {len(body)} bytes; an item of {INPUT} has {item_bytes} as FP32")
        items = len(body) // item_bytes
        shape = [items, *card.item_shape]
        check_shape("FP32", shape, card, limits)
        return InferHeader("FP32", shape, items, 0, outputs=LOGITS_AS_BYTES)
    size = len(body) if json_length is None else json_length
    if size > len(body):
        raise invalid(f"Inference-Header-Content-Length is {size}; the body has only {len(body)} bytes")
    if size > limits.json_bytes:
        raise Refusal(
            Kind.TOO_LARGE,
            f"the JSON part has {size} bytes; at most {limits.json_bytes} are read, send the tensor as binary data",
        )
    text = bytes(memoryview(body)[:size])
    # Clients send the same JSON with every image: what it says is remembered, as long as it is short.
    read = _read_json_before if size <= LONGEST_REMEMBERED else _read_json
    return read(text, len(body) - size, card, limits)


def _read_json(text: bytes, rest: int, card: ModelCard, limits: Limits) -> InferHeader:
    """Reads a JSON part that `rest` bytes follow."""
    request = _parse(text, limits)
    _check_counts(request, limits)
    tensor = _input(request, rest, card)
    if text.count(b":") != _members(request):
        refuse_repeated_keys(_without_data(text, tensor, limits))
    elements = check_shape(tensor.datatype, tensor.shape, card, limits)
    binary_size: Any = (tensor.parameters or {}).get("binary_data_size")
    data = _json_data(tensor, elements) if binary_size is None else None
    if binary_size is not None:
        _check_size(binary_size, tensor.datatype, tensor.shape, elements)
    left = rest - (binary_size or 0)
    if left:
        raise invalid(f"the body has {left} bytes that no input's binary_data_size accounts for")
    parameters = request.parameters or {}
    return InferHeader(
        tensor.datatype,
        tensor.shape,
        tensor.shape[0],
        len(text),
        data,
        request.id or "",
        asked_of(parameters, card),
        _outputs(request, parameters),
    )


_read_json_before = lru_cache(1024)(_read_json)


def call_of(header: InferHeader, body: Buffer, card: ModelCard) -> InferenceCall:
    """The call of a request whose header was read. Raises Refusal for numbers that are none."""
    if header.data is None:
        image = np.frombuffer(body, DTYPES[header.datatype], header.items * card.item_elements, header.size)
        image = _channels_first(_sensible(image), header.shape, card)
    else:
        image = _image_from_json(header, header.data, card)
    return InferenceCall(image, header.request_id, header.asked, header.outputs)


def image_from(
    data: Buffer, offset: int, size: int, datatype: str, shape: list[int], card: ModelCard, limits: Limits
) -> np.ndarray[Any, Any]:
    """The image tensor whose bytes lie at `offset` of a buffer, as a view `(items, channels, height, width)`."""
    elements = check_shape(datatype, shape, card, limits)
    _check_size(size, datatype, shape, elements)
    image = np.frombuffer(data, DTYPES[datatype], elements, offset)
    return _channels_first(_sensible(image), shape, card)


def _check_size(size: int, datatype: str, shape: list[int], elements: int) -> None:
    needed = elements * DTYPES[datatype].itemsize
    if size != needed:
        raise invalid(f"input {INPUT} has {size} bytes of data; {datatype} of shape {shape} needs {needed}")


def check_shape(datatype: str, shape: list[int], card: ModelCard, limits: Limits) -> int:
    """Checks an input's datatype and shape against the model; returns its number of elements."""
    if datatype not in DTYPES:
        raise invalid(f"datatype {quote(datatype)} is not accepted for {INPUT}; available: {', '.join(DTYPES)}")
    expected = [-1, *card.item_shape]
    if len(shape) != len(expected) or tuple(shape[1:]) != card.item_shape:
        hint = card.layout_hint(tuple(shape[1:]))
        raise invalid(f"input {INPUT} has shape {quote(shape)}; {card.name} expects {expected}{hint}")
    if not 1 <= shape[0] <= limits.items:
        raise invalid(f"input {INPUT} has {shape[0]} items; a request carries 1 to {limits.items}, split it")
    elements = shape[0] * card.item_elements
    if elements > limits.elements:
        raise invalid(f"input {INPUT} has {elements} elements; at most {limits.elements} are accepted, split it")
    return elements


def check_input_parameters(parameters: Mapping[str, Parameter]) -> None:
    """Refuses what would make the server read another process's memory."""
    for name in SHARED_MEMORY:
        if name in parameters:
            raise invalid(f"{name} is set, but shared memory is off; send the tensor's data in the request")


def output_wish(name: str, parameters: Mapping[str, Parameter]) -> int:
    """Checks one requested output; returns how many labels it wants, 0 for logits."""
    if name != OUTPUT:
        raise invalid(f"output {quote(name)} does not exist; available: {OUTPUT}")
    check_input_parameters(parameters)
    refuse_unknown(parameters, OUTPUT_FORMS, "output parameter")
    count = parameters.get("classification", 0)
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count <= 2**31 or count % 1:
        raise invalid(f"classification is {quote(count)}; it must be a whole number from 0")
    return int(count)


def check_forms(forms: tuple[OutputForm, ...]) -> None:
    """There is one output: logits, labels, or both, once each. Raises Refusal."""
    for what, count in (
        ("logits", sum(form.classification == 0 for form in forms)),
        ("classification", sum(form.classification > 0 for form in forms)),
    ):
        if count > 1:
            raise invalid(f"output {OUTPUT} is asked for {count} times as {what}; ask once")


def _parse(text: bytes, limits: Limits) -> InferBody:
    try:
        if len(text) > limits.header_bytes:
            _check_beside(text, limits)
        request = _BODY.decode(text)
        if request.id is not None:
            if len(request.id) > LONGEST_ID:
                raise invalid(f"id has {len(request.id)} characters; at most {LONGEST_ID} are kept")
            request.id.encode()  # a lone surrogate is valid JSON but can never be sent back
        return request
    except RecursionError:
        raise invalid("the JSON is nested too deeply; an infer request needs no more than 8 levels") from None
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise invalid(f"the JSON is not an infer request: {quote(error, 200)}") from None


def _check_beside(text: bytes, limits: Limits) -> None:
    """Bounds what is not numbers, before anything is built of it. Raises Refusal, and msgspec's errors."""
    # Numbers have no objects in them, and an object takes two bytes.
    beside = 2 * text.count(b"{")
    if beside <= limits.header_bytes:
        beside = len(text) - sum(len(memoryview(tensor.data)) for tensor in _SIZED_BODY.decode(text).inputs)
    if beside > limits.header_bytes:
        raise Refusal(
            Kind.TOO_LARGE,
            f"the JSON has over {limits.header_bytes} bytes beside its tensors' data; send less of them",
        )


def _without_data(text: bytes, tensor: InputTensor, limits: Limits) -> bytes:
    """The JSON without the input's numbers, which have no keys, where they are many."""
    data = bytes(tensor.data)
    return text.replace(data, b"0") if len(data) > limits.header_bytes else text


def refuse_repeated_keys(text: bytes) -> None:
    """Raises Refusal where a JSON object has a key twice: one reader takes the first, another the last."""
    try:
        json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # nested too deeply, or a number of thousands of digits
        raise invalid(f"the JSON cannot be read: {quote(error, 200)}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise invalid(f"the JSON has the key {quote(key)} twice; send it once")
    return found


def _members(request: InferBody) -> int:
    """How many keys the JSON has, if it has none but those that were understood. Each has one colon: where there are
    as many colons, no key was given twice."""
    count = 1 + (request.id is not None) + _parameters_members(request.parameters) + (request.outputs is not None)
    for tensor in request.inputs:
        count += 3 + (tensor.data != NO_DATA) + _parameters_members(tensor.parameters)
    for wish in request.outputs or ():
        count += 1 + _parameters_members(wish.parameters)
    return count


def _parameters_members(parameters: Parameters | None) -> int:
    return 0 if parameters is None else 1 + len(parameters)


def _check_counts(request: InferBody, limits: Limits) -> None:
    for what, count in (("inputs", len(request.inputs)), ("outputs", len(request.outputs or ()))):
        if count > limits.tensors:
            raise invalid(f"the request has {count} {what}; at most {limits.tensors} are accepted")
    for tensor in request.inputs:
        if len(tensor.shape) > limits.rank:
            raise invalid(f"input {quote(tensor.name)} has {len(tensor.shape)} dimensions; at most {limits.rank}")


def _input(request: InferBody, rest: int, card: ModelCard) -> InputTensor:
    """The one input; `rest` bytes follow the JSON part."""
    found = None
    for tensor in request.inputs:
        parameters = tensor.parameters or {}
        check_input_parameters(parameters)
        size = parameters.get("binary_data_size")
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= rest:
                raise invalid(
                    f"binary_data_size of input {quote(tensor.name)} is {quote(size)}; "
                    f"{rest} bytes of the body are left for it"
                )
            if bytes(tensor.data):
                raise invalid(f"input {quote(tensor.name)} has both data and binary_data_size; send one of them")
            rest -= size
        if tensor.name != INPUT:
            raise invalid(f"input {quote(tensor.name)} does not exist; {card.name} has one input, {INPUT}")
        if found is not None:
            raise invalid(f"input {INPUT} is given twice; send it once, with one item per row")
        found = tensor
    if found is None:
        raise invalid(f"the request has no input; {card.name} needs {INPUT}")
    return found


def _json_data(tensor: InputTensor, elements: int) -> bytes:
    """The numbers as text, as many as there must be."""
    text = bytes(tensor.data)
    if not text:
        raise invalid(f"input {INPUT} has no data; send data, or binary_data_size and the bytes after the JSON")
    # Whatever the nesting, well-formed data has one comma less than elements: known before anything is parsed.
    count = text.count(b",") + 1
    if count != elements:
        raise invalid(f"input {INPUT} has {count} values; shape {tensor.shape} needs {elements}")
    return text


def _image_from_json(header: InferHeader, text: bytes, card: ModelCard) -> np.ndarray[Any, Any]:
    first = _NOT_OPENING.search(text)
    depth = text.count(b"[", 0, first.start() if first else len(text))
    if depth not in (1, len(header.shape)):
        raise invalid(f"input {INPUT} is nested {depth} deep; send it flat, or nested as shape {header.shape}")
    try:
        image = _as_datatype(np.asarray(_NUMBERS[depth - 1].decode(text), np.float64), header.datatype)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise invalid(f"data of input {INPUT}: {quote(error, 200)}") from None
    if depth > 1 and list(image.shape) != header.shape:
        raise invalid(f"data of input {INPUT} is nested as {list(image.shape)}; its shape says {header.shape}")
    return _channels_first(_sensible(image), header.shape, card)


def _as_datatype(numbers: np.ndarray[Any, Any], datatype: str) -> np.ndarray[Any, Any]:
    """Numbers as text makes no difference between 7 and 7.0, and neither does JSON's notion of an integer."""
    if datatype == "UINT8" and not ((numbers >= 0) & (numbers <= 255) & (numbers == np.floor(numbers))).all():
        raise invalid(f"input {INPUT} has values that are no pixels; UINT8 holds whole numbers from 0 to 255")
    with np.errstate(over="ignore"):
        return numbers.astype(DTYPES[datatype])


def _sensible(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # A value that is too large, or not finite, shows in the sum of squares, which takes a third of the time.
    if image.dtype.kind != "f" or np.vdot(image, image) <= LARGEST_INPUT**2:
        return image
    if not np.isfinite(image).all():
        raise invalid(f"input {INPUT} has values that are not finite; FP32 pixels are normalised numbers")
    largest = float(np.abs(image).max())
    if largest > LARGEST_INPUT:
        raise invalid(
            f"input {INPUT} has a value of size {largest:g}; at most {LARGEST_INPUT:g} is accepted, "
            "FP32 pixels are normalised numbers"
        )
    return image


def _channels_first(image: np.ndarray[Any, Any], shape: list[int], card: ModelCard) -> np.ndarray[Any, Any]:
    image = image.reshape(shape)
    if card.layout == "NHWC" and len(shape) == 4:
        return image.transpose(0, 3, 1, 2)  # (items, height, width, channels) -> (items, channels, height, width)
    return image


def _outputs(request: InferBody, parameters: Mapping[str, Parameter]) -> tuple[OutputForm, ...]:
    default = _flag("binary_data_output", parameters.get("binary_data_output", False))
    if not request.outputs:
        return LOGITS_AS_BYTES if default else LOGITS_AS_JSON
    forms = []
    for wish in request.outputs:
        wished = wish.parameters or {}
        forms.append(
            OutputForm(output_wish(wish.name, wished), _flag("binary_data", wished.get("binary_data", default)))
        )
    check_forms(tuple(forms))
    return tuple(forms)


def _flag(name: str, value: Parameter) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{name} is {quote(value)}; it must be true or false")
    return value
