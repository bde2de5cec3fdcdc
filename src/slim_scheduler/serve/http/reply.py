"""Answers to HTTP requests: refusals as status, fields and body, and how a head is written."""

import math
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

import msgspec

from slim_scheduler.serve.refusal import Kind, Refusal

Field = tuple[bytes, bytes]
Reply = tuple[int, list[Field], bytes]  # status, fields, body

REMEMBERED = 512  # heads of answers, and refusals
JSON = (b"content-type", b"application/json")
STATUS_LINES = {status: f"HTTP/1.1 {status} {status.phrase}\r\n".encode() for status in HTTPStatus}


def refused(refusal: Refusal) -> Reply:
    """A refusal as an answer."""
    fields: list[Field] = [JSON]
    if refusal.kind is Kind.UNAVAILABLE:
        fields.append((b"retry-after", b"%d" % whole_seconds(refusal.retry_after or 1.0)))
    elif refusal.kind is Kind.UNAUTHENTICATED:
        fields.append((b"www-authenticate", b"Bearer"))
    elif refusal.kind is Kind.NO_METHOD:
        fields.append((b"allow", b"POST"))
    return int(refusal.kind), fields, _error(refusal.message)


@lru_cache(REMEMBERED)
def _error(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


def content_length(body: bytes) -> Field:
    return b"content-length", b"%d" % len(body)


def whole_seconds(retry_after: float) -> int:
    """As the field has it."""
    return max(1, math.ceil(retry_after))


def head_bytes(status: int, fields: tuple[Field, ...]) -> bytes:
    """An answer's head with its date (RFC 9110, 6.6.1) and the empty line after it."""
    return _but_for_the_date(status, fields) + _date(int(time.time()))


@lru_cache(1)
def _date(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n\r\n".encode()


@lru_cache(REMEMBERED)
def _but_for_the_date(status: int, fields: tuple[Field, ...]) -> bytes:
    """Most answers of a server have one of a few."""
    parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]  # type: ignore[call-overload]
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)
