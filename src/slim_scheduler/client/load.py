"""`slim load`: requests against a running server, and what became of them.

Open loop sends at times fixed beforehand and counts latency from the intended time, so a server that stalls cannot
hide it (no coordinated omission); closed loop keeps a number of requests going and finds the highest throughput. The
result says how late the generator itself was. A load ends though nothing answers: what is outstanding some time after
its last request is given up and counted.
"""

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec
import numpy as np
import uvloop

from slim_scheduler.client.client import Constraints, RefusedError
from slim_scheduler.client.senders import LOST, UNANSWERED, HttpSender, Status
from slim_scheduler.client.wire import ConnectionLostError
from slim_scheduler.core.errors import InputError

Transport = Literal["http", "grpc"]
VALID_LAG_S = 0.005
MOST_REQUESTS = 20_000_000  # each has its time beforehand, and leaves a row
LOST_PAUSE_S = 0.05  # between a connection that was lost and a caller's next try
SPARE_FILES = 64  # that a process has open beside its connections
UNANSWERED_S = 60.0  # how long answers are waited for once nothing more is sent: beyond any deadline that makes sense


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one load run saw. Times in seconds; latency counts from the intended arrival in open loop.

    `goodput_items_s` counts items answered within `deadline_ms` (all answered ones without a deadline). `reasons` has
    the text of the first answer of every status other than success. `unanswered` are requests whose answer was waited
    for in vain; they are errors. `valid` is false when the generator itself was too late to be believed.
    `interrupted`: Ctrl-C ended it early; what was under way then is unanswered.
    """

    url: str
    mode: Literal["open", "closed"]
    rate: float | None
    concurrency: int | None
    duration_s: float
    sent: int
    answered: int
    refused: int
    errors: int
    statuses: dict[str, int]
    reasons: dict[str, str]
    throughput_items_s: float
    goodput_items_s: float
    latency_s: dict[str, float]
    refusal_s: dict[str, float]
    generator_lag_s: dict[str, float]
    valid: bool
    interrupted: bool = False


class Tally:
    """Collects the ends of requests. `began` is when the load did, None before."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.ended: list[tuple[float, float, Status]] = []  # (intended, latency, status)
        self.lags: list[float] = []

    def add(self, intended: float, status: Status) -> None:
        self.ended.append((intended, time.perf_counter() - intended, status))


def check_load(
    rate: float | None,
    concurrency: int | None,
    duration: float,
    items: int = 1,
    warmup: float = 0.0,
    deadline_ms: float | None = None,
) -> None:
    """Raises InputError."""
    if (rate is None) == (concurrency is None):
        raise InputError("give either --rate (open loop) or --concurrency (closed loop)")
    for name, value in (
        ("rate", rate),
        ("concurrency", concurrency),
        ("duration", duration),
        ("items", items),
        ("deadline_ms", deadline_ms),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{name} is {value:g}; it must be above 0 and finite")
    if not 0 <= warmup < float("inf"):
        raise InputError(f"warmup is {warmup:g}; it must be 0 or more and finite")
    seconds = warmup + duration
    if rate is not None and rate * seconds > MOST_REQUESTS:
        raise InputError(
            f"{rate:g} requests a second for {seconds:g} s are {rate * seconds:.3g}; at most {MOST_REQUESTS:,} are "
            "planned: lower --rate, --duration or --warmup"
        )


Send = Callable[[int], Awaitable[Status]]


def load(
    url: str,
    rate: float | None = None,
    concurrency: int | None = None,
    duration: float = 10.0,
    *,
    transport: Transport | None = None,
    model: str | None = None,
    items: int = 1,
    datatype: Literal["FP32", "UINT8"] = "FP32",
    constraints: Constraints = Constraints(),  # noqa: B008 - immutable
    token: str | None = None,
    connections: int = 4000,
    warmup: float = 1.0,
    seed: int = 0,
) -> LoadResult:
    """Runs a load and returns what it saw. Give `rate` (requests per second) or `concurrency`. Raises InputError.

    `url` is http://HOST:PORT or grpc://HOST:PORT. The first `warmup` seconds are not counted. In open loop, as many
    `connections` are opened as requests are under way: who has fewer bounds what the server can be offered. Over HTTP
    the process's limit of open files is raised where it is too low for them. Ctrl-C returns what was seen until then.
    """
    check_load(rate, concurrency, duration, items, warmup, constraints.deadline_ms)
    if transport is None:
        transport = "grpc" if url.startswith("grpc://") else "http"
    run = _run(url, rate, concurrency, duration, transport, model, items, datatype, constraints, token, connections,
               warmup, seed)  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(run)
        except (OSError, ConnectionLostError) as error:
            raise InputError(f"{url} does not answer: {error}; is `slim serve` running there?") from None
        except RefusedError as error:
            raise InputError(f"{url} refuses: {error}") from None


async def _run(
    url: str,
    rate: float | None,
    concurrency: int | None,
    duration: float,
    transport: Transport,
    model: str | None,
    items: int,
    datatype: str,
    constraints: Constraints,
    token: str | None,
    connections: int,
    warmup: float,
    seed: int,
) -> LoadResult:
    rng = np.random.default_rng(seed)
    if transport == "grpc":
        from slim_scheduler.client.grpc_sender import GrpcSender

        sender: Any = await GrpcSender.open(url, model, token, items, datatype, constraints, rng)
    else:
        most = _allowed_connections(concurrency, connections)
        sender = await HttpSender.open(url, model, token, items, datatype, constraints, rng, most)
    tally = Tally()
    interrupted_at = None
    try:
        if rate is not None:
            await open_loop(sender.send, rate, warmup + duration, rng, tally)
        else:
            assert concurrency is not None
            await closed_loop(sender.send, concurrency, warmup + duration, tally)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or tally.began is None:
            raise
        task.uncancel()  # the runner cancels once for the first Ctrl-C, and the result is still wanted
        interrupted_at = time.perf_counter()
    finally:
        await sender.close()
    assert tally.began is not None
    since, deadline_ms = tally.began + warmup, constraints.deadline_ms
    reasons: dict[Status, str] = {UNANSWERED: "no answer came until the load's end", **sender.reasons}
    return result_of(url, rate, concurrency, items, duration, since, deadline_ms, tally, reasons, interrupted_at)


def _allowed_connections(concurrency: int | None, connections: int) -> int:
    """How many connections may be open: all that a closed loop has, or as many of an open loop's as the system allows.

    Raises the process's limit of open files as far as needed and allowed. Raises InputError.
    """
    asked = connections if concurrency is None else concurrency
    needed = asked + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # a system may allow less than its limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        if soft < needed and concurrency is not None:
            raise InputError(
                f"concurrency is {concurrency}, and this process may open {soft} files, {SPARE_FILES} of them for "
                f"itself; give at most {max(0, soft - SPARE_FILES)}, or allow more with `ulimit -n {needed}`"
            )
        return max(1, min(asked, soft - SPARE_FILES))
    return asked


async def open_loop(send: Send, rate: float, duration: float, rng: np.random.Generator, tally: Tally) -> None:
    """Poisson arrivals, each sent at its time whatever became of the others."""
    count = max(1, int(rng.poisson(rate * duration)))
    times = np.sort(rng.uniform(0.0, duration, count))
    running: set[asyncio.Task[None]] = set()

    async def one(intended: float, number: int) -> None:
        try:
            status = await send(number)
        except asyncio.CancelledError:
            status = UNANSWERED
        tally.add(intended, status)

    with _brief_collections():
        start = tally.began = time.perf_counter()
        try:
            for number, offset in enumerate(times.tolist()):
                intended = start + offset
                wait = intended - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tally.lags.append(max(0.0, time.perf_counter() - intended))
                task = asyncio.create_task(one(intended, number))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running, timeout=UNANSWERED_S)
        finally:
            await _give_up(running)


