"""What single Ray calls cost between two nodes of one machine: the figures behind the cluster's choices of transport.

An actor on one node is called from another with nothing, with 96 kB inside the call, and with 384 kB as four pieces or
through the object store; and an output reaches a third party by reference or is fetched from its home. Medians.
"""

import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from slim_scheduler.engine.cluster.ray_session import NICENESS
from slim_scheduler.engine.cluster.wire import PIECE
from slim_scheduler.engine.hardware import device_name

CALLS, WARM = 250, 50
SMALL, LARGE = 32_000, 512_000  # bytes of an activation of one item, and of a block's
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 300 << 20}


class Server:
    """Holds outputs as a server's actor does; `take` is where a block would come in."""

    def __init__(self) -> None:
        self._outputs = {size: np.zeros(size // 4, np.float32) for size in (SMALL, LARGE)}

    async def take(self, *pieces: Any) -> None:
        for piece in pieces:
            len(piece)

    async def fetch(self, size: int) -> np.ndarray:
        return self._outputs[size]

    async def put(self, size: int) -> list[Any]:
        return [ray.put(self._outputs[size])]

    async def fetch_from(self, home: Any, size: int) -> float:
        begin = time.perf_counter()
        await home.fetch.remote(size)
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
    call = _median(lambda: ray.get(here.take.remote()))
    rows = {
        "a call and its answer": call,
        "with 96 kB inside the call": _median(lambda: ray.get(here.take.remote(piece))),
        "with 384 kB as four pieces": _median(lambda: ray.get(here.take.remote(*[piece] * 4))),
        "with 384 kB through the object store": _median(lambda: ray.get(here.take.remote(whole))),
    }
    for size in (SMALL, LARGE):
        name = f"{size // 1000} kB"
        rows[f"{name} fetched from its home"] = _median(
            lambda size=size: ray.get(here.fetch_from.remote(there, size)), True
        )
        rows[f"{name} put into the store, reference back"] = _median(lambda size=size: ray.get(there.put.remote(size)))
        rows[f"{name} by reference, put and read"] = _median(
            lambda size=size: ray.get(here.read.remote(ray.get(there.put.remote(size))))
        )
    versions = {"ray": ray.__version__, "python": platform.python_version(), "machine": device_name("cpu")}
    return {
        f"ray call: {name}": {
            "ratio": ms / call,
            "ours": round(ms, 2),
            "theirs": round(call, 2),
            "unit": "ms",
            "versions": versions,
        }
        for name, ms in rows.items()
    }


def _median(call: Callable[[], Any], told: bool = False) -> float:
    """Milliseconds; where `told`, the call's own answer says how long it took."""
    took = []
    for _ in range(WARM + CALLS):
        begin = time.perf_counter()
        answer = call()
        took.append(answer if told else time.perf_counter() - begin)
    return 1e3 * float(np.median(took[WARM:]))
