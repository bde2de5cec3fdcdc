"""When requests arrive and which samples they carry: Poisson, steps, bursty, diurnal, or a trace file.

The same arrivals drive the simulator and a live run, and every router of a comparison: they depend on the workload's
configuration and the seed alone. Nothing here sends a request.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from slim_scheduler.core.errors import ConfigError, TraceError
from slim_scheduler.core.types import Seconds
from slim_scheduler.setup.config import WorkloadConfig
from slim_scheduler.setup.machines import run_rng

DAY_SWING = 0.5  # of a diurnal load, as a share of its mean
MOST_ARRIVALS = 20_000_000  # of a trace: 0.6 GB while it is read
LONGEST_TRACE: Seconds = 366 * 86_400.0  # beyond it, times are milliseconds or finer

Times = NDArray[np.float64]  # (requests,) or (points,), ascending, seconds from the start of the run


class Arrivals(NamedTuple):
    """Who comes when. Items are numbered from 0 in order of arrival; request i carries items
    `first_item[i] .. first_item[i] + sizes[i] - 1`, and item j shows the data set's sample `samples[j]`.
    """

    times: Times  # (requests,)
    first_item: NDArray[np.int64]  # (requests,)
    sizes: NDArray[np.int64]  # (requests,)
    samples: NDArray[np.int64]  # (items,)

    @property
    def items(self) -> int:
        return len(self.samples)


def generate(workload: WorkloadConfig, seed: int, n_samples: int) -> Arrivals:
    """Arrivals in [0, duration) on samples 0..n_samples-1, the same for the same workload and seed.

    Every sample is shown once before any is shown twice. Raises TraceError and ConfigError.
    """
    if n_samples < 1:
        raise ConfigError(f"the data set has {n_samples} samples; a workload needs at least 1")
    if workload.rate_unit != "items/s":
        raise ConfigError(
            f"workload.rate is {workload.rate:g} in units of what the {workload.rate_unit} width carries; "
            "`setup.machines.in_items_per_second` turns it into items per second"
        )
    points, order = run_rng(seed, "workload").spawn(2)
    times = _KINDS[workload.kind](workload, points)
    times = times[times < workload.duration_s]
    sizes = np.full(len(times), workload.items_per_request, np.int64)
    first_item = np.arange(len(times), dtype=np.int64) * workload.items_per_request
    return Arrivals(times, first_item, sizes, _samples(int(sizes.sum()), n_samples, order))


def _samples(items: int, n_samples: int, rng: Generator) -> NDArray[np.int64]:
    passes = [rng.permutation(n_samples) for _ in range(math.ceil(items / n_samples))]
    return np.concatenate([np.zeros(0, np.int64), *passes])[:items]


def _poisson(workload: WorkloadConfig, rng: Generator) -> Times:
    request_rate = workload.rate / workload.items_per_request
    return _unit_points(request_rate * workload.duration_s, rng) / request_rate


def _steps(workload: WorkloadConfig, rng: Generator) -> Times:
    """Poisson at a rate that changes step by step: unit-rate points through the inverse of the integrated rate."""
    request_rate = workload.rate / workload.items_per_request
    knots, integrated = [0.0], [0.0]
    for i, (seconds, factor) in enumerate(workload.steps):
        last = i == len(workload.steps) - 1
        stay = max(seconds, workload.duration_s - knots[-1]) if last else seconds
        knots.append(knots[-1] + stay)
        integrated.append(integrated[-1] + stay * factor * request_rate)
    return np.interp(_unit_points(integrated[-1], rng), integrated, knots)


def _bursty(workload: WorkloadConfig, rng: Generator) -> Times:
    """Two-state Markov-modulated Poisson process: unit-rate points through the inverse of the integrated rate."""
    if workload.burst_s >= workload.burst_every_s:
        raise ConfigError(
            f"workload.burst_s is {workload.burst_s:g}; it must be below burst_every_s ({workload.burst_every_s:g})"
        )
    share = workload.burst_s / workload.burst_every_s
    request_rate = workload.rate / workload.items_per_request
    calm_rate = request_rate / (1 - share + share * workload.burst_factor)
    # Starting in the stationary state keeps the mean rate right from the first second on.
    in_burst = bool(rng.random() < share)
    knots, integrated = [0.0], [0.0]
    while knots[-1] < workload.duration_s:
        stay = rng.exponential(workload.burst_s if in_burst else workload.burst_every_s - workload.burst_s)
        knots.append(knots[-1] + stay)
        integrated.append(integrated[-1] + stay * calm_rate * (workload.burst_factor if in_burst else 1.0))
        in_burst = not in_burst
    return np.interp(_unit_points(integrated[-1], rng), integrated, knots)


def _diurnal(workload: WorkloadConfig, rng: Generator) -> Times:
    """A day over the run, as a sine by thinning: most a quarter in, least three quarters in."""
    peak_rate = workload.rate / workload.items_per_request * (1 + DAY_SWING)
    candidates = _unit_points(peak_rate * workload.duration_s, rng) / peak_rate
    level = 1 + DAY_SWING * np.sin(2 * math.pi * candidates / workload.duration_s)
    return candidates[rng.random(len(candidates)) * (1 + DAY_SWING) < level]


def _unit_points(until: float, rng: Generator) -> Times:
    """Points of a Poisson process of rate 1 in [0, until)."""
    chunks: list[Times] = []
    last = 0.0
    while last < until:
        size = int(until - last + 4 * math.sqrt(until - last)) + 16
        chunks.append(last + np.cumsum(rng.exponential(size=size)))
        last = float(chunks[-1][-1])
    points = np.concatenate([np.zeros(0), *chunks])
    return points[points < until]


def _trace(workload: WorkloadConfig, rng: Generator) -> Times:
    """As recorded, from second 0 on; at the rate, from the first arrival on."""
    path = Path(workload.trace or "")
    times = read_trace(path)
    first, span = times[0], times[-1] - times[0]
    if not workload.trace_at_rate:
        if first >= workload.duration_s:
            raise TraceError(
                f"trace {path} begins at {first:.10g} s, the run ends at workload.duration_s = "
                f"{workload.duration_s:g}; let arrival_s begin near 0, or set workload.trace_at_rate"
            )
        return times
    if not span:
        raise TraceError(f"trace {path} has all its arrivals at {first:.10g}; no speed makes them workload.rate")
    at_rate: Times = (times - first) * (len(times) * workload.items_per_request / workload.rate / span)
    return at_rate


_KINDS: dict[str, Callable[[WorkloadConfig, Generator], Times]] = {
    "poisson": _poisson,
    "steps": _steps,
    "bursty": _bursty,
    "diurnal": _diurnal,
    "trace": _trace,
}


def read_trace(path: Path) -> Times:
    """The column `arrival_s` of a CSV, gzipped CSV (.gz) or Parquet file, one row per request, ascending from 0 on.

    Raises TraceError naming the file, the row and what is wrong with it.
    """
    if not path.is_file():
        raise TraceError(f"trace {path} does not exist or is not a file; give a CSV or Parquet file")
    rows = _parquet_rows(path) if path.suffix in (".parquet", ".pq") else _csv_rows(path)
    times = list(islice(_checked(path, rows), MOST_ARRIVALS + 1))
    if len(times) > MOST_ARRIVALS:
        raise TraceError(f"trace {path} has more than {MOST_ARRIVALS:,} rows; cut it")
    if not times:
        raise TraceError(f"trace {path} has no rows; it needs at least one arrival_s")
    return np.array(times)


def _csv_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with _text(path) as file:
            table = csv.DictReader(file)
            _require_column(path, table.fieldnames or [])
            for row in table:
                yield f"line {table.line_num}", row["arrival_s"]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"trace {path} is not readable as CSV: {error}") from None


def _text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return path.open(newline="", encoding="utf-8-sig")


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_column(path, file.schema_arrow.names)
            values = file.read(columns=["arrival_s"]).column("arrival_s").to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise TraceError(f"trace {path} is not readable as Parquet: {str(error).splitlines()[0]}") from None
    for row, value in enumerate(values):
        yield f"row {row}", value


def _require_column(path: Path, columns: Iterable[str]) -> None:
    if "arrival_s" not in columns:
        found = ", ".join(columns) or "none"
        raise TraceError(f"trace {path} has no column arrival_s (columns: {found}); name the arrival times so")


def _checked(path: Path, rows: Iterable[tuple[str, Any]]) -> Iterator[Seconds]:
    last, first = 0.0, None
    for where, value in rows:
        try:
            time = float(value)
        except (TypeError, ValueError):
            raise TraceError(f"trace {path} {where}: arrival_s is {value!r}; it must be a number") from None
        if not math.isfinite(time):
            raise TraceError(f"trace {path} {where}: arrival_s is {time}; it must be finite")
        if time < 0:
            raise TraceError(f"trace {path} {where}: arrival_s is {time:g}; it must be 0 or more")
        if time < last:
            raise TraceError(f"trace {path} {where}: arrival_s is {time:g} after {last:g}; sort the file by arrival_s")
        first = time if first is None else first
        if time - first > LONGEST_TRACE:
            raise TraceError(
                f"trace {path} {where}: arrival_s is {time:.10g}, more than a year after the first; give seconds"
            )
        last = time
        yield time
