"""The live loop: delivers events to the dispatcher, one at a time, and performs its commands.

Owns the order of events. Every decision is the machines'; `SlimEngine` is its only user. Where the servers are is a
`LiveFleet`'s business (`local/` or `cluster/`), where tensors are an `ItemStore`'s. Requests that come in one turn of
the event loop, and while these are taken, are absorbed before the dispatcher decides about the first of them: fewer and
larger blocks.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.messages import (
    BlockArrived,
    CancelTasks,
    DispatcherEvent,
    FrontTurned,
    Message,
    OfferRepeated,
    OffersTaken,
    OfferWithdrawn,
    Reply,
    RequestArrived,
    RequestOffered,
    RouteNow,
    RouterTooSlow,
    RouteSoon,
    SendBlock,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, ItemId, ItemOutcome, Request, RequestId, Seconds, ServerName, Task
from slim_scheduler.engine.clock import MonotonicClock, Timers
from slim_scheduler.engine.inputs import joined
from slim_scheduler.engine.router_timer import TimedRouter
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.setup.config import Config, ServerConfig

DISPATCHER = "dispatcher"


class StepRecorder(Protocol):
    """What the host tells of every `handle` call; `record.Recorder` is one."""

    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Message]) -> None: ...


class NoRecorder:
    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Message]) -> None:
        pass


class ItemStore(Protocol):
    """Keeps the tensors of items in flight, or knows where they are: inputs, activations, answers."""

    def add(self, items: Iterable[ItemId], batch: Tensor) -> None:
        """Row i of `batch` is the input of the i-th item."""

    def sent(self, tasks: Iterable[Task]) -> None:
        """The dispatcher sends these attempts."""

    def results(self, ended: Sequence[ItemOutcome]) -> npt.NDArray[np.float32]:
        """The answers of items that have one, (items, ...)."""

    def forget(self, items: Iterable[ItemId]) -> None: ...


class LiveFleet(Protocol):
    """The servers of an engine: what is for one of them is delivered here, what they report goes to the host.

    `config` names the servers that there are now.
    """

    config: Config

    @property
    def items(self) -> ItemStore: ...

    def connect(self, host: "Host") -> None:
        """Whom the servers report to; before anything else."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def sample(self) -> None:
        """Reads the devices that are read from here; once per telemetry period."""

    def deliver(self, server: ServerName, event: BlockArrived | CancelTasks) -> None: ...

    async def add(self, server: ServerConfig) -> None: ...

    async def remove(self, name: ServerName, grace: Seconds) -> None: ...

    @property
    def memory_used(self) -> Mapping[ServerName, Bytes]:
        """Bytes that each server's instances and running batches really take."""


class FleetParts(NamedTuple):
    """What a fleet is made of. `margins`: servers tell those of their answers; `logs`: every step is recorded."""

    config: Config
    model: SlimmableModel
    shape: ModelShape
    profiles: dict[ServerName, Profile] | None
    margins: bool
    logs: bool


class Host:
    """The dispatcher and its fleet. `answered` is called with each reply, while the items' outputs are still there;
    `taken` when offers have come in, whose inputs `keep` is called with then."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        router: TimedRouter,
        fleet: LiveFleet,
        recorder: StepRecorder,
        answered: Callable[[Reply], None],
        taken: Callable[[OffersTaken], None],
    ) -> None:
        self.dispatcher = dispatcher
        self.router = router
        self.fleet = fleet
        self.clock = MonotonicClock()
        self.recorder = recorder
        self._answered = answered
        self._taken = taken
        self._timers = Timers(self.clock, self._fire)
        self._arrived: dict[RequestId, tuple[Sequence[ItemId], npt.NDArray[np.float32]]] = {}
        self._steps: deque[Callable[[], None]] = deque()
        self._running = False
        fleet.connect(self)

    async def start(self) -> None:
        self.clock.restart()
        await self.fleet.start()

    async def stop(self) -> None:
        self._timers.stop()
        await self.fleet.stop()

    # ---- the order of events

    def later(self, step: Callable[[], None]) -> None:
        """A step after those that wait already, the next time that steps run."""
        self._steps.append(step)

    def run(self) -> None:
        """Runs the steps that wait, and those that come of them."""
        if self._running:
            return  # called from within a step: the loop below gets to it
        self._keep_inputs()
        self._running = True
        try:
            while self._steps:
                self._steps.popleft()()
        finally:
            self._running = False

    def tell_later(self, event: DispatcherEvent) -> None:
        """An event for the dispatcher, after the steps that wait already."""
        self.later(partial(self._step, event))

    def tell_dispatcher(self, event: DispatcherEvent) -> None:
        self.tell_later(event)
        self.run()

    def _fire(self, machine: str) -> None:
        self.tell_dispatcher(TimerFired())

    # ---- requests

    def arrive(self, request: Request, items: npt.NDArray[np.float32]) -> None:
        """A request came: taken or refused at once, and decided about with others that come at the same time."""
        self.keep(request.request_id, request.items, items)
        self._step(RequestArrived(request))

    def keep(self, request: RequestId, items: Sequence[ItemId], inputs: npt.NDArray[np.float32]) -> None:
        """The inputs of a request that is about to come in, or just has."""
        self._arrived[request] = items, inputs

    def ask(self, offered: RequestOffered) -> Reply | None:
        """A front end asks whether a request may come in; why not, where it may not."""
        now = self.clock.now()
        commands = self.dispatcher.handle(offered, now)
        self.recorder.step(DISPATCHER, now, offered, commands)
        if not commands:
            return None
        (reply,) = commands
        assert isinstance(reply, Reply)
        return reply

    def ask_again(self, refused: RequestId) -> bool:
        """A front end asks about one more request like a refused offer: whether it is refused too."""
        now, repeated = self.clock.now(), OfferRepeated(refused)
        commands = self.dispatcher.handle(repeated, now)
        self.recorder.step(DISPATCHER, now, repeated, commands)
        return bool(commands)

    def tell_of_offers(self, event: OfferWithdrawn | FrontTurned) -> None:
        """What a front end tells; what follows for it has happened when this returns."""
        self._step(event)

    def _go_round(self) -> None:
        """The loop looks for more once: clients answered together send again one after the other."""
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self.tell_dispatcher(RouteNow())

    def _keep_inputs(self) -> None:
        """The inputs of what was taken since the last time, in one tensor."""
        if not self._arrived:
            return
        inputs = [inputs for _, inputs in self._arrived.values()]
        ids = [item for items, _ in self._arrived.values() for item in items]
        self.fleet.items.add(ids, joined(inputs, inputs[0].shape[1:]))
        self._arrived.clear()

    # ---- the dispatcher

    def _step(self, event: DispatcherEvent) -> None:
        now = self.clock.now()
        commands = self.dispatcher.handle(event, now)
        self.recorder.step(DISPATCHER, now, event, commands)
        for command in commands:
            match command:
                case SendBlock(block):
                    self.fleet.items.sent(block.tasks)
                    self.later(partial(self.fleet.deliver, block.server, BlockArrived(block)))
                case Reply():
                    self._arrived.pop(command.request_id, None)  # refused: its inputs are not needed
                    self._answered(command)
                case OffersTaken():
                    self._taken(command)
                case CancelTasks():
                    self.later(partial(self.fleet.deliver, command.server, command))
                case RouteSoon():
                    asyncio.get_running_loop().call_soon(self._go_round)
                case WakeAt(at):
                    self._timers.wake(DISPATCHER, at)
        slow = self.router.take_slow()
        if slow is not None:
            self.tell_later(RouterTooSlow(slow))
