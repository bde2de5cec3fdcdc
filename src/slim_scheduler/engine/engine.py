"""`SlimEngine`: the live system, for Python programs, the front end and the live benchmark.

It turns arrays into requests and replies into results, starts and drains the host, and bounds nothing itself: what is
refused, and why, is the dispatcher's decision. One engine belongs to one event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.dispatch.limits import SLOW_ROUTER
from slim_scheduler.core.errors import ConfigError, InputError, SlimError
from slim_scheduler.core.messages import (
    FrontTurned,
    OffersTaken,
    OfferWithdrawn,
    Reply,
    RequestCancelled,
    RequestOffered,
)
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import (
    Bytes,
    ItemId,
    ItemOutcome,
    Outcome,
    RequestId,
    Seconds,
    ServerName,
)
from slim_scheduler.core.view import ServerView
from slim_scheduler.engine.assembly import (
    accuracy_if_measured,
    live_config,
    profiles_if_all,
)
from slim_scheduler.engine.automatic import with_fastest_devices
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.host import FleetParts, Host, LiveFleet, NoRecorder, StepRecorder
from slim_scheduler.engine.inputs import Normalization, checked
from slim_scheduler.engine.intake import Intake
from slim_scheduler.engine.local.fleet import LocalFleet
from slim_scheduler.engine.request import RequestLimits
from slim_scheduler.engine.router_timer import TimedRouter
from slim_scheduler.engine.timeline import Timelines, Visit
from slim_scheduler.model.folder import load_manifest, load_model
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.setup.config import Config, ServerConfig, load_config
from slim_scheduler.setup.machines import build_dispatcher, load_shape, router_inputs
from slim_scheduler.setup.routers import build_escalation, build_router

STOPPING = "the engine is stopping"


class InferenceResult(msgspec.Struct, frozen=True):
    """The one answer to a request. `logits` is float32 (n, classes) where `outcome` is answered, else None."""

    logits: npt.NDArray[np.float32] | None
    outcome: Outcome
    items: tuple[ItemOutcome, ...] = ()
    reason: str = ""
    retry_after: Seconds | None = None
    timeline: tuple[Visit, ...] = ()


Answered = Callable[[InferenceResult], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's numbers at an engine, and whom to tell of its end.

    `inputs` are here while it waits to come in. `refused`: why it may not come in, and when to try again; None where
    that would not help.
    """

    request_id: RequestId
    items: range
    answered: Answered | None = None
    inputs: npt.NDArray[np.float32] | None = None
    followed: bool = False
    refused: tuple[str, Seconds | None] | None = None


