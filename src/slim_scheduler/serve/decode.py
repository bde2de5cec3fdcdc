"""From the body of an infer request to an `InferenceCall`: JSON, the binary tensor extension, or raw bytes.

Tensors are views of the body, never copies. Every size is checked against the limits and against what arrived before
anything is allocated for it; what does not fit is a `Refusal`. The gRPC front shares `image_from`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from slim_scheduler.serve.http.known import LONGEST_JSON, Template, Templates
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.metadata import INPUT, OUTPUT, ModelCard
from slim_scheduler.serve.parameters import NOTHING_ASKED, SHARED_MEMORY, Asked, OutputForm, Parameter, asked_of
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote

Parameters = dict[str, Parameter]
Side = Annotated[int, Meta(ge=0, le=2**31)]
Buffer = bytes | bytearray | memoryview

DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}
LONGEST_ID = 1024
LARGEST_INPUT = 1e6  # normalised pixels are within about 10; raw 16-bit ones are still taken


class InputTensor(msgspec.Struct):
    """One entry of `inputs`; `data` stays text until its size is known to be right."""

    name: str
    shape: list[Side]
    datatype: str
    parameters: Parameters | None = None
    data: msgspec.Raw = msgspec.Raw()


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


LOGITS_AS_JSON = (OutputForm(),)
LOGITS_AS_BYTES = (OutputForm(binary=True),)


class InferenceCall(msgspec.Struct, frozen=True):
    """A request that the engine can serve. `items` is `(items, channels, height, width)`, float32 or uint8, a view of
    the body."""

    items: np.ndarray[Any, Any]
    request_id: str = ""
    asked: Asked = NOTHING_ASKED
    outputs: tuple[OutputForm, ...] = LOGITS_AS_JSON
    lesson: tuple[bytes, Template] | None = None  # a JSON part and its meaning, to be kept once it was answered


_BODY = msgspec.json.Decoder(InferBody)
# Numbers may come flat or nested as deep as the shape; by rank, so that depth is bounded by type.
_NUMBERS: list[Any] = []
_kind: Any = float
for _ in range(8):
    _kind = list[_kind]
    _NUMBERS.append(msgspec.json.Decoder(_kind))


def decode_infer(
    body: Buffer, json_length: int | None, card: ModelCard, limits: Limits, templates: Templates | None = None
) -> InferenceCall:
    """Reads a whole HTTP body. `json_length` is the Inference-Header-Content-Length, None where there was none.

    `templates` are JSON parts of this model that were answered.
    """
    if json_length == 0:
        return InferenceCall(_raw_image(body, card, limits), outputs=LOGITS_AS_BYTES)
    size = len(body) if json_length is None else json_length
    if size > len(body):
        raise invalid(f"Inference-Header-Content-Length is {size}; the body has only {len(body)} bytes")
    if size > limits.json_bytes:
        raise Refusal(
            Kind.TOO_LARGE,
            f"the JSON part has {size} bytes; at most {limits.json_bytes} are read, send the tensor as binary data",
        )
    view = memoryview(body)
    text = bytes(view[:size]) if templates is not None and size <= LONGEST_JSON else b""
    known = templates.find(text) if templates is not None and text else None
    if known is not None:
        image = image_from(view, size, len(view) - size, known.datatype, known.shape, card, limits)
        return InferenceCall(image, "", known.asked, known.outputs)
    request = _parse(view[:size])
    _check_counts(request, limits)
    image = _image(request, view, size, card, limits)
    parameters = request.parameters or {}
    asked, outputs = asked_of(parameters, card), _outputs(request, parameters)
    lesson = None
    if text and not request.id and size < len(body):
        tensor = request.inputs[0]
        lesson = text, Template(tensor.datatype, tensor.shape, asked, outputs, len(image))
    return InferenceCall(image, request.id or "", asked, outputs, lesson)


def image_from(
    data: Buffer, offset: int, size: int, datatype: str, shape: list[int], card: ModelCard, limits: Limits
) -> np.ndarray[Any, Any]:
    """The image tensor whose bytes lie at `offset` of a buffer, as a view `(items, channels, height, width)`."""
    elements = check_shape(datatype, shape, card, limits)
    dtype = DTYPES[datatype]
    if size != elements * dtype.itemsize:
        raise invalid(
            f"input {INPUT} has {size} bytes of data; {datatype} of shape {shape} needs {elements * dtype.itemsize}"
        )
    image = np.frombuffer(data, dtype, elements, offset)
    return _channels_first(_sensible(image), shape, card)


def check_shape(datatype: str, shape: list[int], card: ModelCard, limits: Limits) -> int:
    """Checks an input's datatype and shape against the model; returns its number of elements."""
    if datatype not in DTYPES:
        raise invalid(f"datatype {quote(datatype)} is not accepted for {INPUT}; available: {', '.join(DTYPES)}")
    expected = [-1, *card.item_shape]
    if len(shape) != len(expected) or tuple(shape[1:]) != card.item_shape:
        raise invalid(f"input {INPUT} has shape {quote(shape)}; {card.name} expects {expected}")
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


