"""The servers of a Ray cluster: every `ServerScheduler` in its actor, messages in between.

It places the actors, lets servers join and leave while traffic runs, and cleans up. A server that Ray reports dead is
`ServerLeft` to the dispatcher, one that hangs is silent. Every decision is the machines'.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from ray.exceptions import RayError, RayTaskError

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    CancelTasks,
    ServerDraining,
    ServerJoined,
    ServerLeft,
    ServerReported,
    TasksReturned,
)
from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.engine.activations import gather
from slim_scheduler.engine.cluster.actor import ServerActor
from slim_scheduler.engine.cluster.channel import SessionEndedError
from slim_scheduler.engine.cluster.item_store import ClusterItemStore
from slim_scheduler.engine.cluster.ray_connection import RayConnection
from slim_scheduler.engine.cluster.remote_server import RemoteServer
from slim_scheduler.engine.cluster.session import CARRIED
from slim_scheduler.engine.cluster.transport import DirectTransport, Transport
from slim_scheduler.engine.cluster.wire import BlockMessage, PollReply
from slim_scheduler.engine.host import DISPATCHER, FleetParts, Host
from slim_scheduler.engine.local.server import reason
from slim_scheduler.setup.config import ServerConfig
from slim_scheduler.setup.machines import allowed_tasks

START_LIMIT: Seconds = 180.0  # for Ray to find a place for every server, and for torch to load there
HUNG_LIMIT: Seconds = 30.0  # a server silent for so long is started anew
DRAIN_LOOK: Seconds = 0.05


class ClusterFleet:
    """`servers` are the router's ends; `transport` carries the messages both ways."""

    def __init__(self, parts: FleetParts, transport: Transport | None = None) -> None:
        self.config = parts.config
        self.items = ClusterItemStore()
        self.servers: dict[ServerName, RemoteServer] = {}
        self._parts = parts
        self._transport = transport or DirectTransport()
        self._connection = RayConnection(parts.config)
        self._model: Any = None  # Ray's reference to the network
        self._serving: dict[ServerName, asyncio.Task[None]] = {}
        self._leaving: set[ServerName] = set()
        self._host: Host

    def connect(self, host: Host) -> None:
        self._host = host

    async def start(self) -> None:
        """Connects to the cluster, places the servers and waits until all of them are warm. Raises ConfigError."""
        self._connection.open()
        self._model = self._connection.put(self._parts.model)
        try:
            await self._place(*self.config.servers)
        except BaseException:
            self._connection.close()
            raise

    async def stop(self) -> None:
        for task in self._serving.values():
            task.cancel()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        for server in self.servers.values():
            server.kill()
        self._connection.close()

    def sample(self) -> None:
        """The servers sample their own devices."""

    @property
    def memory_used(self) -> dict[ServerName, Bytes]:
        return {name: server.memory_used for name, server in self.servers.items()}

    # ---- membership

    async def add(self, server: ServerConfig) -> None:
        """Places one more server and takes it into service, while traffic runs. Raises ConfigError for a known name."""
        known = [placed.name for placed in self.config.servers]  # before any await: another may be placing it now
        if server.name in (*known, *self.servers, DISPATCHER):
            raise ConfigError(f"server {server.name} is there already; choose another name")
        self.config = msgspec.structs.replace(self.config, servers=(*self.config.servers, server))
        try:
            await self._place(server)
        except BaseException:
            self._leave_out(server.name)
            raise

    async def remove(self, name: ServerName, grace: Seconds) -> None:
        """Gives the server no new work, waits up to `grace` until it holds nothing, and takes it out.

        Raises ConfigError for one that does not serve yet, or that is being removed already.
        """
        if name in self._leaving:
            raise ConfigError(f"server {name} is being removed already; wait for that")
        if name not in self._serving:
            if any(name == placed.name for placed in self.config.servers):
                raise ConfigError(f"server {name} is still being added; remove it when it serves")
            raise ConfigError(f"no server is named {name}; there are {', '.join(self._serving)}")
        host, server = self._host, self.servers[name]
        self._leaving.add(name)
        try:
            host.tell_dispatcher(ServerDraining(name))
            latest = host.clock.now() + grace
            while host.clock.now() < latest and self._holds_something(name):
                await asyncio.sleep(DRAIN_LOOK)
        finally:
            self._leaving.remove(name)
        self._serving.pop(name).cancel()
        host.tell_dispatcher(ServerLeft(name, "removed", removed=True))
        del self.servers[name]
        server.kill()
        self._leave_out(name)

    def _leave_out(self, name: ServerName) -> None:
        rest = tuple(server for server in self.config.servers if server.name != name)
        self.config = msgspec.structs.replace(self.config, servers=rest)

    def _holds_something(self, name: ServerName) -> bool:
        return self._host.dispatcher.servers[name].outstanding > 0 or self.items.is_needed_at(name)

    async def _place(self, *configured: ServerConfig) -> None:
        servers = [self._remote(server) for server in configured]
        try:
            await asyncio.wait_for(self._join(*servers), START_LIMIT)
        except TimeoutError:
            asked = [
                f"{knobs.name} {self._connection.needs(knobs)}"
                for knobs, server in zip(configured, servers, strict=True)
                if not server.placed
            ]
            if not asked:
                raise ConfigError(
                    f"every server has a place, but not all were warm within {START_LIMIT:g} s: {_names(configured)}; "
                    "see what Ray's logs say of them, and how long their machines take to import torch"
                ) from None
            raise ConfigError(
                f"not every server was placed within {START_LIMIT:g} s; those without a place ask for "
                f"{', '.join(asked)}, and the cluster has {self._connection.has()}; start Ray on more machines, or "
                "change servers.N.resources"
            ) from None
        except RayTaskError as error:  # a device that is not there, a budget that it does not have
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise ConfigError(f"a server of {_names(configured)}: {reason(cause)}") from None

    def _remote(self, knobs: ServerConfig) -> RemoteServer:
        parts = self._parts
        arguments = (self.config, knobs.name, parts.shape, parts.profiles, parts.margins)
        return RemoteServer(
            knobs,
            allowed_tasks(self.config, knobs, parts.shape, (parts.profiles or {}).get(knobs.name)),
            lambda: self._connection.place(ServerActor, knobs, arguments),
            self._model,
            self._host.clock,
            self.items.take_forgotten,
            parts.logs,
            HUNG_LIMIT,
        )

    async def _join(self, *servers: RemoteServer) -> None:
        """Starts the servers' first sessions, introduces them to each other, and tells the dispatcher."""
        self.servers |= {server.name: server for server in servers}
        for server in servers:
            server.on_reply = self._replied
        try:
            await asyncio.gather(*[server.start_session(self._peers, None) for server in servers])
        except BaseException:
            for server in servers:
                del self.servers[server.name]
                server.kill()
            raise
        for server in servers:
            self._introduce(server)
            self._host.tell_dispatcher(ServerJoined(server.name, server.credit, server.incarnation))
            self._serving[server.name] = task = asyncio.create_task(self._serve(server))
            task.add_done_callback(_report)

    async def _serve(self, server: RemoteServer) -> None:
        """From session to session, until the engine stops or the server is removed."""
        while True:
            try:
                await server.listen()
            except (RayError, SessionEndedError) as error:
                self._host.tell_dispatcher(ServerLeft(server.name, reason(error)))
            if await server.restart(self._peers):
                self._introduce(server)

    def _introduce(self, newcomer: RemoteServer) -> None:
        for server in self.servers.values():
            if server is not newcomer:
                server.add_peer(newcomer.name, newcomer.actor)

    def _peers(self) -> Mapping[ServerName, object]:
        return {server.name: server.actor for server in self.servers.values()}

    # ---- messages

    def deliver(self, server: ServerName, event: BlockArrived | CancelTasks) -> None:
        self._transport.carry(server, partial(self._send, self.servers[server], event))

    def _send(self, server: RemoteServer, event: BlockArrived | CancelTasks) -> None:
        match event:
            case BlockArrived(block):
                sources, rows = self.items.sources_of(block)
                server.deliver(BlockMessage(block, sources), gather(rows).numpy() if rows else None)
            case CancelTasks():
                server.cancel(event)

    def _replied(self, server: RemoteServer, reply: PollReply) -> None:
        for outputs in reply.answers:
            self.items.answered(outputs.tasks, torch.from_numpy(outputs.array.copy()))
        for step in reply.steps:
            if step.event is not None:
                self._host.recorder.step(server.name, step.at, step.event, step.commands)
            for command in step.commands:
                if isinstance(command, CARRIED):
                    self._transport.carry(server.name, partial(self._reported, command))

    def _reported(self, message: BatchReported | TasksReturned | ServerReported) -> None:
        if isinstance(message, BatchReported):
            self.items.done(message.server, message.tasks)
        self._host.tell_dispatcher(message)


def _names(servers: Iterable[ServerConfig]) -> str:
    return ", ".join(server.name for server in servers)


def _report(serving: "asyncio.Task[None]") -> None:
    """A fault of this program must not end a server's channel unseen."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        serving.get_loop().call_exception_handler({"message": "the router lost a server", "exception": error})
