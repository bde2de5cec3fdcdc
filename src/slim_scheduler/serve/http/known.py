"""Heads of inference requests that were read before: the same bytes mean the same when they come again.

Clients send the same head with every image. To parse and check it again takes a fifth of what the process spends on a
refusal (docs/lab/2026-11-http-overload.md). Only what came whole in one piece is remembered, so that nothing
but these bytes can have decided what they mean; how much is kept is bounded.
"""

from copy import copy

from slim_scheduler.serve.http.request import HttpRequest

LONGEST_HEAD = 2048
MOST = 256  # per listener; when it is full, all are forgotten
# What a client does about its body is no part of what the head means.
SPECIAL = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


class KnownHeads:
    """Heads from the request line to the empty line, each with the request that it begins."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[HttpRequest, int]] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, data: bytes) -> HttpRequest | None:
        """The request that `data` is, where it is one whole request with a known head and no more."""
        end = data.find(b"\r\n\r\n", 0, LONGEST_HEAD) + 4
        known = self._heads.get(data[:end])
        if known is None or len(data) - end != known[1]:
            return None
        request = copy(known[0])
        request.body = data[end:]
        return request

    def learn(self, data: bytes, request: HttpRequest) -> None:
        """Remembers the head of a request that was read from `data`, where `data` is that request and no more."""
        end = data.find(b"\r\n\r\n", 0, LONGEST_HEAD) + 4
        plain = request.infer is not None and request.keep_alive and SPECIAL.isdisjoint(request.headers)
        if not plain or end < 4 or len(data) - end != len(request.body):
            return
        if len(self._heads) >= MOST:
            self._heads.clear()
        known = copy(request)
        known.body, known.reserved = b"", 0
        self._heads[data[:end]] = known, len(request.body)
