"""The Ray actor of one server: the calls that the router and other servers make, and nothing else.

Ray places it and starts it again when its process or machine dies. It comes up blank: the router then begins a new
life with the next incarnation, so nothing of an earlier one can be mistaken for news.
"""

import asyncio
import os
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import ray

from slim_scheduler.config import Config, ServerConfig
from slim_scheduler.core.profile import Curve
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, ServerName, TaskId
from slim_scheduler.engine.cluster.clock import SharedClock
from slim_scheduler.engine.cluster.life import ServerLife
from slim_scheduler.engine.cluster.shelf import Shelf
from slim_scheduler.engine.cluster.wire import decode_ask, decode_cancel, decode_parcel, encode, join
from slim_scheduler.engine.device import Device, open_device
from slim_scheduler.engine.executor import Executor, Job
from slim_scheduler.engine.live_server import LiveServer
from slim_scheduler.engine.probe import open_probe
from slim_scheduler.machines import build_server
from slim_scheduler.model.protocol import SlimmableModel


class Birth(msgspec.Struct, frozen=True):
    """What a new life needs to know. `offset` leads from the server's clock to the dispatcher's."""

    incarnation: int
    offset: Seconds
    log: bool


class Place(msgspec.Struct, frozen=True):
    """Where a life runs: Ray's id of the machine, and the process there."""

    node: str
    process: int


class ServerActor:
    """One server of a cluster. `power` estimates a CPU's power where it has no meter of its own."""

    def __init__(
        self,
        config: Config,
        server: ServerConfig,
        shape: ModelShape,
        power: Curve | None,
        alone: bool,
    ) -> None:
        self._config = config
        self._knobs = server
        self._shape = shape
        self._power = power
        self._alone = alone
        self._life: ServerLife | None = None
        self._peers: dict[ServerName, Any] = {}

    async def clock(self) -> Seconds:
        """This machine's monotonic clock, for the router to compare with its own."""
        return time.monotonic()

    async def begin(self, birth: Birth, model: SlimmableModel, peers: dict[ServerName, Any]) -> Place:
        """Starts a life, warm and reporting; an earlier one in this process ends first."""
        if self._life is not None:
            life, self._life = self._life, None
            await life.stop()
        self._peers.update(peers)
        knobs = self._knobs
        device = await asyncio.to_thread(self._open_device, model)
        lives: list[ServerLife] = []

        def finished(name: ServerName, job: Job) -> None:
            lives[0].finished(name, job)

        executor = Executor(knobs.name, device, knobs.concurrency, knobs.slowdown, finished)
        scheduler = build_server(self._config, knobs.name, self._shape, birth.incarnation)
        last = self._shape.segments - 1
        probe = open_probe(device.name, self._power, self._alone)
        server = LiveServer(scheduler, executor, probe, knobs.credit, last)
        clock = SharedClock(birth.offset)
        period = self._config.telemetry.period_s
        lives.append(ServerLife(server, Shelf(last), clock, self._peers, period, birth.log))
        self._life = lives[0]
        self._life.start()
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    async def meet(self, name: ServerName, actor: Any) -> None:
        """Another server joined, or came back as another actor."""
        self._peers[name] = actor

    async def deliver(self, parcel: bytes, *pieces: Any) -> None:
        if self._life is not None:
            items = join(pieces, self._shape.item_shape) if pieces else None
            await self._life.receive(decode_parcel(parcel), items)

    async def cancel(self, message: bytes) -> None:
        if self._life is not None:
            self._life.cancel(decode_cancel(message))

    async def tell(self, ask: bytes) -> tuple[bytes, list[npt.NDArray[np.float32]]] | None:
        """What happened since the router last asked; None from an actor that has not begun to live."""
        if self._life is None:
            return None
        told, answers = await self._life.tell(decode_ask(ask))
        return encode(told), answers

    async def fetch(self, tasks: list[TaskId]) -> tuple[tuple[TaskId, ...], npt.NDArray[np.float32] | None]:
        return ((), None) if self._life is None else await self._life.fetch(tasks)

    def _open_device(self, model: SlimmableModel) -> Device:
        """Opens the device and runs every segment once, so that the first batch does not wait for it."""
        knobs = self._knobs
        device = open_device(
            local_device(knobs.device),
            model,
            self._shape,
            threads=knobs.threads,
            max_batch=knobs.max_batch,
            memory_limit=int(knobs.vram_budget_gib * 2**30),
        )
        with device.thread():
            for segment in range(self._shape.segments):
                device.unload(device.load(segment, self._shape.widths[0]))
        return device


def local_device(device: str) -> str:
    """Ray shows an actor only the GPUs it was given, so the first it sees is its own."""
    return "cuda:0" if device.startswith("cuda") else device
