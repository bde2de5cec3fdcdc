"""`ClusterEngine`: the same engine with its servers on the machines of a Ray cluster.

It places the server actors, lets servers join and leave while traffic runs, and cleans up. Requests, answers and
decisions are `SlimEngine`'s and the machines'.
"""

import asyncio
from typing import Any

import msgspec
from ray.exceptions import RayTaskError

from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.actor import ServerActor
from slim_scheduler.engine.cluster.host import ClusterHost
from slim_scheduler.engine.cluster.ray_session import RaySession
from slim_scheduler.engine.cluster.remote_server import RemoteServer
from slim_scheduler.engine.cluster.transport import DirectSeam, Seam
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.local.host import DISPATCHER, StepRecorder
from slim_scheduler.engine.local.server import reason
from slim_scheduler.engine.router_timer import TimedRouter
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.setup.config import Config, ServerConfig

HUNG_LIMIT: Seconds = 30.0  # a server silent for so long is started anew
START_LIMIT: Seconds = 180.0  # for Ray to find a place for every server, and for torch to load there


class ClusterEngine(SlimEngine):
    """Serves on a Ray cluster; `config.cluster` says which. Everything else is as in one process."""

    _host: ClusterHost

    def __init__(
        self,
        config: Config,
        model: SlimmableModel,
        shape: ModelShape,
        *,
        seam: Seam | None = None,
        recorder: StepRecorder | None = None,
        **options: Any,
    ) -> None:
        self._seam = seam or DirectSeam()
        self._log = recorder is not None
        self._model = model
        self._placed_model: Any = None
        self._session = RaySession(config)
        super().__init__(config, model, shape, recorder=recorder, **options)

    async def start(self) -> None:
        """Connects to the cluster, places the servers and waits until all of them are warm."""
        self._session.open()
        self._placed_model = self._session.put(self._model)
        self._host.clock.restart()
        try:
            await self._join(*self.config.servers)
        except BaseException:
            self._session.close()
            raise
        await super().start()

    async def stop(self, grace_s: Seconds = 10.0) -> None:
        await super().stop(grace_s)
        self._session.close()

    # ---- membership

    async def add_server(self, server: ServerConfig) -> None:
        """Places one more server and takes it into service, while traffic runs. Raises ConfigError for a known name."""
        if server.name in self._host.remotes or server.name == DISPATCHER:
            raise ConfigError(f"server {server.name} is there already; choose another name")
        before = self.config
        self.config = msgspec.structs.replace(before, servers=(*before.servers, server))
        try:
            await self._join(server)
        except BaseException:
            self.config = before
            raise

    async def remove_server(self, name: ServerName, grace_s: Seconds = 10.0) -> None:
        """Drains a server, then takes it out. What it has not finished in `grace_s` is run elsewhere."""
        if name not in self._host.remotes:
            raise ConfigError(f"no server is named {name}; there are {', '.join(self._host.remotes)}")
        await self._host.leave(name, grace_s)
        rest = tuple(server for server in self.config.servers if server.name != name)
        self.config = msgspec.structs.replace(self.config, servers=rest)

    @property
    def memory_used(self) -> dict[ServerName, Bytes]:
        return {name: server.memory_used for name, server in self._host.remotes.items()}

    @property
    def processes(self) -> dict[ServerName, int]:
        """Each server's process, on the machine where it runs."""
        return {name: server.place.process for name, server in self._host.remotes.items()}

    # ---- inside

    @staticmethod
    def _live_config(config: Config) -> Config:
        # Links are real here; [network] is what routers assume of them.
        return msgspec.structs.replace(live_config(config), network=config.network)

    def _build_host(
        self,
        model: SlimmableModel,
        dispatcher: Dispatcher,
        router: TimedRouter,
        recorder: StepRecorder,
        devices: dict[ServerName, Device],
    ) -> ClusterHost:
        assert not devices, "devices of a cluster are opened by its servers"
        return ClusterHost(dispatcher, router, recorder, MonotonicClock(), self._answer, self._seam)

    async def _join(self, *servers: ServerConfig) -> None:
        try:
            await asyncio.wait_for(self._host.join(*[self._remote(server) for server in servers]), START_LIMIT)
        except TimeoutError:
            asked = ", ".join(f"{server.name} {self._session.needs(server)}" for server in servers)
            raise ConfigError(
                f"not every server was placed and warm within {START_LIMIT:g} s; they ask for {asked}, and the cluster "
                f"has {self._session.has()}; start Ray on more machines, or change servers.N.resources"
            ) from None
        except RayTaskError as error:  # a device that is not there, a budget that it does not have
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise ConfigError(f"a server of {', '.join(server.name for server in servers)}: {reason(cause)}") from None

    def _remote(self, knobs: ServerConfig) -> RemoteServer:
        margins = self._host.dispatcher.wants_margins
        arguments = (self.config, knobs.name, self.shape, self.profiles, margins)
        return RemoteServer(
            knobs,
            lambda: self._session.place(ServerActor, knobs, arguments),
            self._placed_model,
            self._host.clock,
            self._host.ledger.take_forgotten,
            self._log,
            HUNG_LIMIT,
        )
