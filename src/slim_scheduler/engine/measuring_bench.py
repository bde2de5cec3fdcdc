"""Servers that compute side by side, and how long their batches take: what a profile is measured from.

They are the engine's own executors, without scheduler and dispatcher. Batches find what they would find in serving:
the caches full of other segments at like batch sizes, inputs gathered from several earlier batches, the host's thread
in between, and the other servers at work.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from slim_scheduler.core.errors import OutOfMemoryError
from slim_scheduler.core.messages import LoadInstance
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Batch, Bytes, Seconds, ServerName, Task, Width
from slim_scheduler.engine.devices.base import Device, Rows
from slim_scheduler.engine.devices.cpu import cpu_memory_errors
from slim_scheduler.engine.devices.cuda import cuda_memory_errors
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.engine.executor import BatchJob, Executor, Job, LoadJob, UnloadJob, slowed_work
from slim_scheduler.model.protocol import SlimmableModel

VISITS = 4  # runs of every piece at one batch size before the next size
MOST_WAITED = 4.0  # slowdowns beyond this are reckoned, not waited for
TOGETHER = 3  # items of a batch that come from the same earlier batch, as seen in serving


class Piece(NamedTuple):
    segment: int
    previous_width: Width | None
    width: Width


class Point(NamedTuple):
    """One piece of the network at one batch size."""

    piece: Piece
    batch: int


Times = dict[Point, list[Seconds]]


class Bench:
    """One executor with every instance loaded, and jobs awaited one at a time."""

    def __init__(
        self,
        model: SlimmableModel,
        shape: ModelShape,
        device: str,
        threads: int,
        max_batch: int,
        limit: Bytes,
        slowdown: float,
        precision: str = "fp32",
    ) -> None:
        self.device: Device = open_device(
            device,
            model,
            shape,
            threads=threads,
            max_batch=max_batch,
            memory_limit=limit,
            precision=precision,
        )
        self._model = model
        self._shape = shape
        self._waited = min(slowdown, MOST_WAITED)
        self._executor = Executor("measured", self.device, 1, self._waited, self._finished)
        self._done: asyncio.Future[Job] | None = None
        self._inputs: dict[tuple[int, Width | None], list[tuple[torch.Tensor, int]]] = {}
        self._slowdown = slowdown

    async def start(self, loads: int) -> dict[tuple[int, Width], Seconds]:
        """Loads every (segment, width), `loads` times after a first; the median seconds of a warm load."""
        self._executor.start()
        seconds = {}
        for segment in range(self._shape.segments):
            for i, width in enumerate(self._shape.widths):
                instance = segment * len(self._shape.widths) + i
                command = LoadInstance(instance, segment, width, 0)
                times = []
                for attempt in range(loads + 1):
                    job = await self._do(LoadJob(command))
                    assert isinstance(job, LoadJob)
                    times.append(job.seconds)
                    if attempt < loads:
                        await self._do(UnloadJob(instance))
                seconds[segment, width] = float(np.median(times[1:] or times))  # the first one also warmed up
        return seconds

    async def stop(self) -> None:
        await self._executor.stop()

    async def run(self, point: Point) -> Seconds:
        """Seconds of one batch from submission to completion, by what a server without slowdown would take.

        What the host adds is not slowed down, and counts for so much less on a slow server. A very slow one does not
        wait all its time here: the rest of it follows from the batch's work.
        """
        (segment, previous, width), size = point
        instance = segment * len(self._shape.widths) + self._shape.index(width)
        tasks = [Task(i, i, segment, previous, None, 0.0, None, 0) for i in range(size)]
        batch = Batch(0, instance, segment, width, width, previous, tuple(tasks), 0.0)
        rows = self._rows(segment, previous, size)
        job = BatchJob(batch, tasks, rows, to_host=segment == self._shape.segments - 1)
        begin = time.perf_counter()
        await self._do(job)
        waited = time.perf_counter() - begin
        return (waited + (self._slowdown - self._waited) * slowed_work(job, self.device)) / self._slowdown

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

    def _rows(self, segment: int, previous: Width | None, size: int) -> Rows:
        """Random activations where a batch finds them: inputs on the host, the others on the device."""
        rows = self._inputs.setdefault((segment, previous), [])
        item = self._model.item_shape if previous is None else self._model.activation_shape(segment - 1, previous)
        where = self.device.name if previous is not None and self.device.name.startswith("cuda") else "cpu"
        while len(rows) < size:
            with cpu_memory_errors(), cuda_memory_errors(self.device.name):
                part = torch.randn(TOGETHER, *item).to(where)
            rows.extend((part, row) for row in range(TOGETHER))
        return rows[:size]


class Crowd:
    """Servers that all compute whenever one of them is timed; everyone's times count.

    Batch sizes take turns, a few visits to every piece at each, in random order: under a given load a server's batches
    are of like size. Short turns let a disturbance hit many points a little rather than one point much.
    """

    def __init__(self, benches: Sequence[Bench], pieces: Sequence[Piece], batches: Sequence[int]) -> None:
        self._benches = benches
        self._pieces = pieces
        self._batches = tuple(batches)
        self._rng = np.random.default_rng(0)
        self._size = 0
        self._busy = False
        self._times: Times = {}

    async def warm_up(self) -> tuple[int, ...]:
        """Every kernel chosen, every variant built; the batch sizes that memory suffices for, the others are left out.

        Raises OutOfMemoryError where not even the smallest fits.
        """
        for bench in self._benches:
            ascending = sorted(self._batches)
            await self._run_all(bench, ascending[0])
            fits = 0  # the largest so far: every variant is there now
            try:
                for size in ascending:
                    await self._run_all(bench, size)
                    fits = size
            except OutOfMemoryError:
                if not fits:
                    raise
            self._batches = tuple(size for size in self._batches if size <= fits)
        return self._batches

    async def _run_all(self, bench: Bench, size: int) -> None:
        for piece in self._pieces:
            await bench.run(Point(piece, size))

    async def rounds(self, count: int, step: Callable[[], None] = lambda: None) -> Times:
        """Times of every point, `VISITS` or more in each round; `step` is called after each of the first server's."""
        self._times = {Point(piece, size): [] for piece in self._pieces for size in self._batches}
        first, *others = self._benches
        self._size = self._batches[0]
        self._busy = True
        churning = [asyncio.create_task(self._churn(other)) for other in others]
        try:
            for _ in range(count):
                for size in self._rng.permutation(self._batches).tolist():
                    self._size = size
                    for _ in range(VISITS):
                        for i in self._rng.permutation(len(self._pieces)).tolist():
                            await self._time(first, Point(self._pieces[i], size))
                            step()
        finally:
            self._busy = False
            await asyncio.gather(*churning)
        return self._times

    async def _churn(self, bench: Bench) -> None:
        while self._busy:
            for i in self._rng.permutation(len(self._pieces)).tolist():
                if self._busy:
                    await self._time(bench, Point(self._pieces[i], self._size))

    async def _time(self, bench: Bench, point: Point) -> None:
        self._times[point].append(await bench.run(point))
