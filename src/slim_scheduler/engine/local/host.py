"""The live loop: delivers events to the pure machines, one at a time, and performs their commands.

Owns the order of events and the items' tensors. Every decision is the machines'; `SlimEngine` is its only user. A
batch starts the moment a scheduler asks for it, before any other event is looked at. Requests that come in one turn of
the event loop, and while these are taken, are absorbed before the dispatcher decides about the first of them: fewer and
larger blocks.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    CancelTasks,
    DispatcherEvent,
    FrontTurned,
    LoadInstance,
    Message,
    OfferWithdrawn,
    Reply,
    RequestArrived,
    RequestOffered,
    RouteNow,
    RouterTooSlow,
    SendBlock,
    ServerEvent,
    ServerJoined,
    ServerReported,
    StartBatch,
    TakeOffered,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.types import Request, RequestId, Seconds, ServerName
from slim_scheduler.engine.activations import Ledger
from slim_scheduler.engine.clock import MonotonicClock, Timers
from slim_scheduler.engine.executor import Job
from slim_scheduler.engine.inputs import joined
from slim_scheduler.engine.local.server import LiveServer
from slim_scheduler.engine.router_timer import TimedRouter

DISPATCHER = "dispatcher"


class StepRecorder(Protocol):
    """What the host tells of every `handle` call; `record.Recorder` is one."""

    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Message]) -> None: ...


class NoRecorder:
    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Message]) -> None:
        pass


class Host:
    """The machines of one process. `answered` is called with each reply, while the items' outputs are still there."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        router: TimedRouter,
        servers: Mapping[ServerName, LiveServer],
        recorder: StepRecorder,
        clock: MonotonicClock,
        answered: Callable[[Reply], None],
    ) -> None:
        self.dispatcher = dispatcher
        self.router = router
        self.servers = servers
        self.ledger = Ledger()
        self.clock = clock
        self.recorder = recorder
        self._answered = answered
        self.on_take: Callable[[TakeOffered], None] = _nobody_offers
        self._timers = Timers(clock, self._fire)
        self._arrived: dict[RequestId, tuple[Request, npt.NDArray[np.float32]]] = {}
        self._routes_soon = False
        self._events: deque[tuple[ServerName, ServerEvent] | tuple[None, DispatcherEvent]] = deque()
        self._delivering = False

    def start(self) -> None:
        self.clock.restart()
        for server in self.servers.values():
            server.executor.start()
            self.tell_dispatcher(ServerJoined(server.name, server.credit))
        self.sample()

    async def stop(self) -> None:
        self._timers.stop()
        for server in self.servers.values():
            await server.executor.stop()

    def sample(self) -> None:
        """Reads every device; once per telemetry period."""
        now = self.clock.now()
        for server in self.servers.values():
            if (sampled := server.sample(now)) is not None:
                self._events.append((server.name, sampled))
        self._deliver()

    def arrive(self, request: Request, items: npt.NDArray[np.float32]) -> None:
        """A request came: taken or refused at once, and decided about with others that come at the same time."""
        if not self._routes_soon:
            self._routes_soon = True
            asyncio.get_running_loop().call_soon(self._go_round)
        self._arrived[request.request_id] = request, items
        self._step_dispatcher(RequestArrived(request))

    def tell_of_offers(self, event: RequestOffered | OfferWithdrawn | FrontTurned) -> None:
        """A front end asks or tells; what follows for it has happened when this returns."""
        self._step_dispatcher(event)

    def tell_dispatcher(self, event: DispatcherEvent) -> None:
        self._events.append((None, event))
        self._deliver()

    def finished(self, name: ServerName, job: Job) -> None:
        """A server's thread is done with a job."""
        server = self.servers[name]
        event = server.finished(job, self.ledger, self.clock.now())
        self._events.append((name, event))
        self._deliver()

    def _fire(self, machine: str) -> None:
        self._events.append((None if machine == DISPATCHER else machine, TimerFired()))  # type: ignore[arg-type]
        self._deliver()

    def _go_round(self) -> None:
        """The loop looks for more once: clients answered together send again one after the other."""
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._routes_soon = False
        self.tell_dispatcher(RouteNow())

    def _keep_inputs(self) -> None:
        """The inputs of what was taken since the last time, in one tensor."""
        if not self._arrived:
            return
        inputs = [items for _, items in self._arrived.values()]
        ids = [item for request, _ in self._arrived.values() for item in request.items]
        self.ledger.add(ids, joined(inputs, inputs[0].shape[1:]))
        self._arrived.clear()

    def _deliver(self) -> None:
        if self._delivering:
            return  # called from within a command: the loop below gets to it
        self._keep_inputs()
        self._delivering = True
        try:
            while self._events:
                name, event = self._events.popleft()
                if name is None:
                    self._step_dispatcher(event)  # type: ignore[arg-type]
                else:
                    self._step_server(self.servers[name], event)  # type: ignore[arg-type]
        finally:
            self._delivering = False

    def _step_dispatcher(self, event: DispatcherEvent) -> None:
        now = self.clock.now()
        commands = self.dispatcher.handle(event, now)
        self.recorder.step(DISPATCHER, now, event, commands)
        for command in commands:
            match command:
                case SendBlock(block):
                    self.ledger.sent(block.tasks)
                    self._events.append((block.server, BlockArrived(block)))
                case Reply():
                    self._arrived.pop(command.request_id, None)  # refused: its inputs are not needed
                    self._answered(command)
                case TakeOffered():
                    self.on_take(command)
                case CancelTasks():
                    self._events.append((command.server, command))
                case WakeAt(at):
                    self._timers.wake(DISPATCHER, at)
        slow = self.router.take_slow()
        if slow is not None:
            self._events.append((None, RouterTooSlow(slow)))

    def _step_server(self, server: LiveServer, event: ServerEvent) -> None:
        now = self.clock.now()
        commands = server.scheduler.handle(event, now)
        self.recorder.step(server.name, now, event, commands)
        for command in commands:
            match command:
                case StartBatch():
                    server.start_batch(command, self.ledger, now)
                case BatchReported() | TasksReturned() | ServerReported():
                    self._events.append((None, command))
                case LoadInstance():
                    server.load(command)
                case UnloadInstance():
                    server.unload(command)
                case WakeAt(at):
                    self._timers.wake(server.name, at)


def _nobody_offers(command: TakeOffered) -> None:
    raise AssertionError(f"{command} without a front end")
