"""The Ray actor of one server: the calls that the router and other servers make, and nothing else.

Ray places it and starts it again when its process or machine dies. It comes up blank: the router then begins a new
session with the next incarnation, so nothing of an earlier one can be mistaken for news.
"""

import asyncio
import os
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import ray

from slim_scheduler.core.profile import Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, ServerName, TaskId
from slim_scheduler.engine.assembly import live_server
from slim_scheduler.engine.cluster.activation_store import ServerActivations
from slim_scheduler.engine.cluster.clock import SharedClock
from slim_scheduler.engine.cluster.ray_connection import gpu_share
from slim_scheduler.engine.cluster.session import NOTHING, ServerSession
from slim_scheduler.engine.cluster.wire import decode_block, decode_cancel, decode_poll, encode, join
from slim_scheduler.engine.executor import Job
from slim_scheduler.engine.local.server import LiveServer
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.setup.config import Config, ServerConfig

SHARE_ERROR = 1e-9  # of a sum of shares, as 10 times 0.1


class SessionStart(msgspec.Struct, frozen=True):
    """What a new session needs to know. `offset` leads from the server's clock to the dispatcher's."""

    incarnation: int
    offset: Seconds
    log: bool


class Place(msgspec.Struct, frozen=True):
    """Where a session runs: Ray's id of the machine, and the process there."""

    node: str
    process: int


class ServerActor:
    """The server `name` of a configuration. `margins`: it tells those of its answers."""

    def __init__(
        self,
        config: Config,
        name: ServerName,
        shape: ModelShape,
        profiles: dict[ServerName, Profile] | None,
        margins: bool,
    ) -> None:
        self._config = on_own_gpus(config, name)
        self._sharing = servers_on_device(config, name)
        self._name = name
        self._shape = shape
        self._profiles = profiles
        self._margins = margins
        self._session: ServerSession | None = None
        self._peers: dict[ServerName, Any] = {}

    async def clock(self) -> Seconds:
        """This machine's monotonic clock, for the router to compare with its own."""
        return time.monotonic()

    async def begin(self, start: SessionStart, model: SlimmableModel, peers: dict[ServerName, Any]) -> Place:
        """Starts a session, warm and reporting; an earlier one in this process ends first."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.stop()
        self._peers.update(peers)
        sessions: list[ServerSession] = []

        def finished(_: ServerName, job: Job) -> None:
            sessions[0].finished(job)

        server = await asyncio.to_thread(self._warm_server, model, finished, start.incarnation)
        activations = ServerActivations(self._shape.segments - 1)
        clock = SharedClock(start.offset)
        sessions.append(
            ServerSession(
                server, self._shape, activations, clock, self._peers, self._config.telemetry.period_s, start.log
            )
        )
        self._session = sessions[0]
        self._session.start()
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    async def add_peer(self, name: ServerName, actor: Any) -> None:
        """Another server joined, or came back as another actor."""
        self._peers[name] = actor

    async def deliver(self, message: bytes, *pieces: Any) -> None:
        if self._session is not None:
            self._session.receive(decode_block(message), self._items(pieces))

    async def cancel(self, message: bytes) -> None:
        if self._session is not None:
            self._session.cancel(decode_cancel(message))

    async def poll(self, poll: bytes, *pieces: Any) -> bytes | None:
        """What happened since the router last asked; None from an actor that has not begun to live."""
        if self._session is None:
            return None
        return encode(await self._session.poll(decode_poll(poll), self._items(pieces)))

    async def fetch(self, tasks: list[TaskId], pieces: int) -> list[Any]:
        """Outputs for another server, in `1 + pieces` values; none where an actor has not begun to live."""
        return [NOTHING, *[b""] * pieces] if self._session is None else await self._session.fetch(tasks, pieces)

    def _items(self, pieces: tuple[Any, ...]) -> npt.NDArray[np.float32] | None:
        return join(pieces, self._shape.item_shape) if pieces else None

    def _warm_server(
        self, model: SlimmableModel, finished: Callable[[ServerName, Job], None], incarnation: int
    ) -> LiveServer:
        """A server that has run every segment once, so that its first batch does not wait for it."""
        server = live_server(
            self._config,
            self._name,
            model,
            self._shape,
            self._profiles,
            finished,
            incarnation=incarnation,
            margins=self._margins,
            sharing=self._sharing,
        )
        device = server.executor.device
        with device.thread():
            for segment in range(self._shape.segments):
                device.unload(device.load(segment, self._shape.widths[0]))
        return server


def servers_on_device(config: Config, name: ServerName) -> int:
    """The most servers of a cluster's configuration that may use the device of one, and so its meter; itself too.

    A machine may have all servers on CPUs that ask for the same named resources. A GPU holds as many of those as their
    shares of it let in, the smallest first.
    """
    own = next(server for server in config.servers if server.name == name)
    alike = [server for server in config.servers if _named(server) == _named(own)]
    if own.on_cpu:
        return sum(server.on_cpu for server in alike)
    if not own.device.startswith("cuda"):
        return 1
    others = sorted(gpu_share(server) for server in alike if server.device.startswith("cuda") and server.name != name)
    taken = list(accumulate([gpu_share(own), *others]))
    return 1 + sum(share <= 1 + SHARE_ERROR for share in taken[1:])


def _named(server: ServerConfig) -> set[str]:
    return set(dict(server.resources)) - {"GPU"}


def on_own_gpus(config: Config, name: ServerName) -> Config:
    """The configuration of one server. Ray shows an actor only its own GPUs, so the first that it sees is its own."""
    own = next(server for server in config.servers if server.name == name)
    if own.device.startswith("cuda"):
        own = msgspec.structs.replace(own, device="cuda:0")
    return msgspec.structs.replace(config, servers=(own,))
