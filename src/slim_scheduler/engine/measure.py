"""Measures a device's profile: latency, load time, memory and power of every piece of one network.

Latency is taken through the engine's own executor, from submission to completion as the event loop sees it, so the
host's overhead is inside, and under the conditions of serving (`measuring_bench.py`): a batch between batches of other
sizes, or with the host's overhead slowed down too, came out up to 40 % wrong. Medians, means and both spreads are kept.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from slim_scheduler.core.profile import Curve, Latency, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, Watts, Width, WidthTuple
from slim_scheduler.engine.hardware import device_name, versions
from slim_scheduler.engine.measuring_bench import VISITS, Bench, Crowd, Piece, Point, Times
from slim_scheduler.engine.probe import open_probe
from slim_scheduler.model.folder import load_model
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.shape import shape_of

Progress = Callable[[int, int], None]  # points done, points in all

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 5
LOADS = 5
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
    memory_gib: float = 8.0,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Profile:
    """The profile of `device`, as a configuration names it, for the network in `model_dir`.

    One server per entry of `slowdowns`, all of this process and all computing: as many as there will be.
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
    memory_gib: float = 8.0,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Profile:
    """`measure` for a network in memory, on a running event loop, with one server per entry of `slowdowns`."""
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
    total = measurement.points * rounds * VISITS
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    async with measurement:
        return await measurement.profile(await measurement.rounds(rounds, step))


class Measurement:
    """Servers held ready to be timed as often as one likes; a profile from the times of any of the rounds.

    `slowdowns`: one server each, all of them active; times are by what a server without slowdown would take. `only`
    measures no more than the pieces that this width tuple runs.
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
        memory_gib: float = 8.0,
        precision: str = "fp32",
    ) -> None:
        self._device = device
        self._precision = precision
        self._shape = shape_of(model)
        self._batches = tuple(batches)
        self._threads = threads
        self._pieces = list(_pieces(self._shape) if only is None else _pieces_of(only))
        limit = int(memory_gib * 2**30)
        self._benches = [
            Bench(model, self._shape, device, threads, max(batches), limit, slowdown, precision)
            for slowdown in slowdowns
        ]
        self._crowd = Crowd(self._benches, self._pieces, self._batches)
        self._loads: dict[tuple[int, Width], Seconds] = {}
        self._power: tuple[Curve, str] | None = None

    @property
    def points(self) -> int:
        return len(self._pieces) * len(self._batches)

    async def __aenter__(self) -> "Measurement":
        try:
            first, *others = self._benches
            self._loads = await first.start(LOADS)
            for other in others:
                await other.start(0)
            await self._crowd.warm_up()
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
            notes=_notes(self._device, self._precision, self._threads, len(self._benches) - 1, runs),
            versions=versions(self._device),
        )


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


def _notes(device: str, precision: str, threads: int, busy: int, runs: int) -> str:
    how = f"{device} {precision}, {runs} runs of each batch or more, from submission to completion"
    where = "" if device.startswith("cuda") else f", {threads} thread{'s' if threads > 1 else ''} per server"
    crowd = f"; {busy} other servers of the process computed meanwhile" if busy else ""
    return how + where + crowd
