"""Where messages leave the router for a server, and where a server's words reach the dispatcher.

The default carries everything at once. Tests put a lossy one here, because the machines must survive it.
"""

from collections.abc import Callable
from typing import Protocol

from slim_scheduler.core.types import ServerName


class Transport(Protocol):
    def carry(self, server: ServerName, deliver: Callable[[], None]) -> None:
        """Calls `deliver` for one message to or from a server: never, once or twice, now or later."""
        ...


class DirectTransport:
    def carry(self, server: ServerName, deliver: Callable[[], None]) -> None:
        deliver()
