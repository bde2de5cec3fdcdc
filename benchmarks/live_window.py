"""Batch windows live: the demo's three servers and the CIFAR-100 network, `batch_window_ms` "auto" against 0.

Ten interleaved pairs at 0.5 and at 0.85 of what the servers carry without windows, each pair on the same arrivals
(`lone_request` has what comes alone). A row says the mean of ten differences with its 95 % interval. Images are random,
which costs the same; widths are fixed, so that a pair differs in nothing but its windows. The servers are four times as
slow as the demo's, so that two cores carry them and the generator beside them. A run whose generator lagged (p99 above
5 ms) is invalid, and its pair is run again, at most `TRIES` times.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from scipy.stats import t as student

from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.bench import bench
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.engine.measure import Measurement
from slim_scheduler.engine.priority import real_time
from slim_scheduler.model import checkpoint
from slim_scheduler.model.cifar import RECORD_BYTES
from slim_scheduler.run.summary import summarize
from slim_scheduler.setup.config import Config, load_config
from slim_scheduler.setup.profiles import write_profile

CLONE = Path(__file__).parents[1]
ROUTER = "cost-model:0.5"
BATCHES = (1, 2, 8, 32)
ROUNDS = 1
LOADS = (0.5, 0.85)
PAIRS = 10
DURATION_S = 10.0
WARMUP_S = 1.0
FLOOD_RATE = 1000.0
FLOOD_WAITING = 256
IMAGES = 1000
SLOWER = 4.0  # than the demo's: at their own speed the three servers take both cores, and the generator is late
LAG_LIMIT_S = 0.005
TRIES = 3
MEASURES = {
    "cpu": ("cpu_s_per_item", "ms of CPU per item"),
    "p50": ("latency_s.p50", "ms"),
    "p99": ("latency_s.p99", "ms"),
}


def run() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = np.random.default_rng(0).integers(0, 100, (IMAGES, RECORD_BYTES), dtype=np.uint8)
        for part in ("train.bin", "test.bin"):
            (folder / part).write_bytes(records.tobytes())
        settings = (f"model.path={CLONE / 'models' / 'cifar100'}", f"workload.data={folder}")
        config = live_config(load_config(CLONE / "examples" / "demo" / "cluster.toml", settings))
        config = measured(slower(config), folder / "cpu.json")
        floods = [_run(_with(config, rate=FLOOD_RATE, end="cut"), seed)["throughput_items_s"] for seed in (1, 2, 3)]
        capacity = float(np.median(floods))
        _say(f"capacity without windows: {capacity:.0f} items/s")
        rows = {}
        for load in LOADS:
            pairs = [_pair(_with(config, rate=load * capacity), f"{load:g}", seed) for seed in range(1, PAIRS + 1)]
            rows |= _rows(f"at_{load:g}", pairs, capacity)
        return rows


def slower(config: Config) -> Config:
    servers = [msgspec.structs.replace(server, slowdown=SLOWER * server.slowdown) for server in config.servers]
    return msgspec.structs.replace(config, servers=tuple(servers))


def measured(config: Config, path: Path) -> Config:
    """The cluster with a profile of this machine, all three servers active while it is measured."""

    async def measure() -> None:
        measurement = Measurement(
            checkpoint.load(config.model.path),
            "cpu",
            batches=BATCHES,
            slowdowns=tuple(server.slowdown for server in config.servers),
            memory_gib=config.servers[0].vram_budget_gib,
        )
        async with measurement:
            write_profile(await measurement.profile(await measurement.rounds(ROUNDS)), path)

    asyncio.run(measure())
    servers = tuple(msgspec.structs.replace(server, profile=str(path)) for server in config.servers)
    return msgspec.structs.replace(config, servers=servers)


def _with(config: Config, rate: float, window: float = 0.0, end: str = "drain") -> Config:
    workload = msgspec.structs.replace(config.workload, rate=rate, end=end, duration_s=DURATION_S, warmup_s=WARMUP_S)
    waiting = FLOOD_WAITING if end == "cut" else 100_000
    dispatch = msgspec.structs.replace(config.dispatch, max_waiting_items=waiting)
    return with_window(msgspec.structs.replace(config, workload=workload, dispatch=dispatch), window)


def with_window(config: Config, window: Any) -> Config:
    servers = tuple(msgspec.structs.replace(server, batch_window_ms=window) for server in config.servers)
    return msgspec.structs.replace(config, servers=servers)


def _run(config: Config, seed: int) -> dict[str, Any]:
    with real_time():  # where that is allowed: the generator shares two cores with three servers
        done = bench(config, ROUTER, seed)
    return summarize(done.recorder.record(done.info), config)


def _pair(config: Config, what: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(with windows, without), in an order that changes from pair to pair."""
    for _ in range(TRIES):
        order = ("auto", 0.0) if seed % 2 else (0.0, "auto")
        done = {window: _run(with_window(config, window), seed) for window in order}
        with_, without = done["auto"], done[0.0]
        lag = max(of["generator_lag_s"]["p99"] for of in (with_, without))
        _say(f"{what}, pair {seed}: windows {_brief(with_)}; none {_brief(without)}; generator lag {1e3 * lag:.1f} ms")
        if lag <= LAG_LIMIT_S:
            break
    return with_, without


def _rows(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], capacity: float) -> dict[str, dict[str, Any]]:
    return {f"live_window_{name}_{measure}": _row(pairs, *MEASURES[measure], capacity) for measure in MEASURES}


def _row(pairs: list[Any], key: str, unit: str, capacity: float) -> dict[str, Any]:
    with_, without = (np.array([1e3 * _value(side, key) for side in sides]) for sides in zip(*pairs, strict=True))
    change = with_ - without
    interval = float(student.ppf(0.975, len(change) - 1) * np.std(change, ddof=1)) / len(change) ** 0.5
    lags = [of["generator_lag_s"]["p99"] for pair in pairs for of in pair]
    return {
        "ratio": round(float(with_.mean() / without.mean()), 4),
        "ours": round(float(with_.mean()), 3),
        "theirs": round(float(without.mean()), 3),
        "unit": f"{unit}, windows against none",
        "difference": round(float(change.mean()), 3),
        "interval": round(interval, 3),
        "pairs": len(pairs),
        "capacity_items_s": round(capacity, 1),
        "generator_lag_p99_ms": round(1e3 * max(lags), 2),
        "versions": {"torch": str(torch.__version__), "machine": device_name("cpu"), "router": ROUTER},
    }


def _value(summary: dict[str, Any], key: str) -> float:
    value: Any = summary
    for part in key.split("."):
        value = value[part]
    return float(value)


def _brief(summary: dict[str, Any]) -> str:
    latency = summary["latency_s"]
    p50, p99 = 1e3 * latency["p50"], 1e3 * latency["p99"]
    return f"{1e3 * summary['cpu_s_per_item']:.2f} ms of CPU, p50 {p50:.1f}, p99 {p99:.1f} ms"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
