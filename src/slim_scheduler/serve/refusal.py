"""Why a request gets no answer, in the protocol's terms.

A `Refusal` is raised anywhere between the socket and the engine and turned into a reply at the edge: HTTP takes the
kind's status, gRPC its code (see `rpc.py`). The message has the value, the limit and the next step; whatever of it
came from the client goes through `quote`, so that it is short and printable.
"""

from enum import IntEnum

from slim_scheduler.core.errors import SlimError


class Kind(IntEnum):
    """The HTTP status of each kind of refusal, as Triton maps its errors."""

    INVALID = 400
    UNAUTHENTICATED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    NO_METHOD = 405
    TOO_SLOW = 408
    TOO_LARGE = 413
    EXPECTATION = 417
    HEAD_TOO_LARGE = 431
    INTERNAL = 500
    UNSUPPORTED = 501
    UNAVAILABLE = 503


class Refusal(SlimError):  # noqa: N818 - an outcome with a status, as Reply is
    """A request that is turned down. `retry_after` is in seconds, None where waiting would not help."""

    def __init__(self, kind: Kind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after = retry_after


DEFECT = Refusal(Kind.INTERNAL, "a defect of the server; its log says more")


def invalid(message: str) -> Refusal:
    """A refusal that only the client can mend."""
    return Refusal(Kind.INVALID, message)


def quote(text: object, limit: int = 64) -> str:
    """A client's text, fit to be repeated in an error: printable ASCII, at most `limit` characters."""
    shown = str(text)[: limit + 1].encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else "?" for c in shown)
    return shown if len(shown) <= limit else shown[:limit] + "..."
