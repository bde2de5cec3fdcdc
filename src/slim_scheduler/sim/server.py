"""One simulated server: the real `ServerScheduler` on a simulated device, and the faults that befall it.

It delivers events to the scheduler, performs its commands on the device, and hands what is for the dispatcher to the
host. It makes no decision of its own.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from slim_scheduler.core.messages import (
    BatchDone,
    BatchReported,
    DeviceSampled,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    Message,
    ServerEvent,
    ServerReported,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.server.scheduler import ServerScheduler
from slim_scheduler.core.types import Batch, BatchId, InstanceId, ItemId, Seconds, ServerName, Width
from slim_scheduler.sim.agenda import DEVICE, TIMER, Agenda
from slim_scheduler.sim.device import SimulatedDevice
from slim_scheduler.sim.mail import ToDispatcher


class StepObserver(Protocol):
    """Sees every step of both machines; `record.Recorder` is one."""

    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Any]) -> None: ...


class Condition(StrEnum):
    """`HUNG` keeps its state and answers late; `CRASHED` has lost it and comes back as a new incarnation."""

    UP = "up"
    HUNG = "hung"
    CRASHED = "crashed"


class SimulatedServer:
    """A server's scheduler and device. `send` carries a message to the dispatcher."""

    def __init__(
        self,
        name: ServerName,
        device: SimulatedDevice,
        build: Callable[[int], ServerScheduler],
        agenda: Agenda,
        observer: StepObserver,
        send: Callable[["SimulatedServer", ToDispatcher], None],
    ) -> None:
        self.name = name
        self.device = device
        self.condition = Condition.UP
        self.incarnation = 0
        self.scheduler = build(0)
        # The items and segments whose outputs lie here; None: nobody asks, because nothing gets lost.
        self.activations: set[tuple[ItemId, int]] | None = None
        # Margins of the answers of a batch that ran, none before the last segment; None: nobody asks.
        self.margins: Callable[[Batch], tuple[float, ...]] | None = None
        self._build = build
        self._agenda = agenda
        self._observe = observer.step
        self._send = send
        self._announced = 0  # the device's version for which the next completion is on the agenda
        self._running: dict[BatchId, Batch] = {}
        self._instances: dict[InstanceId, tuple[int, Width]] = {}
        self._held: list[ServerEvent] = []
        self._perform: dict[type, Callable[[Any], None]] = {
            StartBatch: self._start,
            BatchReported: self._tell,
            ServerReported: self._tell,
            TasksReturned: self._tell,
            LoadInstance: self._load,
            UnloadInstance: self._unload,
            WakeAt: self._wake,
        }

    # ---- events

    def receive(self, event: ServerEvent) -> None:
        """A message arrived, or the device has something to say."""
        if self.condition is Condition.UP:
            self._handle(event)
        elif self.condition is Condition.HUNG:
            self._held.append(event)

    def sample(self) -> DeviceSampled | None:
        """The telemetry period is over. A server that hangs or is gone says nothing."""
        if self.condition is not Condition.UP:
            return None
        sampled = self.device.sample(self._agenda.now)
        self._handle(sampled)
        return sampled

    def _handle(self, event: ServerEvent) -> None:
        now = self._agenda.now
        commands = self.scheduler.handle(event, now)
        self._observe(self.name, now, event, commands)
        perform = self._perform
        for command in commands:
            perform[type(command)](command)
        if self._announced != self.device.version:
            self._announce()

    def _announce(self) -> None:
        device = self.device
        self._announced = device.version
        at = device.next_done()
        if at is not None:
            self._agenda.at(at, DEVICE, self._complete, device.version)

    def _complete(self, version: int) -> None:
        if version != self.device.version:
            return  # another batch came or went since, or a fault: a new completion was announced
        batch_id, energy = self.device.finish(self._agenda.now)
        batch = self._running.pop(batch_id)
        if self.activations is not None:
            self.activations.update((task.item, task.segment) for task in batch.tasks)
        margins = () if self.margins is None else self.margins(batch)
        self._handle(BatchDone(batch_id, energy, (), margins))

    def _own(self, life_and_event: tuple[int, ServerEvent]) -> None:
        """Something this server waits for by itself; it does not outlive a crash."""
        incarnation, event = life_and_event
        if incarnation == self.incarnation:
            self.receive(event)

    # ---- commands

    def _start(self, command: StartBatch) -> None:
        batch = command.batch
        self._running[batch.batch_id] = batch
        self.device.start(batch, command.build_variant, self._agenda.now)

    def _load(self, command: LoadInstance) -> None:
        self._instances[command.instance] = (command.segment, command.width)
        took = self.device.load_time(command.segment, command.width)
        self._later(took, DEVICE, InstanceReady(command.instance))

    def _unload(self, command: UnloadInstance) -> None:
        took = self.device.unload_time(*self._instances.pop(command.instance))
        self._later(took, DEVICE, InstanceUnloaded(command.instance))

    def _wake(self, command: WakeAt) -> None:
        self._later(command.at - self._agenda.now, TIMER, TimerFired())

    def _tell(self, message: ToDispatcher) -> None:
        self._send(self, message)

    def _later(self, seconds: Seconds, priority: int, event: ServerEvent) -> None:
        self._agenda.at(self._agenda.now + seconds, priority, self._own, (self.incarnation, event))

    # ---- faults

    def crash(self) -> None:
        """Queue, batches, instances and activations are gone; so is what arrives from now on."""
        if self.condition is Condition.CRASHED:
            return
        self.condition = Condition.CRASHED
        self.incarnation += 1
        self.device.clear(self._agenda.now)
        self._running.clear()
        self._instances.clear()
        self._held.clear()
        if self.activations is not None:
            self.activations.clear()

    def restart(self) -> None:
        """A fresh scheduler; its first report tells the dispatcher that it is another life."""
        if self.condition is Condition.CRASHED:
            self.condition = Condition.UP
            self.scheduler = self._build(self.incarnation)

    def hang(self) -> None:
        if self.condition is Condition.UP:
            self.condition = Condition.HUNG
            self.device.freeze(self._agenda.now)

    def wake_up(self) -> None:
        """Goes on where it stopped, with what has arrived meanwhile."""
        if self.condition is not Condition.HUNG:
            return
        self.condition = Condition.UP
        self.device.thaw(self._agenda.now)
        self._announce()
        held, self._held = self._held, []
        for event in held:
            self._handle(event)

    def slow(self, factor: float) -> None:
        self.device.slow(factor, self._agenda.now)
        if self.condition is Condition.UP:
            self._announce()
