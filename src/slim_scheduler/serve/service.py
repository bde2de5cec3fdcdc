"""What HTTP and gRPC both call: one inference, the state of the server, and its statistics.

Owns readiness, draining, and the meeting of constraints; turns the engine's outcomes into answers and refusals. It
knows no transport.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError, InputError
from slim_scheduler.core.types import NOT_FINITE, ItemOutcome, Outcome, Seconds, ServerName
from slim_scheduler.engine.request import RequestLimits
from slim_scheduler.serve.decode import InferenceCall
from slim_scheduler.serve.encode import Answer, answer_size, spelled
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.metadata import PLATFORM, VERSION
from slim_scheduler.serve.parameters import Asked
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal, invalid, quote
from slim_scheduler.serve.repository import Repository, Served
from slim_scheduler.serve.tracing import Trace

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import InferenceResult, Ticket

log = logging.getLogger(__name__)

EXTENSIONS = (
    "classification",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
    "binary_tensor_data",
    "parameters",
)


FLOAT_BYTES = 4  # an element of an input, as the engine keeps it


class State(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # not ready, so that nobody new comes; who comes is served
    STOPPING = "stopping"  # new work is refused


class Service:
    """The server's side of the protocol, without the wire."""

    def __init__(
        self,
        repository: Repository,
        name: str = PLATFORM,
        trace: Trace | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._trace = trace
        self.memory = memory or MemoryBudget(Limits().held_bytes)
        self.repository = repository
        self.name = name
        self.version = installed_version("slim-scheduler")
        self.state = State.STARTING
        self.started = time.monotonic()
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: list[tuple[Inference, InferenceResult]] = []  # that the loop's next turn answers

    # ---- inference

    def offer(self, served: Served, asked: Asked, items: int, read: float) -> "Ticket":
        """Whether a request of so many items may come in, which was read at `read` on the monotonic clock.

        What would find the queue full, or would be late, is `refused` in the ticket. Otherwise `begin` follows, or the
        engine's `withdraw`. Raises Refusal where nothing is served any more.
        """
        self._check_serving(served)
        waited = time.monotonic() - read
        less, _ = _what_can_be_met(served, asked)
        ticket = served.engine.offer(items, limits_of(less, less.deadline), waited)
        if ticket.refused is not None:
            served.observer.finished(Outcome.REJECTED, waited, 0.0)
        return ticket

    def offer_again(self, served: Served, refused: "Ticket", read: float) -> bool:
        """Whether a request like an offer that the model's engine refused is refused for the same reason, and
        counted."""
        if not (self._serves(served) and served.engine.offer_again(refused)):
            return False
        served.observer.finished(Outcome.REJECTED, time.monotonic() - read, 0.0)
        return True

    def _serves(self, served: Served) -> bool:
        return self.state in (State.SERVING, State.DRAINING) and served.engine.running

    def _check_serving(self, served: Served) -> None:
        if not self._serves(served):
            raise Refusal(Kind.UNAVAILABLE, "the server or this model is stopping; send this elsewhere or later", 1.0)

    def begin(
        self,
        served: Served,
        call: InferenceCall,
        answered: "Answered",
        traceparent: str = "",
        arrived: float | None = None,
        ticket: "Ticket | None" = None,
    ) -> "Inference":
        """Runs one call on a model, its time counted from `arrived` on the monotonic clock (None: now).

        `ticket` is what came in of it, if its front end offered it. `answered` is called once, after this returns: with
        the answer, or a Refusal for every other outcome. Until just before, what the engine keeps of the input and what
        the answer may take are reserved. Raises Refusal where it cannot begin.
        """
        if ticket is None:
            self._check_serving(served)
        inference = Inference(self, served, call, answered, traceparent, arrived)
        self.memory.reserve(inference.reserved)
        try:
            inference.begin(ticket)
        except BaseException:
            self.memory.release(inference.reserved)
            raise
        self.in_flight += 1
        self._idle.clear()
        return inference

    def ended(self, inference: "Inference", result: "InferenceResult") -> None:
        """Answers it in the loop's next turn: the devices do not wait until answers are written."""
        self._ended.append((inference, result))
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        ended, self._ended = self._ended, []
        for inference, result in ended:
            try:
                inference.answer(result)
            except Exception:  # of one, and others wait
                log.exception("a defect of the server, in answering")

    def done(self, inference: "Inference") -> None:
        """It has its answer."""
        self.memory.release(inference.reserved)
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def trace(self, traceparent: str, seconds: Seconds, outcome: Outcome, served: Served, items: int) -> None:
        """Tells of one inference, where somebody wants to know."""
        if self._trace is not None:
            attributes: dict[str, str | int | float] = {
                "slim.model": served.card.name,
                "slim.items": items,
                "slim.outcome": outcome,
            }
            status = 200 if outcome is Outcome.ANSWERED else int(Kind.UNAVAILABLE)
            self._trace(traceparent, seconds, status, attributes)

    async def infer(
        self, served: Served, call: InferenceCall, traceparent: str = "", arrived: float | None = None
    ) -> Answer:
        """`begin`, and waits. Raises Refusal for every outcome but an answer; cancelling it cancels the call."""
        future: asyncio.Future[Answer | Refusal] = asyncio.get_running_loop().create_future()
        inference = self.begin(served, call, partial(_settle, future), traceparent, arrived)
        try:
            end = await future
        except asyncio.CancelledError:
            inference.cancel()
            raise
        if isinstance(end, Refusal):
            # Another one: a refusal that is in this frame would keep the frame, and the message with it.
            raise Refusal(end.kind, end.message, end.retry_after)
        return end

    # ---- state

    @property
    def ready(self) -> bool:
        """Ready means that an inference sent now would be served."""
        return (
            self.state is State.SERVING
            and bool(self.repository.served)
            and all(servable(served) for served in self.repository.served.values())
        )

    def model_ready(self, name: str, version: str = "") -> bool:
        return self.state is State.SERVING and servable(self.repository.find(name, version))

    async def start(self) -> None:
        """Loads the configured model; ready when this returns. Raises InputError's kinds when it cannot be served."""
        self.repository.check_first()
        try:
            await self.repository.load(self.repository.first)
        except Refusal as refusal:
            raise ConfigError(refusal.message) from None
        self.state = State.SERVING

    def drain(self) -> None:
        """Not ready from now on; requests are still served."""
        self.state = State.DRAINING

    async def stop(self, grace_s: float) -> None:
        """Refuses new work, waits for what is in flight, stops the engines. Takes at most about `grace_s`."""
        self.state = State.STOPPING
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        await self.repository.close(max(0.0, grace_s - (time.monotonic() - began)))

    # ---- documents

    def metadata(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "extensions": list(EXTENSIONS)}

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """The statistics extension's object, for one model or all."""
        chosen = [self.repository.find(name, version)] if name else list(self.repository.served.values())
        return {"model_stats": [_statistics(served) for served in chosen]}


def servable(served: Served) -> bool:
    """Whether some server of the model's engine is up."""
    return any(view.up for view in served.engine.servers.values())


Answered = Callable[[Answer | Refusal], None]


class Inference:
    """One call on its way through an engine. `reserved` bytes are held for it until it has ended."""

    __slots__ = (
        "_answered",
        "_began",
        "_call",
        "_engine",
        "_accuracy",
        "_served",
        "_service",
        "_ticket",
        "_trace",
        "_unmet",
        "reserved",
    )

    def __init__(
        self,
        service: Service,
        served: Served,
        call: InferenceCall,
        answered: Answered,
        traceparent: str,
        arrived: float | None,
    ) -> None:
        self.reserved = call.items.size * FLOAT_BYTES + answer_size(call, served.card)
        self._service = service
        self._served = served
        self._engine = served.engine
        self._accuracy = served.accuracy  # another model may take its place meanwhile
        self._call = call
        self._answered = answered
        self._trace = traceparent
        self._began = time.monotonic() if arrived is None else arrived
        self._unmet = ""  # which constraint was given up because the client preferred an answer
        self._ticket: Ticket

    def begin(self, ticket: "Ticket | None") -> None:
        """Raises Refusal."""
        asked, self._unmet = _what_can_be_met(self._served, self._call.asked)
        if ticket is None:
            self._ask(asked)
            return
        self._ticket = ticket
        try:
            self._engine.bring(ticket, self._call.items, self._end, asked.timeline)
        except InputError as error:
            raise invalid(quote(error, 300)) from error

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._engine.cancel(self._ticket)

    def _ask(self, asked: Asked) -> None:
        deadline = None if asked.deadline is None else asked.deadline - (time.monotonic() - self._began)
        if not self._engine.running:
            self._engine = self._served.engine
        try:
            self._ticket = self._engine.begin(
                self._call.items, limits_of(asked, deadline), self._end, timeline=asked.timeline
            )
        except InputError as error:
            raise invalid(quote(error, 300)) from error

    def _end(self, result: "InferenceResult") -> None:
        self._service.ended(self, result)

    def answer(self, result: "InferenceResult") -> None:
        """Says what came of it."""
        outcome = result.outcome
        end: Answer | Refusal
        try:
            if outcome is Outcome.ANSWERED:
                end = self._answer_of(result)
            else:
                end = _refusal(outcome, result.reason, result.retry_after)
        except Refusal as refusal:
            end = refusal.with_traceback(None)  # it would keep this frame
        except Exception:
            log.exception("a defect of the server, in answering")
            end = DEFECT
        now = time.monotonic()
        seconds = now - self._began
        self._served.observer.finished(outcome, seconds, now)
        self._service.done(self)
        self._answered(end)
        self._service.trace(self._trace, seconds, outcome, self._served, len(self._call.items))

    def _answer_of(self, result: "InferenceResult") -> Answer:
        served, items = self._served, result.items
        assert result.logits is not None
        table, observer = self._accuracy, served.observer
        confidence = _confidence(table, items)
        for at, item in enumerate(items):
            accuracy = confidence[at] if confidence else None if table is None else table.top1(item.widths)
            observer.item(item, spelled(item.widths), accuracy)
        observer.waited(max(items, key=_seconds) if len(items) > 1 else items[0])
        servers = frozenset([server for item in items for server in item.servers])
        source, precision = _energy_source(served, items, servers), served.precision(servers)
        return Answer(result.logits, items, source, self._unmet, result.timeline, confidence, precision)


def _what_can_be_met(served: Served, asked: Asked) -> tuple[Asked, str]:
    """What is asked of the engine, and which constraint was given up for it, where the client prefers an answer to one
    that cannot be met."""
    given_up = "widths" if asked.replaced else ""
    if asked.unmet != "answer" or served.engine.unmet(limits_of(asked, None)) is None:
        return asked, given_up
    if asked.confidence_floor is not None and (served.accuracy is None or served.accuracy.calibration is None):
        return msgspec.structs.replace(asked, confidence_floor=None), "confidence_floor"
    if asked.accuracy_floor is not None:  # nothing reaches the floor: what comes nearest is the widest
        widest = (max(served.card.widths),) * served.card.segments
        return msgspec.structs.replace(asked, accuracy_floor=None, widths=asked.widths or widest), "accuracy_floor"
    if asked.widths is not None:
        return msgspec.structs.replace(asked, widths=None), "widths"
    return asked, given_up


def limits_of(asked: Asked, deadline: Seconds | None) -> RequestLimits:
    return RequestLimits(
        deadline, asked.priority, asked.widths, asked.accuracy_floor, asked.confidence_floor, asked.anytime
    )


def _seconds(item: ItemOutcome) -> Seconds:
    return item.queue_s + item.compute_s


def _settle(future: "asyncio.Future[Answer | Refusal]", end: Answer | Refusal) -> None:
    if not future.done():
        future.set_result(end)


def _confidence(accuracy: AccuracyTable | None, items: Sequence[ItemOutcome]) -> tuple[float, ...]:
    """How sure each answer is; nothing where that is not known."""
    calibration = None if accuracy is None else accuracy.calibration
    if calibration is None:
        return ()
    known = [calibration.confidence(i.widths[-1], i.margin) for i in items if i.margin is not None]
    return tuple(known) if len(known) == len(items) else ()


def _refusal(outcome: Outcome, reason: str, retry_after: float | None) -> Refusal:
    if outcome is Outcome.REJECTED and retry_after is None:
        return invalid(f"cannot be met: {quote(reason, 300)}")
    if outcome is Outcome.FAILED and reason == NOT_FINITE:
        return Refusal(Kind.INTERNAL, f"{NOT_FINITE}: the model overflows for this input, or its weights are damaged")
    if outcome is Outcome.EXPIRED:
        text = f"not done by its deadline: {quote(reason, 300)}; allow more time, or send it again later"
        return Refusal(Kind.UNAVAILABLE, text, retry_after or 1.0)
    return Refusal(Kind.UNAVAILABLE, f"{outcome.value}: {quote(reason, 300)}", retry_after or 1.0)


def _energy_source(served: Served, items: Sequence[ItemOutcome], servers: frozenset[ServerName]) -> str:
    """Of these items, answered by these servers. Where a pass that did not answer ran is not told: any that measures
    or estimates may have it."""
    views, sources = served.engine.servers, set()
    anywhere = any(item.other_widths for item in items)
    for name in views if anywhere else servers:
        view = views.get(name)
        if view is not None and view.report is not None:
            sources.add(view.report.energy_source)
    if anywhere:
        sources.discard("none")
    return "+".join(sorted(sources)) or "none"


def _statistics(served: Served) -> dict[str, Any]:
    observer = served.observer
    items = served.counts()["items"]
    requests = served.counts()["requests"]
    answered = observer.request_seconds[Outcome.ANSWERED]
    failed = [h for outcome, h in observer.request_seconds.items() if outcome is not Outcome.ANSWERED]

    def duration(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": int(seconds * 1e9)}

    return {
        "name": served.card.name,
        "version": VERSION,
        "last_inference": int((time.time() - time.monotonic() + observer.recent[-1][0]) * 1e3)
        if observer.recent
        else 0,
        "inference_count": items["answered"],
        "execution_count": sum(observer.executions.values()),
        "inference_stats": {
            "success": duration(requests["answered"], answered.total),
            "fail": duration(sum(sum(h.buckets) for h in failed), sum(h.total for h in failed)),
            "queue": duration(requests["answered"], observer.queue_seconds),
            "compute_input": duration(requests["answered"], 0.0),
            "compute_infer": duration(requests["answered"], observer.compute_seconds),
            "compute_output": duration(requests["answered"], 0.0),
        },
        "batch_stats": _batch_statistics(served),
    }


def _batch_statistics(served: Served) -> list[dict[str, Any]]:
    """Executions by batch size."""
    zero = {"count": 0, "ns": 0}
    return [
        {
            "batch_size": size,
            "compute_input": zero,
            "compute_infer": {"count": count, "ns": 0},
            "compute_output": zero,
        }
        for size, count in sorted(served.observer.executions.items())
    ]
