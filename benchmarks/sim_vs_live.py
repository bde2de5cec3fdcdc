"""The simulator against reality: the same arrivals, routers and seeds, live and simulated, in one run.

Section 5 of the experiments: three unequal live servers on this machine, their profile measured by `slim measure`'s own
code with all of them active; saturated runs, and 0.3, 0.6 and 0.85 of their throughput, without batch windows and with
automatic ones. `ratio` is simulated over live, so 1 is perfect.

What makes the comparison well-posed, and why:
- The servers wait for most of their time (`slowdown`), together half a core's work: simulated servers are independent
  devices, so the two cores must not be the limit.
- Widths are fixed per segment: with random ones, two equal runs differ by which instances they happen to load. They are
  wide ones, so that a batch of one item takes milliseconds: what the host adds to it, some tenths, is not simulated.
- A machine's speed drifts, by 10 % within half a minute on a shared host, and queues multiply that. So live runs are
  short and many, and each is simulated with the profile that was measured right before and right after it.
- A live run whose generator lagged (p99 above 5 ms), or whose two profiles differ by more than 5 % (the machine was not
  the same throughout), is invalid and is run again, at most `TRIES` times.
Nothing of a live run enters its simulation but its arrivals.
"""

import asyncio
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from scipy.stats import t as student

from slim_scheduler.core.profile import Profile
from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.bench import bench
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.engine.measure import Measurement
from slim_scheduler.engine.measuring_bench import Times
from slim_scheduler.model import checkpoint
from slim_scheduler.model.cifar import RECORD_BYTES
from slim_scheduler.model.presets import preset_named
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.record.recorder import Recorder, RunInfo
from slim_scheduler.run.summary import summarize
from slim_scheduler.setup.config import Config, config_from
from slim_scheduler.setup.profiles import write_profile
from slim_scheduler.setup.workload import Arrivals, generate
from slim_scheduler.sim.host import simulate

PRESET = "cifar100-lean"  # weights and images are random, which costs the same
SLOWDOWNS = (4.0, 6.0, 8.0)
WIDTHS = (0.75, 0.75, 0.75, 0.75)
ROUTER = "jsq:" + "/".join(f"{width:g}" for width in WIDTHS)
MAX_BATCH = 8
BATCHES = (1, 2, 4, 8)
ROUNDS = 1  # of the profile, between two live runs: about 2 s
LOADS = (0.3, 0.6, 0.85)
SEEDS = range(1, 9)
FLOODS = range(1, 5)
DURATION_S = 6.0
WARMUP_S = 1.0
WINDOWS: dict[str, float | Literal["auto"]] = {"sim_vs_live": 0.0, "sim_vs_live_windows": "auto"}
BEYOND = 1.5  # saturated: so many times what the simulator, asked first, thinks the servers carry
FLOOD_RATE = 2000.0
FLOOD_WAITING = 128  # a bounded queue: in a growing one items would only ever begin
IMAGES = 200
LAG_LIMIT_S = 0.005
DRIFT_LIMIT = 0.05
TRIES = 4
TOLERANCE = {0.3: 0.15, 0.6: 0.15, 0.85: 0.25}
THROUGHPUT_TOLERANCE = 0.10


class Pair(NamedTuple):
    """One live run and its simulation."""

    live: dict[str, Any]
    simulated: dict[str, Any]


def run() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        folder = Path(name)
        config, model = _prepare(folder)
        measurement = Measurement(
            model,
            "cpu",
            batches=BATCHES,
            slowdowns=SLOWDOWNS,
            only=WIDTHS,
            memory_gib=config.servers[0].vram_budget_gib,
        )
        runner.run(measurement.__aenter__())
        try:
            rows = {}
            for named, window in WINDOWS.items():
                rows |= _compare(_Comparison(_windowed(config, window), folder, runner, measurement), named)
            return rows
        finally:
            runner.run(measurement.stop())


def _windowed(config: Config, window: float | Literal["auto"]) -> Config:
    servers = tuple(msgspec.structs.replace(server, batch_window_ms=window) for server in config.servers)
    return msgspec.structs.replace(config, servers=servers)


def _compare(comparison: "_Comparison", named: str) -> dict[str, dict[str, Any]]:
    floods = [comparison.pair("saturated", comparison.beyond(), seed, "cut") for seed in FLOODS]
    capacity = float(np.mean([pair.live["throughput_items_s"] for pair in floods]))
    results = {f"{named}_throughput": _row(floods, lambda of: of["throughput_items_s"], "items/s", 0.0)}
    pairs: dict[float, list[Pair]] = {load: [] for load in LOADS}
    for seed in SEEDS:
        for load in LOADS:
            pairs[load].append(comparison.pair(f"{load:g} of {capacity:.0f}", load * capacity, seed, "drain"))
    for load in LOADS:
        for name in ("mean", "p95"):
            row = _row(pairs[load], lambda of, name=name: 1e3 * of["latency_s"][name], "ms", load)
            results[f"{named}_latency_{name}_at_{load:g}"] = row
    return results


