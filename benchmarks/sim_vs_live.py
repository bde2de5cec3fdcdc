"""The simulator against reality: the same arrivals, routers and seeds, live and simulated, in one run.

Section 5 of the experiments: three unequal live servers on this machine, their profile measured with all of them
active; then a saturated run, and 0.3, 0.6 and 0.85 of its throughput. `ratio` is simulated over live, so 1 is perfect.
The servers wait for a part of their time (`slowdown`), so that together they fit on two cores. Anything else that
runs on the machine spoils the comparison: a generator lag above 5 ms marks it.
"""

import asyncio
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from slim_scheduler.config import Config, config_from
from slim_scheduler.core.profile import Curve, Profile
from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.bench import bench
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.engine.measure import measure_model
from slim_scheduler.model import checkpoint
from slim_scheduler.model.cifar import RECORD_BYTES
from slim_scheduler.model.presets import preset_named
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.profile_file import write_profile
from slim_scheduler.record import Recorder, RunInfo
from slim_scheduler.record_columns import numbers
from slim_scheduler.sim.host import simulate
from slim_scheduler.summary import summarize
from slim_scheduler.workload import Arrivals

PRESET = "cifar100-lean"  # weights and images are random, which costs the same
SLOWDOWNS = (4.0, 6.0, 8.0)  # together half a core: the cores are never the limit, the servers are
WIDTHS = (0.25, 0.5, 0.75, 1.0)  # fixed: with random ones, two equal runs differ by which instances they happen to load
ROUTER = "jsq:" + "/".join(f"{width:g}" for width in WIDTHS)
LOADS = (0.3, 0.6, 0.85)
SEEDS = (1, 2, 3)
DURATION_S = 12.0
WARMUP_S = 2.0
FLOOD = 700.0  # items per second, beyond what two cores carry
FLOOD_WAITING = 256  # a bounded queue: in a growing one items would only ever begin
QUIET = 60.0  # items per second at which batches are small
CALIBRATION_S = 6.0
LEAST_BATCHES = 10
CALIBRATION_SEED = 99
IMAGES = 200
MEASURE_ROUNDS = 15
TOLERANCE = {0.3: 0.15, 0.6: 0.15, 0.85: 0.25}
THROUGHPUT_TOLERANCE = 0.10
CONFIDENCE = 1.96


def run() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, model = _prepare(folder)
        _measure(model, folder, config)
        flood = _pair(config, FLOOD, SEEDS[:2], end="cut")
        live, simulated = ([one["throughput_items_s"] for one in side] for side in flood)
        capacity = float(np.mean(live))
        results = {"sim_vs_live_throughput": _row(simulated, live, "items/s", THROUGHPUT_TOLERANCE)}
        for load in LOADS:
            _measure(model, folder, config)  # again: the machine's speed drifts with what else runs on it
            lives, sims = _pair(config, load * capacity, SEEDS, end="drain")
            lag = max(one["generator_lag_s"]["p99"] for one in lives)
            _say(f"at {load:g} of {capacity:.0f} items/s: generator lag p99 {1e3 * lag:.1f} ms (valid below 5)")
            for name in ("mean", "p95"):
                live, simulated = ([1e3 * one["latency_s"][name] for one in side] for side in (lives, sims))
                row = _row(simulated, live, "ms", TOLERANCE[load])
                results[f"sim_vs_live_latency_{name}_at_{load:g}"] = row | {"generator_lag_p99_ms": round(1e3 * lag, 2)}
    return results


