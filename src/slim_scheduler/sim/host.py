"""The simulated host: the real Dispatcher and ServerSchedulers under one event heap, and everything between them.

It delivers arrivals, carries messages over the network, samples devices, and makes the configured faults happen. It
decides nothing: the same machines run live (rule 1). Same configuration and seed, same record, value for value.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    CancelTasks,
    DispatcherCommand,
    DispatcherEvent,
    Reply,
    RequestArrived,
    RequestCancelled,
    RouteNow,
    RouteSoon,
    SendBlock,
    ServerJoined,
    ServerLeft,
    TasksReturned,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.router.base import Escalation, Router
from slim_scheduler.core.server.scheduler import ServerScheduler
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import (
    Batch,
    Block,
    Decision,
    ItemId,
    Joules,
    Request,
    RequestId,
    Seconds,
    ServerName,
    TaskId,
    WidthTuple,
)
from slim_scheduler.core.view import View
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import (
    allowed_tasks,
    build_dispatcher,
    build_server,
    load_profiles,
    load_shape,
    run_rng,
)
from slim_scheduler.setup.workload import Arrivals, generate
from slim_scheduler.sim.agenda import ARRIVAL, END, FAULT, ROUTE, SAMPLE, TIMER, Agenda
from slim_scheduler.sim.device import SimulatedDevice
from slim_scheduler.sim.faults import MESSAGE_FAULTS, ActiveFaults, FaultChange, timeline
from slim_scheduler.sim.mail import Mail, ToDispatcher
from slim_scheduler.sim.server import Condition, SimulatedServer, StepObserver

DRAIN_FACTOR = 2.0  # a run that drains ends by so many times its duration
STEPS_PER_PROGRESS = 1_000
ROUTE_NOW = RouteNow()


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to. Everything else is in the record.

    `counts` are the dispatcher's totals; `tasks` were run to the end, in `blocks` blocks; `energy_j` per server, from
    time 0 to `ended_s`. Item i showed sample `arrivals.samples[i]`.
    """

    router: str
    seed: int
    arrivals: Arrivals
    ended_s: Seconds
    counts: dict[str, dict[str, int]]
    tasks: int
    blocks: int
    steps: int
    energy_j: dict[ServerName, Joules]


