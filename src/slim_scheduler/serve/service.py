"""What HTTP and gRPC both call: one inference, the state of the server, and its statistics.

Owns readiness, draining, and the meeting of constraints; turns the engine's outcomes into answers and refusals. It
knows no transport.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from enum import Enum
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

import msgspec

from slim_scheduler.core.errors import ConfigError, InputError
from slim_scheduler.core.types import NOT_FINITE, ItemOutcome, Outcome, Seconds, ServerName
from slim_scheduler.serve.decode import InferenceCall
from slim_scheduler.serve.encode import Answer, answer_size, spelled
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.metadata import PLATFORM, VERSION
from slim_scheduler.serve.parameters import Asked
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote
from slim_scheduler.serve.repository import Refused, Repository, Served
from slim_scheduler.serve.tracing import Trace

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import InferenceResult, Offer

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
JUST_READ = 0.01  # of its deadline: who waited longer may be refused for that, which says nothing of others


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

    # ---- inference

    def offer(self, served: Served, asked: Asked, items: int, read: float) -> "Offer":
        """Whether a request of so many items may come in, which was read at `read` on the monotonic clock.

        Raises Refusal for what would find the queue full, or would be late. What comes in waits at its front end until
        the engine names it; then `infer` follows.
        """
        self._check_serving(served)
        waited = time.monotonic() - read
        last = served.refused
        if last is not None and last.asked is asked and len(last.offer.items) == items:
            if served.engine.offer_again(last.offer):
                raise self._refusal(served, last.offer, waited)
            served.refused = None
        offer = served.engine.offer(
            items,
            deadline_s=asked.deadline,
            priority=asked.priority,
            widths=asked.widths,
            accuracy_floor=asked.accuracy_floor,
            confidence_floor=asked.confidence_floor,
            anytime=asked.anytime,
            waited=waited,
        )
        if offer.refused is not None:
            if asked.deadline is None or time.monotonic() - read < JUST_READ * asked.deadline:
                served.refused = Refused(asked, offer)
            raise self._refusal(served, offer, waited)
        return offer

    def _refusal(self, served: Served, refused: "Offer", waited: Seconds) -> Refusal:
        assert refused.refused is not None
        served.observer.finished(Outcome.REJECTED, waited, 0.0)
        return Refusal(Kind.UNAVAILABLE, *refused.refused)

    def _check_serving(self, served: Served) -> None:
        if self.state not in (State.SERVING, State.DRAINING) or not served.engine.running:
            raise Refusal(Kind.UNAVAILABLE, "the server or this model is stopping; send this elsewhere or later", 1.0)

    async def infer(
        self,
        served: Served,
        call: InferenceCall,
        traceparent: str = "",
        arrived: float | None = None,
        offer: "Offer | None" = None,
    ) -> Answer:
        """Runs one call on a model, its time counted from `arrived` on the monotonic clock (None: now).

        `offer` is what came in of it, if its front end asked.

        While it runs, what the engine keeps of the input and what the answer may take are reserved. Raises Refusal for
        every outcome but an answer.
        """
        self._check_serving(served)
        needed = call.items.size * FLOAT_BYTES + answer_size(call, served.card)
        self.memory.reserve(needed)
        self.in_flight += 1
        self._idle.clear()
        now = time.monotonic()
        began = now if arrived is None else arrived
        outcome = Outcome.CANCELLED
        try:
            result, unmet = await _run(served, call, now - began, offer)
            outcome = result.outcome
            if outcome is not Outcome.ANSWERED:
                raise _refusal(outcome, result.reason, result.retry_after)
            confidence = _confidence(served, result.items)
            self._account(served, result.items, confidence)
            assert result.logits is not None
            servers = frozenset([server for item in result.items for server in item.servers])
            source = _energy_source(served, servers)
            precision = served.precision(servers)
            return Answer(result.logits, result.items, source, unmet, result.timeline, confidence, precision)
        finally:
            now = time.monotonic()
            served.observer.finished(outcome, now - began, now)
            self.in_flight -= 1
            self.memory.release(needed)
            if not self.in_flight:
                self._idle.set()
            if self._trace is not None:
                attributes: dict[str, str | int | float] = {
                    "slim.model": served.card.name,
                    "slim.items": len(call.items),
                    "slim.outcome": outcome,
                }
                status = 200 if outcome is Outcome.ANSWERED else int(Kind.UNAVAILABLE)
                self._trace(traceparent, now - began, status, attributes)

    def _account(self, served: Served, items: Any, confidence: Sequence[float]) -> None:
        table, observer = served.accuracy, served.observer
        for at, item in enumerate(items):
            accuracy = confidence[at] if confidence else None if table is None else table.top1(item.widths)
            observer.item(item, spelled(item.widths), accuracy)

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


async def _run(
    served: Served, call: InferenceCall, waited: float, offer: "Offer | None"
) -> "tuple[InferenceResult, str]":
    """The engine's result, and which constraint was given up because the client preferred an answer."""
    asked = call.asked
    if asked.deadline is not None:
        asked = msgspec.structs.replace(asked, deadline=asked.deadline - waited)
    try:
        result = await _ask(served, call, asked, offer)
        if asked.unmet == "answer" and result.outcome is Outcome.REJECTED and result.retry_after is None:
            if asked.confidence_floor is not None and not _calibrated(served):
                nearest = msgspec.structs.replace(asked, confidence_floor=None)
                return await _ask(served, call, nearest), "confidence_floor"
            if asked.accuracy_floor is not None:  # nothing reaches the floor: what comes nearest is the widest
                widest = (max(served.card.widths),) * served.card.segments
                nearest = msgspec.structs.replace(asked, accuracy_floor=None, widths=asked.widths or widest)
                return await _ask(served, call, nearest), "accuracy_floor"
            if asked.widths is not None:
                return await _ask(served, call, msgspec.structs.replace(asked, widths=None)), "widths"
        return result, "widths" if asked.replaced else ""
    except InputError as error:
        raise invalid(quote(error, 300)) from error


def _ask(
    served: Served, call: InferenceCall, asked: Asked, offer: "Offer | None" = None
) -> "Coroutine[Any, Any, InferenceResult]":
    return served.engine.infer(
        call.items,
        deadline_s=asked.deadline,
        priority=asked.priority,
        widths=asked.widths,
        accuracy_floor=asked.accuracy_floor,
        confidence_floor=asked.confidence_floor,
        anytime=asked.anytime,
        timeline=asked.timeline,
        offer=offer,
    )


def _calibrated(served: Served) -> bool:
    return served.accuracy is not None and served.accuracy.calibration is not None


def _confidence(served: Served, items: Sequence[ItemOutcome]) -> tuple[float, ...]:
    """How sure each answer is; nothing where that is not known."""
    calibration = None if served.accuracy is None else served.accuracy.calibration
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
        return Refusal(Kind.UNAVAILABLE, f"not done by its deadline: {quote(reason, 300)}", retry_after or 1.0)
    return Refusal(Kind.UNAVAILABLE, f"{outcome.value}: {quote(reason, 300)}", retry_after or 1.0)


def _energy_source(served: Served, servers: frozenset[ServerName]) -> str:
    views, sources = served.engine.servers, set()
    for name in servers:
        view = views.get(name)
        if view is not None and view.report is not None:
            sources.add(view.report.energy_source)
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
            "queue": duration(observer.items_answered, observer.queue_seconds),
            "compute_input": duration(observer.items_answered, 0.0),
            "compute_infer": duration(observer.items_answered, observer.compute_seconds),
            "compute_output": duration(observer.items_answered, 0.0),
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