class SlimEngine:
    """Serves one network on the servers of a configuration. `async with SlimEngine.from_config(path) as engine: ...`"""

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
        devices: dict[ServerName, Device] | None = None,
        fleet: Callable[[FleetParts], LiveFleet] | None = None,
    ) -> None:
        """`fleet` makes the servers; by default they are in this process, on `devices` where these are given."""
        config = live_config(config)
        self.shape = shape
        self.seed = seed
        self.profiles = profiles
        self.router_name = router or config.router.name
        self._normalization = normalization or Normalization.none(shape)
        inputs = router_inputs(config, shape, profiles)
        chosen = build_router(self.router_name, inputs)
        timed = TimedRouter(chosen, SLOW_ROUTER)
        dispatcher = build_dispatcher(
            config,
            shape,
            self.router_name,
            profiles,
            seed,
            accuracy=accuracy,
            router=timed,
            escalation=build_escalation(chosen, inputs),
        )
        self._timelines = Timelines(recorder or NoRecorder())
        parts = FleetParts(config, model, shape, profiles, dispatcher.wants_margins, recorder is not None)
        self.fleet = LocalFleet(parts, devices or {}) if fleet is None else fleet(parts)
        self._host = Host(dispatcher, timed, self.fleet, self._timelines, self._answer, self._took)
        self._waiting: dict[RequestId, Ticket] = {}
        self._refused: Ticket | None = None  # the last offer that was
        self._emptied: asyncio.Future[None] | None = None  # where somebody waits until nothing is in flight
        self._next_item: ItemId = 0
        self._next_request: RequestId = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._intake: Intake
        self._sampler: asyncio.TimerHandle | None = None
        self._stopping = False

    @classmethod
    def from_config(
        cls,
        config: Config | str | Path,
        router: str | None = None,
        seed: int = 0,
        recorder: StepRecorder | None = None,
    ) -> "SlimEngine":
        """Loads the model that the configuration names. Raises InputError's kinds for what cannot be used."""
        if not isinstance(config, Config):
            config = load_config(Path(config))
        shape, model = load_shape(config), load_model(config.model.path)
        config = with_fastest_devices(config, model, shape)
        manifest = load_manifest(config.model.path)
        return cls(
            config,
            model,
            shape,
            router=router,
            seed=seed,
            profiles=profiles_if_all(config, shape),
            accuracy=accuracy_if_measured(config),
            normalization=Normalization(manifest.mean, manifest.std),
            recorder=recorder,
            fleet=_cluster_fleet(config.cluster.address) if config.cluster.address else None,
        )

    # ---- life

    async def start(self) -> None:
        """Starts threads, timers and telemetry on the running loop."""
        if self._loop is not None:
            raise SlimError("this engine was started before; make a new one with SlimEngine.from_config")
        self._loop = asyncio.get_running_loop()
        self._intake = Intake(self._loop, self._turn_front)
        await self._host.start()
        self._sample_later(self._loop.time())

    async def stop(self, grace_s: Seconds = 10.0) -> None:
        """Refuses new requests, waits up to `grace_s` for those in flight, cancels the rest, frees the devices."""
        if self._stopping or self._loop is None:
            return
        self._stopping = True
        while self._intake.due:
            self._turn_front(0.0, True)  # what was offered, and not refused, is finished too
        if self._waiting and grace_s > 0:
            self._emptied = self._loop.create_future()
            await asyncio.wait([self._emptied], timeout=grace_s)
        for request_id in list(self._waiting):
            self._host.tell_dispatcher(RequestCancelled(request_id, stopping=True))
        if self._sampler is not None:
            self._sampler.cancel()
        self._intake.after(None)
        await self._host.stop()

    def hurry(self, grace_s: Seconds) -> None:
        """Ends the waiting of a `stop` that is under way after at most `grace_s`."""
        if self._loop is not None and self._emptied is not None:
            self._loop.call_later(grace_s, self._emptied.cancel)

    async def add_server(self, server: ServerConfig) -> None:
        """Takes one more server into service, while traffic runs. Raises ConfigError."""
        await self.fleet.add(server)

    async def remove_server(self, name: ServerName, grace_s: Seconds = 10.0) -> None:
        """Drains a server, then takes it out. What it has not finished in `grace_s` is run elsewhere."""
        await self.fleet.remove(name, grace_s)

    async def __aenter__(self) -> "SlimEngine":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(grace_s=10.0 if error is None else 0.0)

    # ---- requests

    async def infer(
        self,
        items: npt.NDArray[Any],
        *,
        deadline_s: Seconds | None = None,
        priority: int = 0,
        widths: Sequence[float] | None = None,
        accuracy_floor: float | None = None,
        confidence_floor: float | None = None,
        anytime: bool = True,
        timeline: bool = False,
    ) -> InferenceResult:
        """Answers (n, channels, height, width), float32 (normalised) or uint8 (raw pixels), with logits (n, classes).

        Items less sure than `confidence_floor` run again at the widest. Where that is not done by the deadline, the
        first answer is given if `anytime`.

        Overload, a missed deadline and cancellation are outcomes of the result. Raises InputError for what can never
        be served. Cancelling the awaiting task cancels the request. With `timeline` the result says where the time of
        every item went, segment by segment.
        """
        limits = RequestLimits(deadline_s, priority, widths, accuracy_floor, confidence_floor, anytime)
        future: asyncio.Future[InferenceResult] = self._running_loop().create_future()
        ticket = self.begin(items, limits, partial(_settle, future), timeline=timeline)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise

    def submit(
        self,
        items: npt.NDArray[Any],
        *,
        deadline_s: Seconds | None = None,
        priority: int = 0,
        widths: Sequence[float] | None = None,
        accuracy_floor: float | None = None,
        confidence_floor: float | None = None,
        anytime: bool = True,
        arrival: Seconds | None = None,
    ) -> "asyncio.Future[InferenceResult]":
        """`infer` without waiting; cancel the future to cancel the request.

        `arrival` is the intended arrival on the engine's clock (`now`), which latency and deadline count from.
        """
        limits = RequestLimits(deadline_s, priority, widths, accuracy_floor, confidence_floor, anytime)
        future: asyncio.Future[InferenceResult] = self._running_loop().create_future()
        ticket = self.begin(items, limits, partial(_settle, future), arrival)
        future.add_done_callback(lambda done: self.cancel(ticket) if done.cancelled() else None)
        return future

    def begin(
        self,
        items: npt.NDArray[Any],
        limits: RequestLimits,
        answered: Answered,
        arrival: Seconds | None = None,
        timeline: bool = False,
    ) -> Ticket:
        """What `infer` and `submit` do: `answered` is called once with the result, maybe before this returns.

        It must be brief, as the devices wait for the next work meanwhile. Raises InputError.
        """
        self._running_loop()
        limits = limits.checked(self.shape)
        inputs = checked(items, self.shape, self._normalization)
        ticket = self._number(len(inputs))
        if self._stopping:
            answered(InferenceResult(None, Outcome.REJECTED, (), STOPPING, 1.0))
            return ticket
        ticket.answered = answered
        self._wait_for(ticket, timeline)
        now = self.now() if arrival is None else arrival
        self._host.arrive(limits.request(ticket.request_id, ticket.items, now), inputs)
        return ticket

    def unmet(self, limits: RequestLimits) -> str | None:
        """Why what a request asks beyond an answer can never be met; None: it can. Nothing is counted."""
        request = limits.checked(self.shape).request(0, range(0), 0.0)
        return self._host.dispatcher.unmet(request.constraints, request.confidence_floor)

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for a request any more. Does nothing for one that has ended."""
        if ticket.request_id not in self._waiting:
            return
        if ticket.inputs is None:
            self._host.tell_dispatcher(RequestCancelled(ticket.request_id))
        else:
            ticket.inputs = None
            self._timelines.take(ticket.items)
            self._host.tell_of_offers(OfferWithdrawn(ticket.request_id, cancelled=True))
            self._end(ticket, InferenceResult(None, Outcome.CANCELLED, reason="cancelled by the client"))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise SlimError("the engine is not running; await engine.start() first")
        return self._loop

    def _number(self, items: int) -> Ticket:
        ticket = Ticket(self._next_request, range(self._next_item, self._next_item + items))
        self._next_request += 1
        self._next_item += items
        return ticket

    def _wait_for(self, ticket: Ticket, timeline: bool) -> None:
        self._waiting[ticket.request_id] = ticket
        if timeline:
            ticket.followed = True
            self._timelines.follow(ticket.items)

    # ---- requests that a front end has read, and that wait to come in

    def offer(self, items: int, limits: RequestLimits, waited: Seconds = 0.0) -> Ticket:
        """Asks whether a request of so many items, read `waited` seconds ago, may come in.

        If it is not refused, `bring` follows, or `withdraw`. `limits` are such as `begin` would take; they are not
        looked at again.
        """
        ticket = self._number(items)
        if self._stopping:
            ticket.refused = STOPPING, 1.0
            return ticket
        read = self.now() - waited
        reply = self._host.ask(RequestOffered(limits.request(ticket.request_id, ticket.items, read)))
        if reply is not None:
            ticket.refused = reply.reason, reply.retry_after
            self._refused = ticket
        return ticket

    def offer_again(self, refused: Ticket) -> bool:
        """Whether one more request like an offer that was refused is refused for the same reason, and counted. If not,
        it can be offered: this engine has refused another since, or something has happened."""
        return refused is self._refused and self._host.ask_again(refused.request_id)

    def bring(self, ticket: Ticket, items: npt.NDArray[Any], answered: Answered, timeline: bool = False) -> None:
        """The items of an offer that was not refused just now. It comes in when the dispatcher takes it; `answered` is
        as in `begin`. Raises InputError."""
        ticket.inputs = checked(items, self.shape, self._normalization)
        ticket.answered = answered
        self._wait_for(ticket, timeline)
        self._intake.soon()

    def withdraw(self, ticket: Ticket) -> None:
        """An offer that has not come in will not be brought."""
        self._host.tell_of_offers(OfferWithdrawn(ticket.request_id))

    def _turn_front(self, load: float, after_pause: bool) -> None:
        self._host.tell_of_offers(FrontTurned(load, after_pause))

    def _took(self, command: OffersTaken) -> None:
        for request_id in command.requests:
            ticket = self._waiting[request_id]
            assert ticket.inputs is not None
            self._host.keep(request_id, ticket.items, ticket.inputs)
            ticket.inputs = None
        self._intake.after(None if command.turn_at is None else command.turn_at - self.now())

    # ---- answers

    def _answer(self, reply: Reply) -> None:
        ticket = self._waiting[reply.request_id]
        logits = None
        if reply.outcome is Outcome.ANSWERED:
            logits = self.fleet.items.results(reply.items)
        self.fleet.items.forget(ticket.items)
        timeline = self._timelines.take(ticket.items) if ticket.followed else ()
        self._end(
            ticket, InferenceResult(logits, reply.outcome, reply.items, reply.reason, reply.retry_after, timeline)
        )

    def _end(self, ticket: Ticket, result: InferenceResult) -> None:
        del self._waiting[ticket.request_id]
        answered, ticket.answered = ticket.answered, None  # who is told may hold the ticket
        if not self._waiting and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        assert answered is not None
        answered(result)

    def stop_recording(self) -> None:
        """From here on nothing is recorded: a run was cut off, and what is in flight stays so in its record."""
        self._timelines.recorder = NoRecorder()

    # ---- what programs and pages may read

    @property
    def config(self) -> Config:
        """The configuration, with the servers that there are now."""
        return self.fleet.config

    def now(self) -> Seconds:
        """The engine's clock: seconds since `start`."""
        return self._host.clock.now()

    @property
    def running(self) -> bool:
        return self._loop is not None and not self._stopping

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Received, answered, rejected, expired, cancelled, failed and in flight, of items and of requests."""
        return self._host.dispatcher.counts

    @property
    def fifo_length(self) -> int:
        return self._host.dispatcher.fifo_length

    @property
    def held_up(self) -> int:
        """Tasks that no server has credit for."""
        return self._host.dispatcher.held_up

    @property
    def servers(self) -> dict[ServerName, ServerView]:
        """What the dispatcher knows of each server: credit, and its last report."""
        return self._host.dispatcher.servers

    @property
    def memory_used(self) -> dict[ServerName, Bytes]:
        """Bytes that each server's instances and running batches really take."""
        return dict(self.fleet.memory_used)

    @property
    def decision_us(self) -> dict[str, float] | None:
        """Mean and 99th percentile of the router's time per decision, microseconds."""
        return self._host.router.decision_us()

    # ---- inside

    def _sample_later(self, last: Seconds) -> None:
        assert self._loop is not None
        at = max(last + self.config.telemetry.period_s, self._loop.time())
        self._sampler = self._loop.call_at(at, self._sample, at)

    def _sample(self, at: Seconds) -> None:
        if not self._stopping or self._waiting:
            self._sample_later(at)
        self.fleet.sample()
        self._host.run()  # what came while nobody had room is stored


def _settle(future: "asyncio.Future[InferenceResult]", result: InferenceResult) -> None:
    if not future.done():
        future.set_result(result)


def _cluster_fleet(address: str) -> Callable[[FleetParts], LiveFleet]:
    """What makes the servers of a Ray cluster. Raises ConfigError where Ray, an extra, is not installed."""
    try:
        from slim_scheduler.engine.cluster.fleet import ClusterFleet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cluster.address is {address!r}, but Ray is not installed ({error}); "
            'pip install "slim-scheduler[ray]", or leave cluster.address empty'
        ) from None
    return ClusterFleet


__all__ = ["InferenceResult", "InputError", "SlimEngine"]