def simulate(
    config: Config,
    router_name: str,
    seed: int,
    *,
    recorder: StepObserver,
    arrivals: Arrivals | None = None,
    progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """One simulated run of the configured workload (or of other `arrivals`) under one router.

    `progress` is called now and then with the share of the run's time that has passed. Raises InputError.
    """
    return Simulation(config, router_name, seed, recorder=recorder, arrivals=arrivals).run(progress)


@contextmanager
def few_collections() -> Iterator[None]:
    """Lets the garbage collector look for cycles less often: a run makes none, and looking takes 8 % of its time."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """A run that is stepped through event by event; `run` does all of it.

    More can be put on its agenda before or between steps: `submit` a request, `cancel` one, `schedule` a fault.
    `router`, where given, is used instead of the one `router_name` names, with its `escalation`. Servers in `joins`
    come at that time, the others are there from the beginning. `margin` of an item's answer at a width tuple is for
    routers that let items run again. Raises ConfigError where it is missing for one.
    """

    def __init__(
        self,
        config: Config,
        router_name: str,
        seed: int,
        *,
        recorder: StepObserver,
        arrivals: Arrivals | None = None,
        router: Router | None = None,
        escalation: Escalation | None = None,
        joins: Mapping[ServerName, Seconds] | None = None,
        margin: Callable[[ItemId, WidthTuple], float] | None = None,
    ) -> None:
        shape = load_shape(config)
        profiles = load_profiles(config, shape)
        self.agenda = Agenda()
        self.dispatcher = build_dispatcher(
            config, shape, router_name, profiles, seed, router=router, escalation=escalation
        )
        self.arrivals = generate(config.workload, seed, 1) if arrivals is None else arrivals
        self.done = False
        self._config = config
        self._router_name = router_name
        self._seed = seed
        self._observe = recorder.step
        self._mail = Mail(config, shape, self.agenda, run_rng(seed, "faults"))
        self._deadline = config.workload.deadline_ms / 1e3 or None
        self._duration = config.workload.duration_s
        self._coming = len(self.arrivals.times)
        self._open = 0
        self._tasks = self._blocks = 0
        self._wakes: set[Seconds] = set()
        self._by_decision = False
        self._absorbed: DispatcherEvent | None = None
        self._view: View | None = None
        self.servers: dict[ServerName, SimulatedServer] = {}
        streams = run_rng(seed, "devices").spawn(len(config.servers))
        for knobs, stream in zip(config.servers, streams, strict=True):
            device = SimulatedDevice(profiles[knobs.name], shape, knobs.max_batch, knobs.slowdown, stream)
            build = _builder(config, knobs.name, shape, profiles[knobs.name])
            self.servers[knobs.name] = SimulatedServer(
                knobs.name, device, build, self.agenda, recorder, self._from_server
            )
        self._margin = margin
        self._segments = shape.segments
        # Where margins are reported: an item's newest attempt, and the widths of its pass so far.
        self._newest: dict[ItemId, TaskId] = {}
        self._ran: dict[ItemId, WidthTuple] = {}
        if self.dispatcher.escalates:
            if margin is None:
                raise ConfigError(
                    f"router {router_name} lets items run again, which needs the margins of model {config.model.path}; "
                    f"run `slim accuracy --model {config.model.path} --data DIR`"
                )
            for server in self.servers.values():
                server.margins = self._margins_of
        self._perform: dict[type, Callable[[Any], None]] = {
            SendBlock: self._send_block,
            CancelTasks: self._send_cancel,
            Reply: self._reply,
            WakeAt: self._wake,
            RouteSoon: self._route_soon,
        }
        credits = {s.name: allowed_tasks(config, s, shape, profiles[s.name]) for s in config.servers}
        self._begin(joins or {}, credits)

    def _begin(self, joins: Mapping[ServerName, Seconds], credits: Mapping[ServerName, int]) -> None:
        agenda = self.agenda
        for server in self._config.servers:
            at, period = joins.get(server.name, 0.0), self._config.telemetry.period_s
            agenda.at(at, FAULT, self._dispatch, ServerJoined(server.name, credits[server.name]))
            agenda.at(at, SAMPLE, self._sample, (server.name, math.ceil(at / period)))
        self._faults = {server.name: ActiveFaults() for server in self._config.servers}
        for change in timeline(self._config.faults):
            self.schedule(change)
        self._next_arrival = zip(
            range(len(self.arrivals.times)),
            self.arrivals.times.tolist(),
            self.arrivals.first_item.tolist(),
            self.arrivals.sizes.tolist(),
            strict=True,
        )
        self._await_arrival()
        agenda.at(self._duration, END, self._close)

    # ---- the loop

    def step(self) -> None:
        """Does exactly one event: delivers it to its machine and performs the commands that come back."""
        self.agenda.step()

    def run(self, progress: Callable[[float], None] | None = None) -> SimulationResult:
        """Steps to the end of the run."""
        step = self.agenda.step
        with few_collections():
            while not self.done:
                for _ in range(STEPS_PER_PROGRESS):
                    step()
                    if self.done:
                        break
                if progress is not None:
                    progress(min(1.0, self.agenda.now / self._duration))
        return self.result()

    def run_until_decision(self) -> View | None:
        """Steps until a routing decision is due, and returns what the router sees; None when the run is over.

        `decide` must follow. This is how an environment drives the run: the record is the same as `run`'s.
        """
        self._by_decision = True
        dispatcher, agenda = self.dispatcher, self.agenda
        while not self.done:
            if self._absorbed is None:
                self.step()
                continue
            self._view = dispatcher.pending(agenda.now)
            if self._view is not None:
                return self._view
            event, self._absorbed = self._absorbed, None
            self._carry_out(event, dispatcher.finish(agenda.now))
        return None

    def decide(self) -> Decision:
        """Takes the decision that is due: asks the router, which an environment hands in with its choice made."""
        assert self._view is not None, "no decision is due; call run_until_decision first"
        return self.dispatcher.decide(self._view)

    def result(self) -> SimulationResult:
        now = self.agenda.now
        return SimulationResult(
            router=self._router_name,
            seed=self._seed,
            arrivals=self.arrivals,
            ended_s=now,
            counts=self.dispatcher.counts,
            tasks=self._tasks,
            blocks=self._blocks,
            steps=self.agenda.steps,
            energy_j={name: server.device.energy(now) for name, server in self.servers.items()},
        )

    def _close(self, _: None) -> None:
        """Arrivals are over. A run that drains goes on until everything has its outcome."""
        if self._config.workload.end == "cut":
            self._finish(None)
        else:
            self.agenda.at(DRAIN_FACTOR * self._duration, END, self._finish)
            self._finish_if_drained()

    def _finish_if_drained(self) -> None:
        if not self._open and not self._coming and self.agenda.now >= self._duration:
            self._finish(None)

    def _finish(self, _: None) -> None:
        """One last sample of every device, so that the record's energy reaches the end of the run."""
        if not self.done:
            self.done = True
            for server in self.servers.values():
                server.sample()

    # ---- the dispatcher's side

    def _dispatch(self, event: DispatcherEvent) -> None:
        if self._by_decision:
            if self.dispatcher.absorb(event, self.agenda.now):
                self._absorbed = event
            else:
                self._carry_out(event, self.dispatcher.finish(self.agenda.now))
        else:
            self._carry_out(event, self.dispatcher.handle(event, self.agenda.now))

    def _carry_out(self, event: DispatcherEvent, commands: list[DispatcherCommand]) -> None:
        self._observe("dispatcher", self.agenda.now, event, commands)
        perform = self._perform
        for command in commands:
            action = perform.get(type(command))  # others only go into the record
            if action is not None:
                action(command)

    def submit(self, request: Request) -> None:
        """Puts a request of one's own on the agenda, at its arrival."""
        self._coming += 1
        self.agenda.at(request.arrival, ARRIVAL, self._arrive, RequestArrived(request))

    def cancel(self, request_id: RequestId, at: Seconds) -> None:
        self.agenda.at(at, ARRIVAL, self._dispatch, RequestCancelled(request_id))

    def _await_arrival(self) -> None:
        arrival = next(self._next_arrival, None)
        if arrival is not None:
            self.agenda.at(arrival[1], ARRIVAL, self._arrive_next, arrival)

    def _arrive_next(self, arrival: tuple[int, Seconds, int, int]) -> None:
        request_id, time, first, size = arrival
        deadline = None if self._deadline is None else time + self._deadline
        items = (first,) if size == 1 else tuple(range(first, first + size))
        self._await_arrival()
        self._arrive(RequestArrived(Request(request_id, items, time, deadline)))

    def _arrive(self, event: RequestArrived) -> None:
        self._coming -= 1
        self._open += 1
        self._dispatch(event)

    def _route_soon(self, _: RouteSoon) -> None:
        self.agenda.at(self.agenda.now, ROUTE, self._dispatch, ROUTE_NOW)

    def _reply(self, command: Reply) -> None:
        self._open -= 1
        for ended in command.items if self._newest else ():
            self._newest.pop(ended.item, None)
            self._ran.pop(ended.item, None)
        if self._config.faults:
            for server in self.servers.values():
                if server.activations:
                    segments = range(self._segments)
                    server.activations.difference_update((item.item, s) for item in command.items for s in segments)
        if not self._open:
            self._finish_if_drained()

    def _wake(self, command: WakeAt) -> None:
        if command.at not in self._wakes:
            self._wakes.add(command.at)
            self.agenda.at(command.at, TIMER, self._ring, command.at)

    def _ring(self, at: Seconds) -> None:
        self._wakes.discard(at)
        self._dispatch(TimerFired())

    # ---- messages

    def _send_block(self, command: SendBlock) -> None:
        self._blocks += 1
        if self._margin is not None:
            for task in command.block.tasks:
                self._newest[task.item] = task.task_id
        self._mail.block(command.block, self._deliver_block)

    def _deliver_block(self, block: Block) -> None:
        server = self.servers[block.server]
        if server.activations is not None and block.segment:
            block = self._without_lost_activations(server, block)
        if block.tasks:
            server.receive(BlockArrived(block))

    def _without_lost_activations(self, server: SimulatedServer, block: Block) -> Block:
        """Gives back the tasks whose home crashed since, or does not answer."""
        made = block.segment - 1
        lost = tuple([t.task_id for t in block.tasks if not self._can_fetch(server, t.home, (t.item, made))])
        if not lost or server.condition is not Condition.UP:
            return block
        reason = "its activation is lost"
        self._from_server(server, TasksReturned(server.name, server.incarnation, lost, reason, activation_lost=True))
        return msgspec.structs.replace(block, tasks=tuple([t for t in block.tasks if t.task_id not in lost]))

    def _can_fetch(self, server: SimulatedServer, home: ServerName | None, output: tuple[ItemId, int]) -> bool:
        if home is None:
            return True
        holder = self.servers[home]
        assert holder.activations is not None
        return output in holder.activations and (holder is server or holder.condition is Condition.UP)

    def _send_cancel(self, command: CancelTasks) -> None:
        self._mail.cancellation(command, self.servers[command.server].receive)

    def _from_server(self, server: SimulatedServer, message: ToDispatcher) -> None:
        if isinstance(message, BatchReported):
            self._tasks += len(message.tasks)
        self._mail.to_dispatcher(server.name, message, self._dispatch)

    def _margins_of(self, batch: Batch) -> tuple[float, ...]:
        """Keeps what a batch's items ran; of the last segment their answers' margins, 0 for given-up attempts."""
        assert self._margin is not None
        margins = []
        for task in batch.tasks:
            if self._newest.get(task.item) != task.task_id:
                margins.append(0.0)
                continue
            ran = (*self._ran.get(task.item, ())[: batch.segment], batch.width)
            self._ran[task.item] = ran
            margins.append(self._margin(task.item, ran) if len(ran) == self._segments else 0.0)
        return tuple(margins) if batch.segment == self._segments - 1 else ()

    # ---- telemetry and faults

    def _sample(self, name_and_number: tuple[ServerName, int]) -> None:
        name, number = name_and_number
        self.servers[name].sample()
        number += 1
        self.agenda.at(number * self._config.telemetry.period_s, SAMPLE, self._sample, (name, number))

    def schedule(self, change: FaultChange) -> None:
        """Puts the beginning or end of a fault on the agenda."""
        for server in self.servers.values():
            if server.activations is None:
                server.activations = set()
        self.agenda.at(change.at, FAULT, self._change, change)

    def _change(self, change: FaultChange) -> None:
        name, kind = change.fault.server, change.fault.kind
        server, faults = self.servers[name], self._faults[name]
        faults.change(change)
        if kind in (*MESSAGE_FAULTS, "recover"):
            self._mail.befall(name, faults.shares)
        if kind in ("slow", "recover"):
            server.slow(faults.factor)
        if faults.dead:
            self._die(server, tells=kind == "exit")
        else:
            server.restart()
            server.hang() if faults.hung else server.wake_up()

    def _die(self, server: SimulatedServer, tells: bool) -> None:
        if server.condition is not Condition.CRASHED:
            server.crash()
            if tells:
                self._from_server(server, ServerLeft(server.name, "its process ended"))


def _builder(config: Config, name: ServerName, shape: ModelShape, profile: Profile) -> Callable[[int], ServerScheduler]:
    return lambda incarnation: build_server(config, name, shape, incarnation, profile)
