"""What the fields of a request's head say, and what they allow an answer to be."""

import re
import zlib

from slim_scheduler.serve.http.reply import Field
from slim_scheduler.serve.refusal import invalid, quote

HeaderMap = dict[bytes, bytes]

TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
CODINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}  # by their window in zlib
NO_WEIGHT = re.compile(rb"q=0(\.0{0,3})?")
SMALLEST_COMPRESSED = 1024  # a TCP segment; below it compression only costs time
MOST_DIGITS = 18
# Fields with one value: two would be two answers to one question.
SINGLE = (
    b"host",
    b"content-length",
    b"transfer-encoding",
    b"content-encoding",
    b"expect",
    b"inference-header-content-length",
    b"authorization",
    b"origin",
)


def whole_number(headers: HeaderMap, name: bytes) -> int | None:
    """A field's value; None where there is no such field. Raises Refusal."""
    text = headers.get(name)
    if text is None:
        return None
    if not text.isdigit() or len(text) > MOST_DIGITS:
        raise invalid(f"{name.decode().title()} is {quote(text.decode('latin-1'))}; it must be a whole number")
    return int(text)


def traceparent(headers: HeaderMap) -> str:
    """The W3C trace context; empty where there is none that is valid."""
    trace = headers.get(b"traceparent", b"")
    return trace.decode() if trace and TRACEPARENT.fullmatch(trace) else ""


def check_repeats(fields: list[Field]) -> None:
    """Two different answers to one question are how requests are smuggled past a check. Raises Refusal."""
    for name in SINGLE:
        if sum(field == name for field, _ in fields) > 1:
            raise invalid(f"the header {name.decode()} is given twice; send it once")


def compressed(body: bytes, headers: HeaderMap, fields: list[Field]) -> bytes:
    """An answer's body as the client accepts it; adds the field that says how."""
    if len(body) < SMALLEST_COMPRESSED:
        return body
    coding = _coding(headers.get(b"accept-encoding", b""))
    if not coding:
        return body
    fields.append((b"content-encoding", coding))
    stream = zlib.compressobj(1, wbits=CODINGS[coding])
    return stream.compress(body) + stream.flush()


def _coding(accepted: bytes) -> bytes:
    """What of ours an Accept-Encoding names, and not with a weight of 0; empty: nothing."""
    named = [part.replace(b" ", b"").lower().split(b";") for part in accepted.split(b",")]
    taken = {name for name, *weight in named if not weight or NO_WEIGHT.fullmatch(weight[0]) is None}
    return next((coding for coding in CODINGS if coding in taken), b"")
