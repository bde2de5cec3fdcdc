"""The live loop of a cluster: the Dispatcher here, every ServerScheduler in its actor, messages in between.

It differs from the host of one process only in how events reach a server and come back. Every decision is the
machines'; a server that Ray reports dead is `ServerLeft` to the dispatcher, one that hangs is silent.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import torch
from ray.exceptions import RayError

from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    CancelTasks,
    Reply,
    ServerDraining,
    ServerEvent,
    ServerJoined,
    ServerLeft,
    ServerReported,
    TasksReturned,
)
from slim_scheduler.core.types import Block, Seconds, ServerName
from slim_scheduler.engine.activations import gather
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.conversation import LifeOverError
from slim_scheduler.engine.cluster.ledger import ClusterLedger
from slim_scheduler.engine.cluster.remote_server import RemoteServer
from slim_scheduler.engine.cluster.session import CARRIED
from slim_scheduler.engine.cluster.transport import Seam
from slim_scheduler.engine.cluster.wire import Parcel, Told
from slim_scheduler.engine.local.host import Host, StepRecorder
from slim_scheduler.engine.local.server import reason
from slim_scheduler.engine.router_timer import TimedRouter

DRAIN_LOOK: Seconds = 0.05

Word = BatchReported | TasksReturned | ServerReported


class ClusterHost(Host):
    """The dispatcher and the router's ends of the servers."""

    ledger: ClusterLedger

    def __init__(
        self,
        dispatcher: Dispatcher,
        router: TimedRouter,
        recorder: StepRecorder,
        clock: MonotonicClock,
        answered: Callable[[Reply], None],
        seam: Seam,
    ) -> None:
        super().__init__(dispatcher, router, {}, recorder, clock, answered)
        self.ledger = ClusterLedger()
        self.remotes: dict[ServerName, RemoteServer] = {}
        self.servers = self.remotes  # type: ignore[assignment]
        self._seam = seam
        self._serving: dict[ServerName, asyncio.Task[None]] = {}

    # ---- servers

    async def join(self, *servers: RemoteServer) -> None:
        """Begins the servers' first lives, introduces them to each other, and tells the dispatcher. Raises RayError."""
        self.remotes |= {server.name: server for server in servers}
        for server in servers:
            server.hear = self._hear
        try:
            await asyncio.gather(*[server.begin(self._peers) for server in servers])
        except BaseException:
            for server in servers:
                del self.remotes[server.name]
                server.kill()
            raise
        for server in servers:
            self._introduce(server)
            self.tell_dispatcher(ServerJoined(server.name, server.credit, server.incarnation))
            self._serving[server.name] = task = asyncio.create_task(self._serve(server))
            task.add_done_callback(_report)

    async def leave(self, name: ServerName, grace: Seconds) -> None:
        """Gives the server no new work, waits up to `grace` until it holds nothing, and takes it out of the fleet."""
        server = self.remotes[name]
        self.tell_dispatcher(ServerDraining(name))
        latest = self.clock.now() + grace
        while self.clock.now() < latest and self._holds_something(name):
            await asyncio.sleep(DRAIN_LOOK)
        self._serving.pop(name).cancel()
        self.tell_dispatcher(ServerLeft(name, "removed", removed=True))
        del self.remotes[name]
        server.kill()

    def _holds_something(self, name: ServerName) -> bool:
        return self.dispatcher.servers[name].outstanding > 0 or self.ledger.lies_at(name)

    def start(self) -> None:
        """Nothing to start here: the servers joined before, and sample themselves."""

    async def stop(self) -> None:
        self._timers.stop()
        for task in self._serving.values():
            task.cancel()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        for server in self.remotes.values():
            server.kill()

    def sample(self) -> None:
        """The servers sample their own devices."""

    async def _serve(self, server: RemoteServer) -> None:
        """From life to life, until the engine stops or the server is removed."""
        while True:
            try:
                await server.listen()
            except (RayError, LifeOverError) as error:
                self.tell_dispatcher(ServerLeft(server.name, reason(error)))
            if await server.revive(self._peers):
                self._introduce(server)

    def _introduce(self, newcomer: RemoteServer) -> None:
        for server in self.remotes.values():
            if server is not newcomer:
                server.meet(newcomer.name, newcomer.actor)

    def _peers(self) -> Mapping[ServerName, object]:
        return {server.name: server.actor for server in self.remotes.values()}

    # ---- messages

    def _hear(self, server: RemoteServer, told: Told) -> None:
        for answers in told.answers:
            self.ledger.answered(answers.tasks, torch.from_numpy(answers.array.copy()))
        for step in told.steps:
            if step.event is not None:
                self.recorder.step(server.name, step.at, step.event, step.commands)
            for command in step.commands:
                if isinstance(command, CARRIED):
                    self._seam.carry(server.name, partial(self._word, command))

    def _word(self, word: Word) -> None:
        if isinstance(word, BatchReported):
            self.ledger.done(word.server, word.tasks)
        self.tell_dispatcher(word)

    def _step_server(self, server: RemoteServer, event: ServerEvent) -> None:  # type: ignore[override]
        match event:
            case BlockArrived(block):
                self._seam.carry(server.name, partial(self._deliver_block, server, block))
            case CancelTasks():
                self._seam.carry(server.name, partial(server.cancel, event))

    def _deliver_block(self, server: RemoteServer, block: Block) -> None:
        sources, rows = self.ledger.leaves(block)
        server.deliver(Parcel(block, sources), gather(rows).numpy() if rows else None)


def _report(serving: "asyncio.Task[None]") -> None:
    """A fault of this program must not end a server's conversation unseen."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        serving.get_loop().call_exception_handler({"message": "the router lost a server", "exception": error})
