"""Measures a device's profile: latency, load time, memory and power of every piece of one network.

Latency is taken through the engine's own executor, from submission to completion as the event loop sees it, so the
host's overhead is inside. Every round visits all points once in a random order: as in serving, a batch finds the
processor's caches full of other weights (the same batch twice in a row is a quarter faster), and a disturbance hits
many points a little rather than one point much. Medians are kept, with the spread between quartiles.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from slim_scheduler.core.messages import LoadInstance
from slim_scheduler.core.profile import Curve, Latency, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Batch, Bytes, Seconds, ServerName, Task, Watts, Width, WidthTuple
from slim_scheduler.engine.device import Device, open_device
from slim_scheduler.engine.executor import BatchJob, Executor, Job, LoadJob, UnloadJob
from slim_scheduler.engine.hardware import device_name, versions
from slim_scheduler.engine.probe import open_probe
from slim_scheduler.model import checkpoint
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.shape import shape_of

Progress = Callable[[int, int], None]  # points done, points in all

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 20
LOADS = 5
SLOWEST_FREE_BYTE: Seconds = 1e-11  # 100 GB/s: where bytes do not show in the load time, they cost this
POWER_SECONDS = 2.0
# Without a meter: board power of an AMD EPYC 9004 over its cores (360 W / 96), a third of it idle. An estimate.
CORE_WATTS_BUSY: Watts = 3.75
CORE_WATTS_IDLE: Watts = 1.25


class Point(NamedTuple):
    """One piece of the network at one batch size."""

    segment: int
    previous_width: Width | None
    width: Width
    batch: int


def measure(
    model_dir: str | Path,
    device: str,
    *,
    batches: Sequence[int] = BATCHES,
    threads: int = 1,
    busy: int = 0,
    rounds: int = ROUNDS,
    memory_gib: float = 8.0,
    progress: Progress | None = None,
) -> Profile:
    """The profile of `device` (`cpu`, `cuda:N`) for the network in `model_dir`.

    `busy` further servers of this process keep computing during a second pass; how much slower that makes this one
    becomes the profile's slowdown curve, from 1 at rest to that factor at full utilisation.
    """
    model = checkpoint.load(model_dir)
    return asyncio.run(
        measure_model(
            model, device, batches=batches, threads=threads, busy=(1.0,) * busy, rounds=rounds, memory_gib=memory_gib,
            progress=progress,
        )
    )  # fmt: skip


async def measure_model(
    model: SlimmableModel,
    device: str,
    *,
    batches: Sequence[int] = BATCHES,
    threads: int = 1,
    slowdown: float = 1.0,
    busy: Sequence[float] = (),
    only: WidthTuple | None = None,
    rounds: int = ROUNDS,
    memory_gib: float = 8.0,
    progress: Progress | None = None,
) -> Profile:
    """`measure` for a network in memory, on a running event loop; `busy` are the other servers' slowdowns.

    A server with a `slowdown` of its own is measured with its pauses, in which caches go cold, but without their time.
    `only` measures no more than the pieces that this width tuple runs.
    """
    shape = shape_of(model)
    limit = int(memory_gib * 2**30)
    pieces = list(_pieces(shape) if only is None else _pieces_of(only))
    points = [Point(*piece, batch) for piece in pieces for batch in batches]
    bench = _Bench(model, shape, device, threads, max(batches), limit, slowdown)
    total = len(points) * rounds * (2 if busy else 1)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    bench.start()
    try:
        loads = await bench.load_all()
        for point in points:  # warm-up: every kernel chosen, every variant built
            await bench.run(point)
        alone = await _rounds(bench, points, rounds, step)
        power, power_source = await _power(bench, device, points[-1], threads)
        crowding = Curve((0.0, 1.0), (1.0, 1.0))
        if busy:
            others = [_Bench(model, shape, device, threads, max(batches), limit, slow) for slow in busy]
            crowded = await _crowded(bench, others, points, rounds, step)
            factor = float(np.median([np.median(crowded[p]) / np.median(alone[p]) for p in points]))
            crowding = Curve((0.0, 1.0), (1.0, max(1.0, factor)))
        fixed, rate = _load_line(shape, loads)
        return Profile(
            device=device_name(device),
            model=shape.name,
            source="measured",
            batches=tuple(batches),
            latency_rows=tuple(_latency_rows(pieces, batches, alone)),
            load_s=fixed,
            load_bytes_per_s=rate,
            memory_bytes=_memory(device),
            power=power,
            power_source=power_source,
            slowdown=crowding,
            notes=_notes(device, threads, len(busy), rounds),
            versions=versions(device),
        )
    finally:
        await bench.stop()


class _Bench:
    """One executor with every instance loaded, and jobs awaited one at a time."""

    def __init__(
        self,
        model: SlimmableModel,
        shape: ModelShape,
        device: str,
        threads: int,
        max_batch: int,
        limit: Bytes,
        slowdown: float = 1.0,
    ) -> None:
        self.device: Device = open_device(
            device, model, shape, threads=threads, max_batch=max_batch, memory_limit=limit
        )
        self._model = model
        self._shape = shape
        self._executor = Executor("measured", self.device, 1, slowdown, self._finished)
        self._done: asyncio.Future[Job] | None = None
        self._inputs: dict[tuple[int, Width | None], torch.Tensor] = {}
        self._max_batch = max_batch
        self._slowdown = slowdown

    def start(self) -> None:
        self._executor.start()

    async def stop(self) -> None:
        await self._executor.stop()

    async def load_all(self) -> dict[tuple[int, Width], Seconds]:
        """Loads every (segment, width) several times and keeps the last; the median seconds of a warm load."""
        seconds = {}
        for segment in range(self._shape.segments):
            for i, width in enumerate(self._shape.widths):
                instance = segment * len(self._shape.widths) + i
                command = LoadInstance(instance, segment, width, 0)
                times = []
                for attempt in range(LOADS + 1):
                    job = await self._do(LoadJob(command))
                    assert isinstance(job, LoadJob)
                    times.append(job.seconds)
                    if attempt < LOADS:
                        await self._do(UnloadJob(instance))
                seconds[segment, width] = float(np.median(times[1:]))  # the first one also warmed up
        return seconds

    async def run(self, point: Point) -> Seconds:
        """Seconds of one batch from submission to completion, without the pause of a slow server."""
        segment, previous, width, size = point
        instance = segment * len(self._shape.widths) + self._shape.index(width)
        tasks = [Task(i, i, segment, previous, None, 0.0, None, 0) for i in range(size)]
        batch = Batch(0, instance, segment, width, width, previous, tuple(tasks), 0.0)
        x = self._input(segment, previous)
        last = segment == self._shape.segments - 1
        begin = time.perf_counter()
        job = await self._do(BatchJob(batch, tasks, [(x, row) for row in range(size)], to_host=last))
        assert isinstance(job, BatchJob)
        return time.perf_counter() - begin - job.seconds * (1 - 1 / self._slowdown)

    async def _do(self, job: Job) -> Job:
        self._done = asyncio.get_running_loop().create_future()
        self._executor.submit(job)
        finished = await self._done
        if finished.error is not None:
            raise finished.error
        return finished

    def _finished(self, name: ServerName, job: Job) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(job)

    def _input(self, segment: int, previous: Width | None) -> torch.Tensor:
        """Random activations where a batch finds them: inputs on the host, the others on the device."""
        if (segment, previous) not in self._inputs:
            if previous is None:
                x = torch.randn(self._max_batch, *self._model.item_shape)
            else:
                x = torch.randn(self._max_batch, *self._model.activation_shape(segment - 1, previous))
                x = x.to(self.device.name)
            self._inputs[segment, previous] = x
        return self._inputs[segment, previous]


def _pieces(shape: ModelShape) -> Iterator[tuple[int, Width | None, Width]]:
    for segment in range(shape.segments):
        for previous in shape.widths if segment else (None,):
            for width in shape.widths:
                yield segment, previous, width


def _pieces_of(widths: WidthTuple) -> Iterator[tuple[int, Width | None, Width]]:
    for segment, width in enumerate(widths):
        yield segment, widths[segment - 1] if segment else None, width


async def _rounds(
    bench: _Bench, points: Sequence[Point], rounds: int, step: Callable[[], None]
) -> dict[Point, list[Seconds]]:
    times: dict[Point, list[Seconds]] = {point: [] for point in points}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for i in rng.permutation(len(points)).tolist():
            times[points[i]].append(await bench.run(points[i]))
            step()
    return times


async def _crowded(
    bench: _Bench, others: Sequence[_Bench], points: Sequence[Point], rounds: int, step: Callable[[], None]
) -> dict[Point, list[Seconds]]:
    """The same points while every other server works through them too, each in its own order."""

    async def churn(other: _Bench, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while True:
            await other.run(points[int(rng.integers(len(points)))])

    for other in others:
        other.start()
        await other.load_all()
    churning = [asyncio.create_task(churn(other, seed)) for seed, other in enumerate(others)]
    try:
        return await _rounds(bench, points, rounds, step)
    finally:
        for task in churning:
            task.cancel()
        await asyncio.gather(*churning, return_exceptions=True)
        for other in others:
            await other.stop()


async def _power(bench: _Bench, device: str, heavy: Point, threads: int) -> tuple[Curve, str]:
    """Watts at rest and at work, where the device has a meter; an estimate for a CPU without one."""
    probe = open_probe(device, None, alone=True)
    source = probe.sample(0.0, 0.0).energy_source
    if source == "none":
        if device.startswith("cuda"):
            return Curve((0.0, 1.0), (0.0, 0.0)), "none"
        return Curve((0.0, 1.0), (threads * CORE_WATTS_IDLE, threads * CORE_WATTS_BUSY)), "estimated"
    watts = []
    for working in (False, True):
        readings: list[Watts] = []
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < POWER_SECONDS:
            if working:
                await bench.run(heavy)
            else:
                await asyncio.sleep(0.1)
            sampled = probe.sample(begin + now, float(working)).power_w
            readings += [] if sampled is None else [sampled]
        watts.append(float(np.median(readings)) if readings else 0.0)
    return Curve((0.0, 1.0), (watts[0], max(watts))), source


def _latency_rows(
    pieces: Sequence[tuple[int, Width | None, Width]], batches: Sequence[int], times: dict[Point, list[Seconds]]
) -> Iterator[Latency]:
    for segment, previous, width in pieces:
        measured = [times[Point(segment, previous, width, batch)] for batch in batches]
        yield Latency(
            segment,
            previous,
            width,
            tuple(float(np.median(runs)) for runs in measured),
            tuple(float(np.subtract(*np.percentile(runs, (75, 25)))) for runs in measured),
        )


def _load_line(shape: ModelShape, loads: dict[tuple[int, Width], Seconds]) -> tuple[Seconds, float]:
    """Fixed seconds and bytes per second of a load: the median slope over all pairs of instances (Theil-Sen)."""
    sizes = np.array([shape.weight_bytes[segment][shape.index(width)] for segment, width in loads], float)
    seconds = np.array(list(loads.values()))
    one, other = np.triu_indices(len(sizes), 1)
    apart = sizes[one] != sizes[other]
    slopes = (seconds[one] - seconds[other])[apart] / (sizes[one] - sizes[other])[apart]
    per_byte = max(float(np.median(slopes)), SLOWEST_FREE_BYTE) if len(slopes) else SLOWEST_FREE_BYTE
    return max(float(np.median(seconds - per_byte * sizes)), 0.0), 1 / per_byte


def _memory(device: str) -> Bytes:
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    import psutil

    return int(psutil.virtual_memory().total)


def _notes(device: str, threads: int, busy: int, rounds: int) -> str:
    how = f"medians of {rounds} runs in random order, from submission to completion"
    where = "" if device.startswith("cuda") else f", {threads} thread{'s' if threads > 1 else ''} per server"
    crowd = f"; slowdown measured with {busy} other servers of the process computing" if busy else ""
    return how + where + crowd
