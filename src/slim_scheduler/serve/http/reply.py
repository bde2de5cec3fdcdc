"""Refusals as answers to HTTP requests: status, fields and body.

`HttpFront` calls it at the edge; what is refused, and why, was decided before.
"""

import math
from functools import lru_cache

import msgspec

from slim_scheduler.serve.http.connection import answer_bytes
from slim_scheduler.serve.refusal import Kind, Refusal

Field = tuple[bytes, bytes]
Reply = tuple[int, list[Field], bytes]  # status, fields, body

JSON = (b"content-type", b"application/json")


def content_length(body: bytes) -> Field:
    return b"content-length", b"%d" % len(body)


def refused(refusal: Refusal) -> Reply:
    """A refusal as an answer."""
    fields: list[Field] = [JSON]
    if refusal.kind is Kind.UNAVAILABLE:
        fields.append((b"retry-after", b"%d" % whole_seconds(refusal.retry_after or 1.0)))
    elif refusal.kind is Kind.UNAUTHENTICATED:
        fields.append((b"www-authenticate", b"Bearer"))
    elif refusal.kind is Kind.NO_METHOD:
        fields.append((b"allow", b"POST"))
    return int(refusal.kind), fields, msgspec.json.encode({"error": refusal.message})


def whole_seconds(retry_after: float) -> int:
    """As the field has it."""
    return max(1, math.ceil(retry_after))


@lru_cache(1024)
def refused_early(reason: str, retry_after: int) -> bytes:
    """A whole answer. Beyond the peak, making refusals is a part of the work; with whole numbers many are alike."""
    status, fields, body = refused(Refusal(Kind.UNAVAILABLE, reason, retry_after))
    return answer_bytes(status, [*fields, content_length(body)], body)
