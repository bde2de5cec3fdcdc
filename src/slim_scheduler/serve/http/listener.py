"""The sockets of one HTTP listener and the connections that came through them.

Accepts, looks once in a while for clients that are too slow, and brings all connections to their end when the server
stops: who asks once more is answered with `Connection: close`, who does not is let go when it has been quiet.
"""

import asyncio
import errno
import socket
import ssl
import time

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import Seconds
from slim_scheduler.serve.access import Access
from slim_scheduler.serve.http.connection import Connection, Front
from slim_scheduler.serve.http.known import KnownHeads
from slim_scheduler.serve.http.outbox import Outbox
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget

# libuv accepts one connection per listening handle and turn of the loop: with one handle, new connections of a busy
# server wait for seconds.
ACCEPTED_AT_ONCE = 32
BACKLOG = 2048
SWEEP_S: Seconds = 0.5
QUIET_S: Seconds = 1.0  # a client that asks again and again has asked by then
LOOK_S: Seconds = 0.02


class HttpListener:
    """One HTTP listener. `ending`: the last answer of each connection says so."""

    def __init__(self, front: Front, limits: Limits, memory: MemoryBudget, access: Access) -> None:
        self.front = front
        self.loop = asyncio.get_running_loop()  # asking for it costs a system call
        self.limits = limits
        self.memory = memory
        self.heads = KnownHeads()
        self.outbox = Outbox(self.loop.call_soon)
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.ending = False
        self._tls = tls_context(access)
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (for port 0). Raises ConfigError where that cannot be had."""
        first = _bind(host, port)
        for number in range(ACCEPTED_AT_ONCE):
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(self),
                sock=first.dup() if number else first,
                backlog=BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=self.limits.head_timeout_s if self._tls else None,
            )
            self._servers.append(server)
        self._sweeper = asyncio.create_task(self._sweep())
        return int(first.getsockname()[1])

    async def drain(self, until: Seconds) -> None:
        """Takes no more connections and lets those that are there end, for as long as they ask or wait for an answer.
        Returns when all have ended, or at `until` on the monotonic clock."""
        await self._stop_accepting()
        self.ending = True
        while self.connections and time.monotonic() < until:
            now = time.monotonic()
            for connection in list(self.connections):
                connection.close_if_quiet(now, QUIET_S)
            await asyncio.sleep(LOOK_S)

    async def close(self, until: Seconds) -> None:
        """Ends every connection; answers on their way out have until then."""
        await self._stop_accepting()
        self.ending = True
        for connection in list(self.connections):
            connection.close_if_quiet(time.monotonic(), 0.0)
        while self.connections and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        for connection in list(self.connections):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _stop_accepting(self) -> None:
        if self._servers:
            for _ in range(3):  # who has connected already is not turned away by a reset
                await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        self._servers = []

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for connection in list(self.connections):
                connection.sweep(now)


def tls_context(access: Access) -> ssl.SSLContext | None:
    """What TLS needs, where the listener speaks it."""
    if access.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(access.certificate, access.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS cannot start with {access.certificate}: {error}; check --tls-cert and --tls-key"
        ) from None
    if access.client_ca:
        try:
            context.load_verify_locations(access.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"TLS cannot start with {access.client_ca}: {error}; check --tls-client-ca") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        other = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another {other}") from None