class _Comparison:
    """Live runs one after the other, the profile measured anew between each two."""

    def __init__(self, config: Config, folder: Path, runner: asyncio.Runner, measurement: Measurement) -> None:
        self._config = config
        self._path = folder / "cpu.json"
        self._runner = runner
        self._measurement = measurement
        self._before = self._measure()
        self._write(self._before)

    def beyond(self) -> float:
        """A rate that saturates the servers."""
        config = _loaded(self._config, FLOOD_RATE, "cut")
        arrivals = generate(config.workload, 0, IMAGES)
        return BEYOND * float(_simulated(config, 0, arrivals)["throughput_items_s"])

    def pair(self, what: str, rate: float, seed: int, end: str) -> Pair:
        config = _loaded(self._config, rate, end)
        for _ in range(TRIES):
            run = bench(config, ROUTER, seed)
            live = summarize(run.recorder.record(run.info), config)
            before, self._before = self._before, self._measure()
            lag, drift = live["generator_lag_s"]["p99"], _drift(before, self._before)
            if lag <= LAG_LIMIT_S and abs(drift) <= DRIFT_LIMIT:
                break
            _say(f"{what}, seed {seed}: invalid, generator lag p99 {1e3 * lag:.1f} ms, machine slower by {drift:.1%}")
        self._write({point: before[point] + self._before[point] for point in before})
        pair = Pair(live, _simulated(config, seed, run.arrivals))
        _say(f"{what}, seed {seed}: live {_brief(live)}; simulated {_brief(pair.simulated)}")
        return pair

    def _measure(self) -> Times:
        return self._runner.run(self._measurement.rounds(ROUNDS))

    def _write(self, times: Times) -> None:
        profile: Profile = self._runner.run(self._measurement.profile(times))
        write_profile(profile, self._path)


def _prepare(folder: Path) -> tuple[Config, SlimResNet]:
    """A checkpoint and images in a folder, and the cluster that uses them."""
    torch.manual_seed(0)
    model = SlimResNet(preset_named(PRESET).architecture, PRESET).eval().requires_grad_(False)
    checkpoint.save(model, folder / PRESET)
    records = np.random.default_rng(0).integers(0, 100, (IMAGES, RECORD_BYTES), dtype=np.uint8)
    for part in ("train.bin", "test.bin"):
        (folder / part).write_bytes(records.tobytes())
    servers = [
        {
            "name": name,
            "device": "cpu",
            "slowdown": slowdown,
            "max_batch": MAX_BATCH,
            "profile": str(folder / "cpu.json"),
        }
        for name, slowdown in zip("abc", SLOWDOWNS, strict=True)
    ]
    tree = {
        "model": {"path": str(folder / PRESET)},
        "servers": servers,
        "router": {"name": ROUTER, "fallback": "jsq:0.5"},
        "workload": {"data": str(folder), "duration_s": DURATION_S, "warmup_s": WARMUP_S},
        "record": {"level": "blocks"},
    }
    return live_config(config_from(tree)), model


def _loaded(config: Config, rate: float, end: str) -> Config:
    workload = msgspec.structs.replace(config.workload, rate=rate, end=end)
    dispatch = msgspec.structs.replace(config.dispatch, max_waiting_items=FLOOD_WAITING if end == "cut" else 100_000)
    return msgspec.structs.replace(config, workload=workload, dispatch=dispatch)


def _drift(before: Times, after: Times) -> float:
    """By how much batches took longer afterwards: the geometric mean over the points, of medians."""
    return float(np.exp(np.mean([np.log(np.median(after[point]) / np.median(before[point])) for point in before]))) - 1


def _simulated(config: Config, seed: int, arrivals: Arrivals) -> dict[str, Any]:
    recorder = Recorder(config.record.level, lambda item, widths: None)
    result = simulate(config, ROUTER, seed, recorder=recorder, arrivals=arrivals)
    info = RunInfo(mode="simulated", router=ROUTER, seed=seed, ended_at=result.ended_s)
    return summarize(recorder.record(info), config)


def _row(pairs: list[Pair], measure: Any, unit: str, load: float) -> dict[str, Any]:
    """Means over the runs. At the highest load the live runs' own 95 % interval may be wider than the tolerance."""
    live, simulated = ([float(measure(side)) for side in sides] for sides in zip(*pairs, strict=True))
    ours, theirs = float(np.mean(simulated)), float(np.mean(live))
    interval = float(student.ppf(0.975, len(live) - 1) * np.std(live, ddof=1)) / len(live) ** 0.5 / theirs
    tolerance = TOLERANCE.get(load, THROUGHPUT_TOLERANCE)
    allowed = max(tolerance, interval) if load == max(LOADS) else tolerance
    lag = max(pair.live["generator_lag_s"]["p99"] for pair in pairs)
    ratio = ours / theirs
    return {
        "ratio": round(ratio, 4),
        "ours": round(ours, 2),
        "theirs": round(theirs, 2),
        "unit": f"{unit}, simulated against live",
        "within": abs(ratio - 1) <= allowed,
        "allowed": round(allowed, 3),
        "live_interval": round(interval, 3),
        "runs": len(live),
        "generator_lag_p99_ms": round(1e3 * lag, 2),
        "versions": {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": device_name("cpu"),
            "network": f"{PRESET}, random weights; slowdowns {SLOWDOWNS}",
        },
    }


def _brief(summary: dict[str, Any]) -> str:
    latency = summary["latency_s"]
    mean, p95 = 1e3 * latency["mean"], 1e3 * latency["p95"]
    return f"{summary['throughput_items_s']:.1f} items/s in {mean:.1f} (p95 {p95:.1f}) ms"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
