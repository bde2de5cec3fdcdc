"""Simulated links: when a message of so many bytes arrives.

Each server has one link with a direction down (to it) and one up (from it), or all share one medium. A direction
carries one message after the other at its bandwidth; latency comes on top and delays nobody else. What is sent, and
whether it gets there at all, is decided elsewhere.
"""

from collections.abc import Iterable

from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.setup.config import NetworkConfig


class _Direction:
    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at: Seconds = 0.0


class SimulatedNetwork:
    """Arrival times under FIFO bandwidth. Messages must be sent in the order of time."""

    def __init__(self, config: NetworkConfig, servers: Iterable[ServerName]) -> None:
        names = list(servers)
        mbps = config.mbps if config.shared_mbps is None else config.shared_mbps
        self._seconds_per_byte = 8 / (mbps * 1e6)
        self._latency = config.latency_ms / 1e3
        if config.shared_mbps is None:
            self._down = {name: _Direction() for name in names}
            self._up = {name: _Direction() for name in names}
        else:
            medium = _Direction()
            self._down = self._up = dict.fromkeys(names, medium)

    def to_server(self, server: ServerName, size: Bytes, now: Seconds) -> Seconds:
        """Arrival of a message from the dispatcher."""
        return self._through(self._down[server], size, now)

    def from_server(self, server: ServerName, size: Bytes, now: Seconds) -> Seconds:
        """Arrival of a message at the dispatcher."""
        return self._through(self._up[server], size, now)

    def between(self, home: ServerName, server: ServerName, size: Bytes, now: Seconds) -> Seconds:
        """Arrival of a message from one server at another: it holds both links, from when both are free, at once."""
        up, down = self._up[home], self._down[server]
        up.free_at = down.free_at = max(now, up.free_at, down.free_at) + size * self._seconds_per_byte
        return down.free_at + self._latency

    def _through(self, direction: _Direction, size: Bytes, now: Seconds) -> Seconds:
        free_at = direction.free_at
        direction.free_at = free_at = (free_at if free_at > now else now) + size * self._seconds_per_byte
        return free_at + self._latency
