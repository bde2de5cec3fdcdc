"""What Ray costs: three servers on a three-node local cluster against the same three servers in this process.

Both serve the same network under the same closed loop of single-item requests, in turns, in one run. Throughput is the
median over rounds with blocks of 16 items or more; latency is of one item at a time, where every hop shows, under a
router that keeps items where they are and under one that moves them. The cluster's record says where a hop's time goes:
to the server with what it must fetch, queued, running, and back.
"""

import asyncio
import itertools
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.cluster_utils import Cluster

from slim_scheduler.core.messages import BatchReported, BlockArrived, Message, SendBlock, StartBatch
from slim_scheduler.core.profile import Curve, Latency, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.engine.cluster.fleet import ClusterFleet
from slim_scheduler.engine.cluster.ray_connection import NICENESS
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.model.presets import preset_named
from slim_scheduler.model.shape import shape_of
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.setup.config import ClusterConfig, Config, config_from, load_config

PRESET = "cifar100"  # the paper's size; weights are random, which costs the same
WIDTHS = (0.5, 1.0)
CALL = 0.5e-3
SERVERS = "abc"
OUTSTANDING = 960  # so many that full blocks wait for credit
ROUNDS = 3
ROUND_SECONDS = 8.0
SINGLES, WARM_SINGLES = 150, 50
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 300 << 20}
LEAST_RATIO, MOST_HOP_MS = 0.75, 5.0


class HopTimes:
    """A recorder that follows every task of the cluster from the dispatcher to its server and back."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {"to the server": [], "queued": [], "running": [], "back": []}
        self.sizes: list[int] = []
        self._seen: dict[tuple[str, int], float] = {}

    def step(self, machine: str, now: float, event: Message, commands: Sequence[Message]) -> None:
        for message in (event, *commands):
            match message:
                case SendBlock(block):
                    self.sizes.append(len(block.tasks))
                    self._note("sent", now, [task.task_id for task in block.tasks])
                case BlockArrived(block):
                    self._end("sent", "to the server", now, [task.task_id for task in block.tasks])
                    self._note("arrived", now, [task.task_id for task in block.tasks])
                case StartBatch(batch):
                    self._end("arrived", "queued", now, [task.task_id for task in batch.tasks])
                    self._note("started", now, [task.task_id for task in batch.tasks])
                case BatchReported() if machine != "dispatcher":
                    self._end("started", "running", now, message.tasks)
                    self._note("reported", now, message.tasks)
                case BatchReported():
                    self._end("reported", "back", now, message.tasks)

    def _note(self, what: str, now: float, tasks: Sequence[int]) -> None:
        for task in tasks:
            self._seen[what, task] = now

    def _end(self, what: str, part: str, now: float, tasks: Sequence[int]) -> None:
        for task in tasks:
            began = self._seen.pop((what, task), None)
            if began is not None:
                self.parts[part].append(now - began)

    def clear(self) -> None:
        self.sizes.clear()
        for values in self.parts.values():
            values.clear()

    def milliseconds(self) -> dict[str, float]:
        return {part: round(1e3 * float(np.median(values)), 2) for part, values in self.parts.items() if values}


def run() -> dict[str, dict[str, Any]]:
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": NICENESS}
    )
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        return asyncio.run(_compare(cluster.address))
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


async def _compare(address: str) -> dict[str, dict[str, Any]]:
    versions = {"ray": ray.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    versions["machine"] = device_name("cpu")
    results = {}
    for width in WIDTHS:
        results |= await _throughput(address, width)
    for router in ("cost-model:0.5", "jsq:0.5"):
        results |= await _hop(address, router)
    return {name: {**row, "versions": versions} for name, row in results.items()}


async def _throughput(address: str, width: float) -> dict[str, dict[str, Any]]:
    """The paper's network with random weights, saturated. Both engines record, as `slim bench` does."""
    torch.manual_seed(0)
    model = SlimResNet(preset_named(PRESET).architecture, PRESET).eval().requires_grad_(False)
    shape, hops = shape_of(model), HopTimes()
    profiles = dict.fromkeys(SERVERS, _derived_profile(shape, _macs_per_s(model, shape, width)))
    here = SlimEngine(_config("", width), model, shape, profiles=profiles, recorder=HopTimes())
    there = SlimEngine(_config(address, width), model, shape, profiles=profiles, recorder=hops, fleet=ClusterFleet)
    items = np.random.default_rng(0).standard_normal((64, *shape.item_shape), dtype=np.float32)
    rates: dict[SlimEngine, list[float]] = {here: [], there: []}
    async with here, there:
        for engine in rates:
            await _saturated(engine, items)  # every instance and variant is loaded
        hops.clear()
        for _ in range(ROUNDS):
            for engine, measured in rates.items():
                measured.append(await _saturated(engine, items))
    ours, theirs = float(np.median(rates[there])), float(np.median(rates[here]))
    sizes = np.array(hops.sizes)
    return {
        f"cluster throughput {width:g}": {
            "ratio": ours / theirs,
            "ours": round(ours, 1),
            "theirs": round(theirs, 1),
            "unit": "items/s, three Ray nodes against one process",
            "target": LEAST_RATIO,
            "block_of_the_mean_task": round(float(np.sum(sizes**2) / np.sum(sizes)), 1),
            "hop_ms": hops.milliseconds(),
        }
    }


