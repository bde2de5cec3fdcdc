"""The servers of one process: their schedulers step in the host's order, their devices run on threads of their own.

A batch starts the moment a scheduler asks for it, before any other event is looked at. It decides nothing.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    CancelTasks,
    LoadInstance,
    ServerEvent,
    ServerJoined,
    ServerReported,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.engine.activations import Activations
from slim_scheduler.engine.assembly import check_budgets, live_server
from slim_scheduler.engine.clock import Timers
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.executor import Job
from slim_scheduler.engine.host import FleetParts, Host
from slim_scheduler.engine.local.server import LiveServer
from slim_scheduler.setup.config import ServerConfig


class LocalFleet:
    """`devices`, where given, are used instead of the ones configured."""

    def __init__(self, parts: FleetParts, devices: Mapping[ServerName, Device]) -> None:
        check_budgets(parts.config)
        self.config = parts.config
        self.items = Activations()
        self.servers: dict[ServerName, LiveServer] = {
            server.name: live_server(
                parts.config,
                server.name,
                parts.model,
                parts.shape,
                parts.profiles,
                self._finished,
                devices.get(server.name),
                on_loop=True,
                margins=parts.margins,
            )
            for server in parts.config.servers
        }
        self._host: Host
        self._timers: Timers

    def connect(self, host: Host) -> None:
        self._host = host
        self._timers = Timers(host.clock, self._fire)

    async def start(self) -> None:
        for server in self.servers.values():
            server.executor.start()
            self._host.tell_dispatcher(ServerJoined(server.name, server.credit))
        self.sample()

    async def stop(self) -> None:
        self._timers.stop()
        await asyncio.gather(*(server.executor.stop() for server in self.servers.values()))

    def sample(self) -> None:
        now = self._host.clock.now()
        for server in self.servers.values():
            if (sampled := server.sample(now)) is not None:
                self._host.later(partial(self._step, server, sampled))
        self._host.run()

    def deliver(self, server: ServerName, event: BlockArrived | CancelTasks) -> None:
        self._step(self.servers[server], event)

    async def add(self, server: ServerConfig) -> None:
        raise ConfigError(f"server {server.name} cannot join one process; set cluster.address")

    async def remove(self, name: ServerName, grace: Seconds) -> None:
        raise ConfigError(f"server {name} cannot leave one process; set cluster.address")

    @property
    def memory_used(self) -> dict[ServerName, Bytes]:
        return {name: server.memory_used for name, server in self.servers.items()}

    def _finished(self, name: ServerName, job: Job) -> None:
        """A server's thread is done with a job."""
        server = self.servers[name]
        event = server.finished(job, self.items, self._host.clock.now())
        self._host.later(partial(self._step, server, event))
        self._host.run()

    def _fire(self, name: ServerName) -> None:
        self._host.later(partial(self._step, self.servers[name], TimerFired()))
        self._host.run()

    def _step(self, server: LiveServer, event: ServerEvent) -> None:
        host = self._host
        now = host.clock.now()
        commands = server.scheduler.handle(event, now)
        host.recorder.step(server.name, now, event, commands)
        for command in commands:
            match command:
                case StartBatch():
                    server.start_batch(command, self.items, now)
                case BatchReported() | TasksReturned() | ServerReported():
                    host.tell_later(command)
                case LoadInstance():
                    server.load(command)
                case UnloadInstance():
                    server.unload(command)
                case WakeAt(at):
                    self._timers.wake(server.name, at)