def _prepare(folder: Path) -> tuple[Config, SlimResNet]:
    """A checkpoint and images in a folder, and the cluster that uses them."""
    torch.manual_seed(0)
    model = SlimResNet(preset_named(PRESET).architecture, PRESET).eval().requires_grad_(False)
    checkpoint.save(model, folder / PRESET)
    records = np.random.default_rng(0).integers(0, 100, (IMAGES, RECORD_BYTES), dtype=np.uint8)
    for part in ("train.bin", "test.bin"):
        (folder / part).write_bytes(records.tobytes())
    servers = [
        {"name": name, "device": "cpu", "slowdown": slowdown, "profile": str(folder / "cpu.json")}
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


def _measure(model: SlimResNet, folder: Path, config: Config) -> None:
    """The profile that every server reads, measured with all of them active.

    What a batch takes while the servers serve differs from what it takes in a row of its likes (caches, threads that
    wake), by up to a third here. So its latencies are corrected from two short live runs of their own arrivals.
    """
    first, *others = SLOWDOWNS
    profile = asyncio.run(measure_model(model, "cpu", slowdown=first, busy=others, only=WIDTHS, rounds=MEASURE_ROUNDS))
    write_profile(profile, folder / "cpu.json")
    write_profile(_as_served(profile, config), folder / "cpu.json")
    _say(f"measured a profile; with {len(SLOWDOWNS)} servers active {profile.slowdown.y[-1]:.2f} times as slow")


def _as_served(profile: Profile, config: Config) -> Profile:
    """The profile with each segment's latencies as two live runs had them, slowdown taken out."""
    batches = []
    for rate, end in ((QUIET, "drain"), (FLOOD, "cut")):
        live = bench(_loaded(config, rate, end, CALIBRATION_S), ROUTER, CALIBRATION_SEED)
        rows = live.recorder.record(live.info).of("BatchReported")
        slowdown = np.array([SLOWDOWNS["abc".index(name)] for name in rows["server"].to_pylist()])
        seconds = (numbers(rows, "finished_at") - numbers(rows, "started")) / slowdown
        batches.append(np.stack([numbers(rows, "segment"), numbers(rows, "size"), seconds]))
    segment, size, seconds = np.concatenate(batches, axis=1)
    curves = [_smooth(size[segment == s], seconds[segment == s], profile.batches) for s in range(len(WIDTHS))]
    rows = [
        msgspec.structs.replace(row, seconds=curves[row.segment]) if row.width == WIDTHS[row.segment] else row
        for row in profile.latency_rows
    ]
    # The runs had the servers active: how much that slows them is in the line.
    return msgspec.structs.replace(profile, latency_rows=tuple(rows), slowdown=Curve((0.0, 1.0), (1.0, 1.0)))


def _smooth(size: np.ndarray, seconds: np.ndarray, at: tuple[int, ...]) -> tuple[float, ...]:
    """Mean time of batches about as large as each of `at`; a line through all batches where few are."""
    line = np.polyfit(size, seconds, 1, w=1 / size)
    values = []
    for n in at:
        near = (size > 0.7 * n) & (size < 1.4 * n)
        mean = n * seconds[near].sum() / size[near].sum() if near.sum() >= LEAST_BATCHES and n > 1 else None
        mean = float(np.mean(seconds[size == 1])) if n == 1 and (size == 1).sum() >= LEAST_BATCHES else mean
        values.append(float(np.polyval(line, n)) if mean is None else float(mean))
    return tuple(np.maximum.accumulate(values).tolist())


def _loaded(config: Config, rate: float, end: str, duration_s: float) -> Config:
    workload = msgspec.structs.replace(config.workload, rate=rate, end=end, duration_s=duration_s)
    dispatch = msgspec.structs.replace(config.dispatch, max_waiting_items=FLOOD_WAITING if end == "cut" else 100_000)
    return msgspec.structs.replace(config, workload=workload, dispatch=dispatch)


Summary = dict[str, Any]


def _pair(config: Config, rate: float, seeds: tuple[int, ...], end: str) -> tuple[list[Summary], list[Summary]]:
    """Summaries of live and of simulated runs over the same arrivals."""
    config = _loaded(config, rate, end, DURATION_S)
    lives, sims = [], []
    for seed in seeds:
        live = bench(config, ROUTER, seed)
        lives.append(summarize(live.recorder.record(live.info), config))
        sims.append(_simulated(config, seed, live.arrivals))
        _say(f"{rate:.0f} items/s, seed {seed}: live {_brief(lives[-1])}; simulated {_brief(sims[-1])}")
    return lives, sims


def _brief(summary: Summary) -> str:
    mean = summary["latency_s"]["mean"]
    return f"{summary['throughput_items_s']:.1f} items/s" + ("" if mean is None else f" in {1e3 * mean:.1f} ms")


def _simulated(config: Config, seed: int, arrivals: Arrivals) -> Summary:
    recorder = Recorder(config.record.level, lambda item, widths: None)
    result = simulate(config, ROUTER, seed, recorder=recorder, arrivals=arrivals)
    info = RunInfo(mode="simulated", router=ROUTER, seed=seed, ended_at=result.ended_s)
    return summarize(recorder.record(info), config)


def _row(simulated: list[float], live: list[float], unit: str, tolerance: float) -> dict[str, Any]:
    ours, theirs = float(np.mean(simulated)), float(np.mean(live))
    interval = CONFIDENCE * float(np.std(live, ddof=1)) / len(live) ** 0.5 / theirs if len(live) > 1 else 0.0
    allowed = max(tolerance, interval) if tolerance == TOLERANCE[0.85] else tolerance
    ratio = ours / theirs
    return {
        "ratio": round(ratio, 4),
        "ours": round(ours, 2),
        "theirs": round(theirs, 2),
        "unit": f"{unit}, simulated against live",
        "within": abs(ratio - 1) <= allowed,
        "allowed": round(allowed, 3),
        "live_interval": round(interval, 3),
        "versions": {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": device_name("cpu"),
            "network": f"{PRESET}, random weights; slowdowns {SLOWDOWNS}",
        },
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
