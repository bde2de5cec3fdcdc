"""Answers that were made while requests were read, and go out when those that have come are read.

Refusals are made so. A client of many connections is woken once for all of them and not in between
(docs/lab/2026-11-http-overload.md).
"""

import asyncio
from collections.abc import Callable
from typing import Any


class Outbox:
    """What one listener's connections have still to write. `call_soon` calls when the event loop comes round."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], Any]) -> None:
        self._call_soon = call_soon
        self._unwritten: list[tuple[asyncio.WriteTransport, bytes]] = []

    def write_soon(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        self._unwritten.append((transport, data))
        if len(self._unwritten) == 1:
            self._call_soon(self.write_now)

    def write_now(self) -> None:
        """Before anything that has to come after it: another answer, the end of a connection."""
        unwritten, self._unwritten = self._unwritten, []
        for transport, data in unwritten:
            if not transport.is_closing():
                transport.write(data)
