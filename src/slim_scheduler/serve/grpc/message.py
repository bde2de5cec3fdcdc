"""A ModelInferRequest on the wire: its tensors' data cut out as views, the small rest for protobuf to parse.

Protobuf copies what it parses, and a message of a few bytes per field grows by ten to a hundred times. So the data of
tensors is never parsed, and what is left is bounded before protobuf sees it. The wire format is a sequence of fields,
each a tag (field number and wire type) and a value: https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from slim_scheduler.serve.compression import inflate
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.refusal import Kind, Refusal, invalid

# Field numbers of ModelInferRequest, of its InferInputTensor, and of that one's InferTensorContents.
INPUTS, RAW_CONTENTS = 5, 7
CONTENTS = 5
UINT_CONTENTS, FP32_CONTENTS = 4, 6

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types; 3 and 4 are groups, which nobody sends
INPUT_TAG = bytes((INPUTS << 3 | LENGTH_DELIMITED,))
LONGEST_VARINT = 10
GZIP = b"\x1f\x8b"
DEFLATE = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # by level


class Outline(NamedTuple):
    """`head` is the message without its tensors' data; the others are pieces of that data, in order."""

    head: bytes
    raw: list[memoryview]
    fp32: list[memoryview]
    uint: list[memoryview]


def is_compressed(message: bytes) -> bool:
    """Whether the client compressed it, as gRPC's gzip or deflate: no message of the protocol begins like these."""
    return message.startswith(GZIP) or message.startswith(DEFLATE)


async def inflated(message: bytes, limit: int) -> bytes:
    """The message as it was before the client compressed it. Raises Refusal where that is over the limit."""
    if not is_compressed(message):
        return message
    return await inflate(message, "gzip" if message.startswith(GZIP) else "deflate", limit)


def outline(message: bytes, limits: Limits) -> Outline:
    """Cuts a ModelInferRequest. Raises Refusal for what is not one, or has more than tensors' data in it."""
    view = memoryview(message)
    head = bytearray()
    found = Outline(b"", [], [], [])
    walked = count(1)
    for number, wire_type, begin, value, end in _fields(view, walked, limits):
        if wire_type == LENGTH_DELIMITED and number == RAW_CONTENTS:
            found.raw.append(view[value:end])
        elif wire_type == LENGTH_DELIMITED and number == INPUTS:
            tensor = _without_contents(view[value:end], found, walked, limits)
            head += INPUT_TAG + _varint(len(tensor)) + tensor
        else:
            head += view[begin:end]
        _check(head, found, limits)
    return found._replace(head=bytes(head))


def bytes_of_varints(view: memoryview) -> bytes:
    """Packed integers from 0 to 255, as a byte each. Raises Refusal for others."""
    data = np.frombuffer(view, np.uint8)
    goes_on = data >= 0x80  # the same integer's next seven bits follow
    second = np.zeros_like(goes_on)
    second[1:] = goes_on[:-1]
    if len(data) and (goes_on[-1] or (data[second] > 1).any()):
        raise invalid("uint_contents has values above 255; UINT8 holds 0 to 255")
    values = data & 0x7F
    values[second] = values[second] << 7 | values[np.flatnonzero(second) - 1]
    return values[~goes_on].tobytes()


def _without_contents(view: memoryview, found: Outline, walked: Iterator[int], limits: Limits) -> bytearray:
    """One input without its contents, which join those found."""
    head = bytearray()
    for number, wire_type, begin, value, end in _fields(view, walked, limits):
        if number != CONTENTS or wire_type != LENGTH_DELIMITED:
            head += view[begin:end]
        else:
            contents = view[value:end]
            for kind, packing, _, first, last in _fields(contents, walked, limits):
                if kind == FP32_CONTENTS and packing in (LENGTH_DELIMITED, FIXED32):
                    found.fp32.append(contents[first:last])
                elif kind == UINT_CONTENTS and packing in (LENGTH_DELIMITED, VARINT):
                    found.uint.append(contents[first:last])
                else:
                    raise invalid("contents of another type than FP32 and UINT8 are not accepted; send raw bytes")
                _check(head, found, limits)
        _check(head, found, limits)
    return head


def _check(head: bytearray, found: Outline, limits: Limits) -> None:
    if len(head) > limits.header_bytes:
        raise Refusal(
            Kind.TOO_LARGE,
            f"the message has over {limits.header_bytes} bytes beside its tensors' data; send less of them",
        )
    pieces = len(found.raw) + len(found.fp32) + len(found.uint)
    if pieces > limits.tensors:
        raise invalid(f"the message has {pieces} pieces of tensor data; at most {limits.tensors} are accepted")


def _fields(view: memoryview, walked: Iterator[int], limits: Limits) -> Iterator[tuple[int, int, int, int, int]]:
    """Each field's number, wire type, begin, begin of its value (a length-delimited one's bytes), and end.

    `walked` counts the fields of the whole message, also the empty ones. Raises Refusal where they are too many.
    """
    at, end = 0, len(view)
    while at < end:
        if next(walked) > limits.fields:
            raise Refusal(Kind.TOO_LARGE, f"the message has over {limits.fields} fields; send fewer of them")
        begin = at
        tag = view[at]
        at += 1
        if tag >= 0x80:
            tag, at = _read_varint(view, begin)
        wire_type = tag & 7
        value = at
        if wire_type == LENGTH_DELIMITED:
            length, value = _read_varint(view, at)
            at = value + length
        elif wire_type == VARINT:
            _, at = _read_varint(view, at)
        elif wire_type in (FIXED64, FIXED32):
            at += 8 if wire_type == FIXED64 else 4
        else:
            raise _not_a_message(f"wire type {wire_type} at byte {begin}")
        if at > end:
            raise _not_a_message(f"the field at byte {begin} ends {at - end} bytes after the message")
        yield tag >> 3, wire_type, begin, value, at


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """An integer and where it ends."""
    if at < len(view) and view[at] < 0x80:
        return view[at], at + 1
    number = shift = 0
    for position in range(at, min(at + LONGEST_VARINT, len(view))):
        byte = view[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + 1
        shift += 7
    raise _not_a_message(f"the integer at byte {at} does not end")


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _not_a_message(what: str) -> Refusal:
    return invalid(f"the message is not valid protobuf: {what}")