async def _hop(address: str, router: str) -> dict[str, dict[str, Any]]:
    """One digit at a time: what each segment's hop adds."""
    config = load_config(Path("examples/ray/cluster.toml"))
    config = msgspec.structs.replace(config, cluster=ClusterConfig(), servers=_config("", 0.5).servers)
    hops = HopTimes()
    here = SlimEngine.from_config(config, router)
    clustered = msgspec.structs.replace(config, cluster=ClusterConfig(address))
    there = SlimEngine.from_config(clustered, router, recorder=hops)
    items = np.random.default_rng(0).standard_normal((64, *here.shape.item_shape), dtype=np.float32)
    singles: dict[SlimEngine, list[float]] = {here: [], there: []}
    async with here, there:
        for i in range(WARM_SINGLES + SINGLES):
            if i == WARM_SINGLES:
                hops.clear()
            for engine, measured in singles.items():
                measured.append(await _single(engine, items))
    ours, theirs = (float(np.median(singles[engine][WARM_SINGLES:])) for engine in (there, here))
    return {
        f"cluster hop {router}": {
            "ratio": None,
            "ours": round(1e3 * (ours - theirs) / here.shape.segments, 2),
            "theirs": MOST_HOP_MS,
            "unit": "ms that a segment's hop adds at p50; theirs is the target",
            "hop_ms": hops.milliseconds(),
        }
    }


def _config(address: str, width: float) -> Config:
    servers = [{"name": name, "device": "cpu", "vram_budget_gib": 2.0} for name in SERVERS]
    router = {"name": f"cost-model:{width}", "fallback": f"jsq:{width}"}
    network = {"latency_ms": 1.0, "mbps": 2000.0}  # about what Ray moves between two nodes of one machine
    dispatch = {"reentry": "oldest-item"}  # as in examples/ray: items then stay where they are also when saturated
    cluster = {"address": address}
    return config_from(
        {"servers": servers, "router": router, "network": network, "dispatch": dispatch, "cluster": cluster}
    )


def _macs_per_s(model: SlimResNet, shape: ModelShape, width: float) -> float:
    """Of one server, in full batches, when all share the cores."""
    widths = (width,) * shape.segments
    items = torch.randn(32, *shape.item_shape)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        model(items, widths)
        times.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    share = min(1.0, (os.cpu_count() or 1) / len(SERVERS))
    return share * len(items) * shape.tuple_macs(widths) / min(times)


def _derived_profile(shape: ModelShape, macs_per_s: float) -> Profile:
    """Times from multiply-adds: what the router needs to know is whether moving a batch costs more than it saves."""
    rows = tuple(
        Latency(segment, previous, width, tuple(CALL + size * macs / macs_per_s for size in (1, 32)))
        for segment in range(shape.segments)
        for i, previous in enumerate(shape.widths if segment else (None,))
        for width, macs in zip(shape.widths, shape.macs[segment][i], strict=True)
    )
    return Profile(
        device="cpu",
        model=shape.name,
        source="derived",
        batches=(1, 32),
        latency_rows=rows,
        load_s=0.01,
        load_bytes_per_s=1e9,
        memory_bytes=4 << 30,
        power=Curve((0.0, 1.0), (0.0, 0.0)),
        power_source="none",
    )


async def _saturated(engine: SlimEngine, items: npt.NDArray[np.float32]) -> float:
    """Items per second with `OUTSTANDING` always under way."""
    done, numbers = 0, itertools.count()
    stop = time.perf_counter() + ROUND_SECONDS

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < stop:
            i = next(numbers) % len(items)
            await engine.infer(items[i : i + 1])
            done += 1

    begin = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(OUTSTANDING)])
    return done / (time.perf_counter() - begin)


async def _single(engine: SlimEngine, items: npt.NDArray[np.float32]) -> float:
    begin = time.perf_counter()
    await engine.infer(items[:1])
    return time.perf_counter() - begin
