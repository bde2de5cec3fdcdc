"""What single Ray calls cost between two nodes of one machine: the figures behind the cluster's choices of transport.

An actor on one node is called from another with nothing, with 96 kB inside the call, and with 384 kB as four pieces or
through the object store; and an output reaches a third party by reference, or is fetched from its home as an array or
in pieces. Medians, and the CPU time that the whole cluster takes per call.
"""

import asyncio
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

from slim_scheduler.engine.cluster.ray_connection import NICENESS
from slim_scheduler.engine.cluster.wire import PIECE, cut, join, pieces_of
from slim_scheduler.engine.hardware import device_name

CALLS, WARM = 250, 50
SIZES = (32_000, 512_000, 2_000_000)  # bytes of the activations of an item, of a small block, of a large one
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 300 << 20}


class Server:
    """Holds outputs as a server's actor does; `take` is where a block would come in."""

    def __init__(self) -> None:
        self._outputs = {size: np.zeros(size // 4, np.float32) for size in SIZES}

    async def take(self, *pieces: Any) -> None:
        for piece in pieces:
            len(piece)

    async def fetch(self, size: int) -> np.ndarray:
        return self._outputs[size]

    async def put(self, size: int) -> list[Any]:
        return [ray.put(self._outputs[size])]

    async def fetch_pieces(self, size: int) -> Any:
        pieces = cut(self._outputs[size])
        return pieces if len(pieces) > 1 else pieces[0]

    async def fetch_from(self, home: Any, size: int) -> float:
        begin = time.perf_counter()
        await home.fetch.remote(size)
        return time.perf_counter() - begin

    async def fetch_pieces_from(self, home: Any, size: int) -> float:
        begin = time.perf_counter()
        pieces = home.fetch_pieces.options(num_returns=pieces_of(size)).remote(size)
        join(await asyncio.to_thread(ray.get, pieces if isinstance(pieces, list) else [pieces]), ())
        return time.perf_counter() - begin

    async def read(self, references: list[Any]) -> None:
        await references[0]


def run() -> dict[str, dict[str, Any]]:
    head = {**NODE, "include_dashboard": False, "_system_config": NICENESS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for name in ("here", "there"):
            cluster.add_node(resources={name: 1}, **NODE)
        ray.init(cluster.address, log_to_driver=False)
        return _measure()
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _measure() -> dict[str, dict[str, Any]]:
    here, there = (ray.remote(Server).options(resources={name: 1}, num_cpus=0).remote() for name in ("here", "there"))
    piece = bytes(PIECE)
    whole = np.zeros(PIECE, np.float32)  # four pieces' worth
    calls: dict[str, tuple[Callable[[], Any], bool]] = {
        "a call and its answer": (lambda: ray.get(here.take.remote()), False),
        "with 96 kB inside the call": (lambda: ray.get(here.take.remote(piece)), False),
        "with 384 kB as four pieces": (lambda: ray.get(here.take.remote(*[piece] * 4)), False),
        "with 384 kB through the object store": (lambda: ray.get(here.take.remote(whole)), False),
    }
    for size in SIZES:
        name = f"{size // 1000} kB"
        calls[f"{name} fetched in pieces"] = (
            (lambda size=size: ray.get(here.fetch_pieces_from.remote(there, size))),
            True,
        )
        calls[f"{name} fetched as an array"] = (lambda size=size: ray.get(here.fetch_from.remote(there, size))), True
        calls[f"{name} put into the store, reference back"] = (lambda size=size: ray.get(there.put.remote(size))), False
        calls[f"{name} by reference, put and read"] = (
            (lambda size=size: ray.get(here.read.remote(ray.get(there.put.remote(size))))),
            False,
        )
    rows = {name: _measured(call, told) for name, (call, told) in calls.items()}
    plain, _ = rows["a call and its answer"]
    versions = {"ray": ray.__version__, "python": platform.python_version(), "machine": device_name("cpu")}
    return {
        f"ray call: {name}": {
            "ratio": ms / plain,
            "ours": round(ms, 2),
            "theirs": round(plain, 2),
            "unit": "ms",
            "cpu_ms": round(cpu_ms, 2),
            "versions": versions,
        }
        for name, (ms, cpu_ms) in rows.items()
    }


def _measured(call: Callable[[], Any], told: bool) -> tuple[float, float]:
    """Median and mean CPU milliseconds of a call; where `told`, the call's own answer says how long it took."""
    for _ in range(WARM):
        call()
    took, cpu = [], _cpu_seconds()
    for _ in range(CALLS):
        begin = time.perf_counter()
        answer = call()
        took.append(answer if told else time.perf_counter() - begin)
    return 1e3 * float(np.median(took)), 1e3 * (_cpu_seconds() - cpu) / CALLS


def _cpu_seconds() -> float:
    """Of this process and all that it started: the cluster."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)
