"""`ClusterEngine`: the same engine with its servers on the machines of a Ray cluster.

It places the server actors, lets servers join and leave while traffic runs, and cleans up. Requests, answers and
decisions are `SlimEngine`'s and the machines'.
"""

import asyncio
from typing import Any

import msgspec

from slim_scheduler.config import Config, ServerConfig
from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.actor import ServerActor
from slim_scheduler.engine.cluster.host import ClusterHost
from slim_scheduler.engine.cluster.ray_session import RaySession
from slim_scheduler.engine.cluster.remote_server import RemoteServer
from slim_scheduler.engine.cluster.seam import DirectSeam, Seam
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.host import DISPATCHER, NoRecorder, StepRecorder
from slim_scheduler.engine.inputs import Normalization
from slim_scheduler.engine.router_timer import TimedRouter
from slim_scheduler.machines import build_dispatcher, build_router
from slim_scheduler.model.protocol import SlimmableModel


class ClusterEngine(SlimEngine):
    """Serves on a Ray cluster; `config.cluster` says which. Everything else is as in one process."""

    _host: ClusterHost

    def __init__(
        self,
        config: Config,
        model: SlimmableModel,
        shape: ModelShape,
        *,
        router: str | None = None,
        seed: int = 0,
        profiles: dict[ServerName, Profile] | None = None,
        accuracy: AccuracyTable | None = None,
        normalization: Normalization | None = None,
        recorder: StepRecorder | None = None,
        seam: Seam | None = None,
    ) -> None:
        self.config = cluster_config(config)
        self.shape = shape
        self.seed = seed
        self.profiles = profiles
        self.router_name = router or config.router.name
        self._normalization = normalization or Normalization.none(shape)
        chosen = build_router(self.router_name, self.config, shape, profiles)
        timed = TimedRouter(chosen, self.config.router.slow_ms / 1e3)
        dispatcher = build_dispatcher(
            self.config, shape, self.router_name, profiles, seed, accuracy=accuracy, router=timed
        )
        recorder = recorder or NoRecorder()
        self._host = ClusterHost(dispatcher, timed, recorder, MonotonicClock(), self._answer, seam or DirectSeam())
        self._waiting = {}
        self._next_item = 0
        self._next_request = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampler: asyncio.TimerHandle | None = None
        self._stopping = False
        self._model = model
        self._log = not isinstance(recorder, NoRecorder)
        self._session = RaySession(config)
        self._placed_model: Any = None

    async def start(self) -> None:
        """Connects to the cluster, places the servers and waits until all of them are warm."""
        self._session.open()
        self._placed_model = self._session.put(self._model)
        self._host.clock.restart()
        await self._host.join(*[self._remote(server) for server in self.config.servers])
        await super().start()

    async def stop(self, grace_s: Seconds = 10.0) -> None:
        await super().stop(grace_s)
        self._session.close()

    @property
    def memory_used(self) -> dict[ServerName, Bytes]:
        return {name: server.memory_used for name, server in self._host.remotes.items()}

    # ---- inside

    def _remote(self, knobs: ServerConfig) -> RemoteServer:
        profile = (self.profiles or {}).get(knobs.name)
        power = profile.power if profile is not None and profile.power_source != "none" else None
        alone = sum(other.device == "cpu" for other in self.config.servers) == 1
        arguments = (self.config, knobs, self.shape, power, alone)
        return RemoteServer(
            knobs,
            lambda: self._session.place(ServerActor, knobs, arguments),
            self._placed_model,
            self._host.clock,
            self._host.ledger.take_forgotten,
            self._log,
            self.config.cluster.hung_limit_s,
        )


def cluster_config(config: Config) -> Config:
    """The configuration without what only a simulation has. Links are real here; [network] is what routers assume."""
    if any(server.name == DISPATCHER for server in config.servers):
        raise ConfigError(f"a server is named {DISPATCHER}, which the record uses; choose another name")
    return msgspec.structs.replace(config, faults=())
