"""Answers to HTTP requests: refusals with their status and fields, and those that are alike, made once."""

import math
from functools import lru_cache

import msgspec

from slim_scheduler.frontend.connection import answer_bytes
from slim_scheduler.frontend.refusal import Kind, Refusal

Field = tuple[bytes, bytes]
Reply = tuple[int, list[Field], bytes]  # status, fields, body

JSON = (b"content-type", b"application/json")
LEAST_RETRY_AFTER = 0.1


def content_length(body: bytes) -> Field:
    return b"content-length", b"%d" % len(body)


def refused(refusal: Refusal) -> Reply:
    """A refusal as an answer."""
    fields: list[Field] = [JSON]
    if refusal.kind is Kind.UNAVAILABLE:
        fields.append((b"retry-after", b"%d" % max(1, math.ceil(refusal.retry_after or 1.0))))
    elif refusal.kind is Kind.UNAUTHENTICATED:
        fields.append((b"www-authenticate", b"Bearer"))
    elif refusal.kind is Kind.NO_METHOD:
        fields.append((b"allow", b"POST"))
    return int(refusal.kind), fields, msgspec.json.encode({"error": refusal.message})


@lru_cache(1024)
def refused_full(items: int, limit: int) -> bytes:
    """Beyond the peak, making refusals is a part of the work, and many are alike: these are the whole answers."""
    return _whole(Refusal(Kind.UNAVAILABLE, f"the queue is full: {items} items came and the limit is {limit}", 1.0))


@lru_cache(1024)
def refused_late(behind: str, wait: float, deadline: float) -> bytes:
    message = f"requests wait about {wait * 1e3:.0f} ms {behind} and the deadline is in {deadline * 1e3:.0f} ms"
    return _whole(Refusal(Kind.UNAVAILABLE, message, max(LEAST_RETRY_AFTER, wait)))


def _whole(refusal: Refusal) -> bytes:
    status, fields, body = refused(refusal)
    return answer_bytes(status, [*fields, content_length(body)], body)