def _parse(text: memoryview) -> InferBody:
    try:
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


def _check_counts(request: InferBody, limits: Limits) -> None:
    for what, count in (("inputs", len(request.inputs)), ("outputs", len(request.outputs or ()))):
        if count > limits.tensors:
            raise invalid(f"the request has {count} {what}; at most {limits.tensors} are accepted")
    for tensor in request.inputs:
        if len(tensor.shape) > limits.rank:
            raise invalid(f"input {quote(tensor.name)} has {len(tensor.shape)} dimensions; at most {limits.rank}")


def _image(request: InferBody, body: memoryview, start: int, card: ModelCard, limits: Limits) -> np.ndarray[Any, Any]:
    """Finds the one input; walks the binary sections of all inputs, whose sizes must add up to the body's rest."""
    image = None
    offset = start
    for tensor in request.inputs:
        parameters = tensor.parameters or {}
        check_input_parameters(parameters)
        size = parameters.get("binary_data_size")
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(body) - offset:
                raise invalid(
                    f"binary_data_size of input {quote(tensor.name)} is {quote(size)}; "
                    f"{len(body) - offset} bytes of the body are left for it"
                )
            if bytes(tensor.data):
                raise invalid(f"input {quote(tensor.name)} has both data and binary_data_size; send one of them")
        if tensor.name != INPUT:
            raise invalid(f"input {quote(tensor.name)} does not exist; {card.name} has one input, {INPUT}")
        if image is not None:
            raise invalid(f"input {INPUT} is given twice; send it once, with one item per row")
        if size is None:
            image = _image_from_json(tensor, card, limits)
        else:
            image = image_from(body, offset, size, tensor.datatype, tensor.shape, card, limits)
            offset += size
    if image is None:
        raise invalid(f"the request has no input; {card.name} needs {INPUT}")
    if offset != len(body):
        raise invalid(f"the body has {len(body) - offset} bytes that no input's binary_data_size accounts for")
    return image


def _image_from_json(tensor: InputTensor, card: ModelCard, limits: Limits) -> np.ndarray[Any, Any]:
    elements = check_shape(tensor.datatype, tensor.shape, card, limits)
    text = bytes(tensor.data)
    if not text:
        raise invalid(f"input {INPUT} has no data; send data, or binary_data_size and the bytes after the JSON")
    # Whatever the nesting, well-formed data has one comma less than elements: known before anything is parsed.
    count = text.count(b",") + 1
    if count != elements:
        raise invalid(f"input {INPUT} has {count} values; shape {tensor.shape} needs {elements}")
    depth = len(text[:64].translate(None, b" \t\r\n")) - len(text[:64].translate(None, b" \t\r\n").lstrip(b"["))
    if depth not in (1, len(tensor.shape)):
        raise invalid(f"input {INPUT} is nested {depth} deep; send it flat, or nested as shape {tensor.shape}")
    try:
        image = _as_datatype(np.asarray(_NUMBERS[depth - 1].decode(text), np.float64), tensor.datatype)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise invalid(f"data of input {INPUT}: {quote(error, 200)}") from None
    if depth > 1 and list(image.shape) != tensor.shape:
        raise invalid(f"data of input {INPUT} is nested as {list(image.shape)}; its shape says {tensor.shape}")
    return _channels_first(_sensible(image), tensor.shape, card)


def _as_datatype(numbers: np.ndarray[Any, Any], datatype: str) -> np.ndarray[Any, Any]:
    """Numbers as text makes no difference between 7 and 7.0, and neither does JSON's notion of an integer."""
    if datatype == "UINT8" and not ((numbers >= 0) & (numbers <= 255) & (numbers == np.floor(numbers))).all():
        raise invalid(f"input {INPUT} has values that are no pixels; UINT8 holds whole numbers from 0 to 255")
    with np.errstate(over="ignore"):
        return numbers.astype(DTYPES[datatype])


def _raw_image(body: Buffer, card: ModelCard, limits: Limits) -> np.ndarray[Any, Any]:
    """A body without JSON is the FP32 tensor itself; its length says how many items."""
    item_bytes = card.item_elements * 4
    if not body or len(body) % item_bytes:
        raise invalid(f"the raw body has {len(body)} bytes; an item of {INPUT} has {item_bytes} as FP32")
    shape = [len(body) // item_bytes, *card.item_shape]
    return image_from(body, 0, len(body), "FP32", shape, card, limits)


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
