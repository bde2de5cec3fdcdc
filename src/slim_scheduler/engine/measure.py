"""Measures a device's profile: latency, load time, memory and power of every piece of one network.

Latency is taken through the engine's own executor, from submission to completion as the event loop sees it, so the
host's overhead is inside, and under the conditions of serving (`measuring_bench.py`): a batch between batches of other
sizes, or with the host's overhead slowed down too, came out up to 40 % wrong. Medians, means and both spreads are kept.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from slim_scheduler.core.errors import ConfigError, OutOfMemoryError
from slim_scheduler.core.profile import Curve, Latency, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, Watts, Width, WidthTuple
from slim_scheduler.engine.devices.cuda import gpu_index, gpu_memory
from slim_scheduler.engine.hardware import device_name, versions
from slim_scheduler.engine.measuring_bench import VISITS, Bench, Crowd, Piece, Point, Times
from slim_scheduler.engine.probe import Probe, open_probe
from slim_scheduler.model.folder import load_model
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.shape import shape_of

Progress = Callable[[int, int], None]  # points done, points in all

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 5
LOADS = 5
MEMORY_GIB = 8.0  # at most, for all instances and a batch; less where the device has less
SLOWEST_FREE_BYTE: Seconds = 1e-11  # 100 GB/s: where bytes do not show in the load time, they cost this
POWER_SECONDS = 2.0
# Without a meter: board power of an AMD EPYC 9004 over its cores (360 W / 96), a third of it idle. An estimate.
CORE_WATTS_BUSY: Watts = 3.75
CORE_WATTS_IDLE: Watts = 1.25


def measure(
    model_dir: str | Path,
    device: str,
    *,
    batches: Sequence[int] = BATCHES,
    threads: int = 1,
    slowdowns: Sequence[float] = (1.0,),
    rounds: int = ROUNDS,
    memory_gib: float = MEMORY_GIB,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Profile:
    """The profile of `device`, as a configuration names it, for the network in `model_dir`.

    One server per entry of `slowdowns`, all of this process and all computing: as many as there will be. Batch sizes
    that `memory_gib`, or the device's memory, does not suffice for are left out. Raises InputError.
    """
    model = load_model(model_dir)
    return asyncio.run(
        measure_model(
            model, device, batches=batches, threads=threads, slowdowns=slowdowns, rounds=rounds,
            memory_gib=memory_gib, precision=precision, progress=progress,
        )
    )  # fmt: skip


async def measure_model(
    model: SlimmableModel,
    device: str,
    *,
    batches: Sequence[int] = BATCHES,
    threads: int = 1,
    slowdowns: Sequence[float] = (1.0,),
    only: WidthTuple | None = None,
    rounds: int = ROUNDS,
    memory_gib: float = MEMORY_GIB,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Profile:
    """`measure` for a network in memory, on a running event loop, with one server per entry of `slowdowns`."""
    done = total = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    try:
        measurement = Measurement(
            model,
            device,
            batches=batches,
            threads=threads,
            slowdowns=slowdowns,
            only=only,
            memory_gib=memory_gib,
            precision=precision,
        )
        async with measurement:
            total = measurement.points * rounds * VISITS
            return await measurement.profile(await measurement.rounds(rounds, step))
    except OutOfMemoryError as error:
        budget = memory_budget(device, memory_gib)
        raise ConfigError(
            f"{model.name} cannot be measured in a budget of {budget} bytes, which has to hold all instances and a "
            f"batch ({error}); {_more_memory(budget, memory_gib)}"
        ) from None


class Measurement:
    """Servers held ready to be timed as often as one likes; a profile from the times of any of the rounds.

    `slowdowns`: one server each, all of them active; times are by what a server without slowdown would take. `only`
    measures no more than the pieces that this width tuple runs. Raises OutOfMemoryError where not even the smallest
    batches fit into memory.
    """

    def __init__(
        self,
        model: SlimmableModel,
        device: str,
        *,
        batches: Sequence[int] = BATCHES,
        threads: int = 1,
        slowdowns: Sequence[float] = (1.0,),
        only: WidthTuple | None = None,
        memory_gib: float = MEMORY_GIB,
        precision: str = "fp32",
    ) -> None:
        self._device = device
        self._precision = precision
        self._shape = shape_of(model)
        self._asked = self._batches = tuple(batches)
        self._threads = threads
        self._pieces = list(_pieces(self._shape) if only is None else _pieces_of(only))
        limit = memory_budget(device, memory_gib)
        self._benches = [
            Bench(model, self._shape, device, threads, max(batches), limit, slowdown, precision)
            for slowdown in slowdowns
        ]
        self._crowd = Crowd(self._benches, self._pieces, self._batches)
        self._loads: dict[tuple[int, Width], Seconds] = {}
        self._power: tuple[Curve, str] | None = None

    @property
    def points(self) -> int:
        """How many are timed in a round, once it has begun to hold servers ready."""
        return len(self._pieces) * len(self._batches)

    async def __aenter__(self) -> "Measurement":
        try:
            first, *others = self._benches
            self._loads = await first.start(LOADS)
            for other in others:
                await other.start(0)
            self._batches = await self._crowd.warm_up()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        for bench in self._benches:
            await bench.stop()

    async def rounds(self, count: int, step: Callable[[], None] = lambda: None) -> Times:
        """Times of every point, `VISITS` or more per round; `step` is called after each of the first server's."""
        return await self._crowd.rounds(count, step)

    async def profile(self, times: Times) -> Profile:
        """What the times come to."""
        if self._power is None:
            heavy = Point(self._pieces[-1], self._batches[-1])
            self._power = await _power(self._benches[0], self._device, heavy, self._threads)
        power, power_source = self._power
        fixed, rate = _load_line(self._shape, self._loads)
        runs = min(len(of_point) for of_point in times.values())
        left_out = [batch for batch in self._asked if batch not in self._batches]
        return Profile(
            device=device_name(self._device),
            model=self._shape.name,
            source="measured",
            batches=self._batches,
            latency_rows=tuple(_latency_row(piece, self._batches, times) for piece in self._pieces),
            load_s=fixed,
            load_bytes_per_s=rate,
            memory_bytes=_memory(self._device),
            power=power,
            power_source=power_source,
            notes=_notes(self._device, self._precision, self._threads, len(self._benches) - 1, runs, left_out),
            versions=versions(self._device),
        )


