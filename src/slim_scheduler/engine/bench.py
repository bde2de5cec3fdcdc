"""One live run under the configured workload: open loop, real images, answers judged against their true labels.

The same arrivals and samples come for every router with the same seed, and for the simulator. Latency counts from the
intended arrival, so a generator that falls behind cannot hide it. Summaries and files are made from the record, not
here.
"""

import asyncio
import contextlib
import gc
import selectors
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.types import ItemId, Seconds, WidthTuple
from slim_scheduler.engine.engine import InferenceResult, SlimEngine
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.engine.inputs import Normalization
from slim_scheduler.model.data import load_data
from slim_scheduler.model.folder import load_manifest
from slim_scheduler.record.levels import Level
from slim_scheduler.record.recorder import Recorder, RunInfo
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import load_shape
from slim_scheduler.setup.workload import Arrivals, generate

Progress = Callable[[float, float], None]  # seconds done, seconds in all

DRAIN_FACTOR = 2.0  # a run that drains may take this many times its duration (docs/measures.md)
LONGEST_STRETCH: Seconds = 0.002  # of arrivals that are late, one after the other
SWITCH: Seconds = 0.0005  # that a thread may keep the interpreter from the generator; Python's 0.005 would make it late
PROGRESS_EVERY: Seconds = 0.5


class LiveRun(NamedTuple):
    """A finished or interrupted run; `recorder.write(path, info)` writes its record."""

    recorder: Recorder
    info: RunInfo
    arrivals: Arrivals


def bench(
    config: Config,
    router_name: str | None = None,
    seed: int = 0,
    *,
    level: Level | None = None,
    progress: Progress | None = None,
) -> LiveRun:
    """Runs the workload on this machine's devices.

    Ctrl-C ends the run early, and what was recorded is returned with `info.interrupted` set.
    """
    run = _Bench(config, router_name or config.router.name, seed, level or config.record.level, progress)
    # select() waits to the microsecond; asyncio's epoll rounds up to a millisecond, which would count as latency.
    runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
    with _undisturbed(), runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(run.run())
    return LiveRun(run.recorder, run.info(), run.arrivals)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While a run goes on, no search for cycles, which stops generator and engine for up to 0.6 s when it looks at all;
    and no other thread keeps the interpreter from them for long."""
    was_enabled, interval = gc.isenabled(), sys.getswitchinterval()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(min(interval, SWITCH))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if was_enabled:
            gc.enable()


async def due(times: Sequence[Seconds], now: Callable[[], Seconds]) -> AsyncIterator[int]:
    """The index of each time when it has come. Late ones follow each other, with a turn of the loop now and then.

    A turn after each would offer less the slower the engine is, which lives on the same loop.
    """
    turned = now()
    for i, at in enumerate(times):
        wait = at - now()
        if wait > 0.0 or now() - turned > LONGEST_STRETCH:
            await asyncio.sleep(max(0.0, wait))
            turned = now()
        yield i


class _Bench:
    def __init__(
        self,
        config: Config,
        router_name: str,
        seed: int,
        level: Level,
        progress: Progress | None,
    ) -> None:
        shape = load_shape(config)
        manifest = load_manifest(config.model.path)
        images = load_data(config.workload.data, shape.item_shape).test
        self.config = config
        self.router_name = router_name
        self.seed = seed
        self.arrivals = generate(config.workload, seed, len(images))
        self.recorder = Recorder(level, self.judge, live=True)
        self._items = Normalization(manifest.mean, manifest.std).apply(images.pixels)  # (samples, channels, ...)
        self._labels = images.labels
        self._answers: npt.NDArray[np.int64] = np.full(self.arrivals.items, -1)
        self._progress = progress
        self._engine = SlimEngine.from_config(config, router_name, seed, self.recorder)
        self._started: Seconds = 0.0
        self._ended: Seconds = 0.0
        self._cpu_s: Seconds = 0.0
        self._complete = False

    def judge(self, item: ItemId, widths: WidthTuple) -> bool | None:
        """Whether the item was answered right; None where its request has no answer."""
        answer = int(self._answers[item])
        return answer == int(self._labels[self.arrivals.samples[item]]) if answer >= 0 else None

    def info(self) -> RunInfo:
        return RunInfo(
            mode="live",
            router=self.router_name,
            seed=self.seed,
            started_at=self._started,
            ended_at=self._ended,
            interrupted=not self._complete,
            decision_us=self._engine.decision_us,
            machine=device_name(self.config.servers[0].device),
            # Of a cluster, this process is the smallest part.
            cpu_s=None if self.config.cluster.address else self._cpu_s,
        )

    async def run(self) -> None:
        engine, workload = self._engine, self.config.workload
        await engine.start()
        watch = asyncio.create_task(self._watch())
        self._started = engine.now()
        worked = time.process_time()
        try:
            waiting = await self._offer()
            if workload.end == "cut":
                await asyncio.sleep(self._started + workload.duration_s - engine.now())
            elif waiting:
                latest = self._started + DRAIN_FACTOR * workload.duration_s
                await asyncio.wait(waiting, timeout=max(0.0, latest - engine.now()))
            self._complete = True
        finally:
            self._ended = engine.now()
            self._cpu_s = time.process_time() - worked
            watch.cancel()
            engine.stop_recording()  # what is still in flight stays so in the record
            await engine.stop(grace_s=0.0)

    async def _offer(self) -> "set[asyncio.Future[InferenceResult]]":
        """Sends every request at its intended time, however the engine is doing."""
        engine, arrivals = self._engine, self.arrivals
        deadline = self.config.workload.deadline_ms / 1e3 or None
        waiting: set[asyncio.Future[InferenceResult]] = set()
        times, firsts, sizes = arrivals.times.tolist(), arrivals.first_item.tolist(), arrivals.sizes.tolist()
        async for i in due([self._started + at for at in times], engine.now):
            first, size = firsts[i], sizes[i]
            samples = arrivals.samples[first : first + size]
            future = engine.submit(self._items[samples], deadline_s=deadline, arrival=self._started + times[i])
            waiting.add(future)
            future.add_done_callback(waiting.discard)
            future.add_done_callback(partial(self._note, first))
        return waiting

    def _note(self, first: ItemId, done: "asyncio.Future[InferenceResult]") -> None:
        logits = None if done.cancelled() else done.result().logits
        if logits is not None:
            answers = logits.argmax(axis=1)
            self._answers[first : first + len(answers)] = answers

    async def _watch(self) -> None:
        while self._progress is not None:
            self._progress(self._engine.now() - self._started, self.config.workload.duration_s)
            await asyncio.sleep(PROGRESS_EVERY)
