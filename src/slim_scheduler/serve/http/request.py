"""One HTTP request, and what its head may say.

`Connection` fills a `HttpRequest` while it reads. `check_head` is asked when the head is complete and refuses what two
servers could understand in two ways, before any of the body is read. Whether this client may ask is `Guard`'s question.
"""

import re
from urllib.parse import unquote

import msgspec

from slim_scheduler.serve.http.fields import HeaderMap, check_repeats
from slim_scheduler.serve.http.reply import Field
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote

# scheme "://" authority path, as a proxy is asked (RFC 9112, 3.2.2).
ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
CONTINUE = b"100-continue"


class HttpRequest(msgspec.Struct):
    """A request that arrives or has arrived. Names in `fields` and `headers` are in lower case.

    `reserved` are the bytes that its body takes of the budget; `limit` is how long the body may be; `read` is when the
    last byte came, on the monotonic clock. `infer` has model and version where inference is asked for. A `refusal` is
    the answer to what could not be read.
    """

    method: str = ""
    target: bytes = b""
    version: str = "1.1"
    fields: list[Field] = []
    headers: HeaderMap = {}
    path: str = ""
    query: bytes = b""
    keep_alive: bool = False
    whole_head: bool = False
    waits_for_continue: bool = False
    infer: re.Match[str] | None = None
    limit: int = 0
    reserved: int = 0
    body: bytes | bytearray = b""
    read: float = 0.0
    refusal: Refusal | None = None


def check_head(request: HttpRequest) -> None:
    """Fills in `headers`, `path`, `query` and `waits_for_continue`. Raises Refusal."""
    if request.version not in ("1.1", "1.0"):
        raise invalid(f"HTTP {request.version} is not spoken here; use HTTP/1.1")
    headers = request.headers = dict(request.fields)
    if len(headers) < len(request.fields):
        check_repeats(request.fields)
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        _check_coding(coding, request.version)
    target = request.target
    if not target.startswith(b"/"):
        target = _origin_form(target, headers)
    path, _, request.query = target.partition(b"?")
    if b"#" in target or not path.isascii():
        raise invalid(f"target {quote(target.decode('latin-1'))} is no path; percent-encode what is not a letter")
    if request.method == "CONNECT":
        raise Refusal(Kind.NO_METHOD, "CONNECT is not served: this is no proxy")
    request.path = _served_path(path.decode("ascii"))
    expectation = headers.get(b"expect")
    if expectation is not None and request.version == "1.1":  # RFC 9110, 10.1.1: HTTP/1.0 has none
        if expectation.lower() != CONTINUE:
            text = quote(expectation.decode("latin-1"))
            raise Refusal(Kind.EXPECTATION, f"Expect: {text} cannot be met; only 100-continue can")
        request.waits_for_continue = True


def _check_coding(coding: bytes, version: str) -> None:
    if version == "1.0":
        raise invalid("Transfer-Encoding came with HTTP/1.0, which has none; send Content-Length, or HTTP/1.1")
    if coding.lower() != b"chunked":
        raise invalid(f"Transfer-Encoding {quote(coding.decode('latin-1'))} is not accepted; send chunked alone")


def _origin_form(target: bytes, headers: HeaderMap) -> bytes:
    """The path and query of an absolute target, which must name the host that the Host field names."""
    found = ABSOLUTE.fullmatch(target)
    if found is None:
        raise invalid(f"target {quote(target.decode('latin-1'))} is not accepted; send a path that begins with /")
    if found[1].lower() != headers.get(b"host", b"").lower():
        host = quote(found[1].decode("latin-1"))
        raise invalid(f"the target's host {host} is not the Host field's; this server is no proxy, send the path alone")
    return found[2] if found[2].startswith(b"/") else b"/" + found[2]


def _served_path(path: str) -> str:
    """With and without a slash at the end is the same; a redirect would lose a POST's body."""
    if "%" in path:
        path = unquote(path)
    return path[:-1] if path.endswith("/") and len(path) > 1 and not path.endswith("//") else path