def memory_budget(device: str, memory_gib: float) -> Bytes:
    """`memory_gib`, or what the device has in all where that is less. A GPU that is not there is for who opens it."""
    asked = int(memory_gib * 2**30)
    there = gpu_memory(gpu_index(device)) if device.startswith("cuda") else _memory(device)
    return asked if there is None else min(asked, there)


def _pieces(shape: ModelShape) -> Iterator[Piece]:
    for segment in range(shape.segments):
        for previous in shape.widths if segment else (None,):
            for width in shape.widths:
                yield Piece(segment, previous, width)


def _pieces_of(widths: WidthTuple) -> Iterator[Piece]:
    for segment, width in enumerate(widths):
        yield Piece(segment, widths[segment - 1] if segment else None, width)


def _latency_row(piece: Piece, batches: Sequence[int], times: Times) -> Latency:
    measured = [times[Point(piece, batch)] for batch in batches]
    return Latency(
        *piece,
        seconds=tuple(float(np.median(runs)) for runs in measured),
        spread=tuple(float(np.subtract(*np.percentile(runs, (75, 25)))) for runs in measured),
        mean=tuple(float(np.mean(runs)) for runs in measured),
        deviation=tuple(float(np.std(runs)) for runs in measured),
    )


async def _power(bench: Bench, device: str, heavy: Point, threads: int) -> tuple[Curve, str]:
    """Watts at rest and at work, where the device has a meter; an estimate for a CPU without one."""
    probe = open_probe(device, None, servers=1)
    source = probe.sample(0.0, 0.0).energy_source
    if source == "none":
        if device.startswith("cuda"):
            return Curve((0.0, 1.0), (0.0, 0.0)), "none"
        return Curve((0.0, 1.0), (threads * CORE_WATTS_IDLE, threads * CORE_WATTS_BUSY)), "estimated"
    resting = await watts_while(lambda: asyncio.sleep(0.1), probe, 0.0)
    working = await watts_while(lambda: bench.run(heavy), probe, 1.0)
    return Curve((0.0, 1.0), (resting, max(resting, working))), source


async def watts_while(
    step: Callable[[], Awaitable[object]],
    probe: Probe,
    busy: float,
    seconds: Seconds = POWER_SECONDS,
    clock: Callable[[], Seconds] = time.monotonic,
) -> Watts:
    """The median reading after each step, over `seconds`; 0 where the probe has none."""
    readings: list[Watts] = []
    begin = clock()
    probe.sample(begin, busy)  # what was used before the first step is no part of it
    while clock() - begin < seconds:
        await step()
        sampled = probe.sample(clock(), busy).power_w
        readings += [] if sampled is None else [sampled]
    return float(np.median(readings)) if readings else 0.0


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


def _more_memory(budget: Bytes, memory_gib: float) -> str:
    """The next step where a budget did not suffice: the device has no more, or more was not asked for."""
    if budget < int(memory_gib * 2**30):
        return "measure it on a device with more memory"
    return f"{memory_gib:g} GiB were asked for, slim measure takes more with --memory-gib"


def _notes(device: str, precision: str, threads: int, busy: int, runs: int, left_out: Sequence[int]) -> str:
    how = f"{device} {precision}, {runs} runs of each batch or more, from submission to completion"
    where = "" if device.startswith("cuda") else f", {threads} thread{'s' if threads > 1 else ''} per server"
    crowd = f"; {busy} other servers of the process computed meanwhile" if busy else ""
    lacking = f"; no memory for batches of {', '.join(map(str, left_out))}" if left_out else ""
    return how + where + crowd + lacking
