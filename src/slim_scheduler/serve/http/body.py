"""Collecting a request's body: its size is checked against the limits while it arrives."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from slim_scheduler.serve.compression import too_large
from slim_scheduler.serve.memory import MemoryBudget

Receive = Callable[[], Awaitable[Mapping[str, Any]]]


class Disconnected(Exception):  # noqa: N818 - an outcome, not an error
    """The client went away before its request was complete."""


async def read_body(receive: Receive, declared: int | None, limit: int, memory: MemoryBudget) -> bytes:
    """The whole body as it came. The caller releases its length when done with it.

    Raises Refusal when it is, or says it will be, longer than `limit`; Disconnected when the client went away.
    """
    if declared is not None and declared > limit:
        raise too_large(declared, limit)
    message = await receive()
    if message["type"] != "http.request":
        raise Disconnected
    first: bytes = message.get("body", b"")
    size = len(first)
    memory.reserve(size)
    if not message.get("more_body", False):
        if size > limit:
            memory.release(size)
            raise too_large(size, limit)
        return first
    body = bytearray(first)
    try:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            piece: bytes = message.get("body", b"")
            if size + len(piece) > limit:
                raise too_large(size + len(piece), limit)
            memory.reserve(len(piece))
            size += len(piece)
            body += piece
            if not message.get("more_body", False):
                return bytes(body)
    except BaseException:
        memory.release(size)
        raise