async def closed_loop(send: Send, concurrency: int, duration: float, tally: Tally) -> None:
    """Each of `concurrency` callers sends again as soon as it is answered."""

    async def caller(first: int, end: float) -> None:
        number = first
        while (intended := time.perf_counter()) < end:
            try:
                status = await send(number)
            except asyncio.CancelledError:
                tally.add(intended, UNANSWERED)
                raise
            tally.add(intended, status)
            if status == LOST:
                await asyncio.sleep(LOST_PAUSE_S)
            number += concurrency

    tally.lags.append(0.0)
    with _brief_collections():
        tally.began = time.perf_counter()
        end = tally.began + duration
        callers = [asyncio.create_task(caller(first, end)) for first in range(concurrency)]
        try:
            ended, _ = await asyncio.wait(callers, timeout=duration + UNANSWERED_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()  # raises what it raised
        finally:
            await _give_up(callers)


async def _give_up(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels the requests that are still under way, which then count themselves as unanswered."""
    outstanding = [task for task in tasks if not task.done()]
    for task in outstanding:
        task.cancel()
    if outstanding:
        await asyncio.wait(outstanding)


@contextlib.contextmanager
def _brief_collections() -> Iterator[None]:
    """Garbage collections look only at what is made from here on: with large libraries imported, one takes 50 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def result_of(
    url: str,
    rate: float | None,
    concurrency: int | None,
    items: int,
    duration: float,
    since: float,
    deadline_ms: float | None,
    tally: Tally,
    reasons: dict[Status, str] | None = None,
    interrupted_at: float | None = None,
) -> LoadResult:
    """What a tally says of the requests meant for `since` or later, in `duration` seconds or until it was interrupted.

    `reasons`: a text for statuses. The time in which an answer was waited for in vain is not measured.
    """
    counted = [row for row in tally.ended if row[0] >= since]
    answered = [latency for _, latency, status in counted if status in (200, "OK")]
    refused = [latency for _, latency, status in counted if status in (503, "UNAVAILABLE")]
    statuses: dict[str, int] = {}
    for _, _, status in counted:
        statuses[str(status)] = statuses.get(str(status), 0) + 1
    limit = float("inf") if deadline_ms is None else deadline_ms / 1e3
    in_time = sum(latency <= limit for latency in answered)
    ends = [intended + latency for intended, latency, status in counted if status != UNANSWERED]
    planned = duration if interrupted_at is None else max(0.0, min(duration, interrupted_at - since))
    seconds = max(planned, max(ends, default=since) - since)
    lag = _spread(tally.lags)
    return LoadResult(
        url=url,
        mode="open" if rate is not None else "closed",
        rate=rate,
        concurrency=concurrency,
        duration_s=seconds,
        sent=len(counted),
        answered=len(answered),
        refused=len(refused),
        errors=len(counted) - len(answered) - len(refused),
        statuses=statuses,
        reasons={str(status): text for status, text in (reasons or {}).items() if str(status) in statuses},
        throughput_items_s=len(answered) * items / seconds if seconds else 0.0,
        goodput_items_s=in_time * items / seconds if seconds else 0.0,
        latency_s=_spread(answered),
        refusal_s=_spread(refused),
        generator_lag_s=lag,
        valid=lag.get("p99", 0.0) <= VALID_LAG_S,
        interrupted=interrupted_at is not None,
    )


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    row = np.asarray(values)
    p50, p90, p95, p99 = np.percentile(row, (50, 90, 95, 99)).tolist()
    return {
        "mean": float(row.mean()),
        "sd": float(row.std()),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": float(row.max()),
    }
