"""How fast the pure core is: simulated tasks of the demo cluster against pairs of heap push and pop.

Both sides take turns in one process and run, in slices of a few milliseconds and in CPU time of the one thread, so
that what else the machine does falls on both. A task is one segment of one item, everything included: arrival,
routing, network, batching, device, telemetry and the record at level summary. At least one task per 40 pairs is
asked for, with groups of 8 of which at least 7 are full on average.
"""

import platform
import sys
import time
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slim_scheduler.record.recorder import Recorder
from slim_scheduler.setup.config import load_config
from slim_scheduler.sim.host import Simulation, few_collections

CLUSTER = Path(__file__).parents[1] / "examples" / "demo" / "cluster.toml"
RATE = 3_000.0  # items per second: half as much again as this cluster carries, so that groups are full
DURATION_S = 4.0  # it drains before twice that
ROUTER = "random"  # the one router that draws its group from `groups`
PAIRS_PER_SLICE = 5_000
STEPS_PER_SLICE = 500
WAITING = 1_000  # entries in the bare loop's heap
TARGET = 1 / 40
LEAST_GROUP = 7.0


def run() -> dict[str, dict[str, Any]]:
    simulation = Simulation(_config(), ROUTER, 0, recorder=Recorder("summary", lambda item, widths: True))
    heap: list[tuple[float, int, int, None]] = []
    for i in range(WAITING):
        heappush(heap, (i / WAITING, 0, i, None))
    pairs = 0
    pair_seconds = core_seconds = 0.0
    with few_collections():  # as Simulation.run has it
        while not simulation.done:
            begin = time.thread_time()
            _push_and_pop(heap, PAIRS_PER_SLICE)
            between = time.thread_time()
            _step(simulation, STEPS_PER_SLICE)
            core_seconds += time.thread_time() - between
            pair_seconds += between - begin
            pairs += PAIRS_PER_SLICE
    result = simulation.result()
    group = result.tasks / result.blocks
    if group < LEAST_GROUP:
        raise RuntimeError(f"mean actual group is {group:.2f}, at least {LEAST_GROUP:g} is asked for; raise RATE")
    tasks_per_s, pairs_per_s = result.tasks / core_seconds, pairs / pair_seconds
    print(
        f"{result.tasks} tasks in groups of {group:.2f}: {1e6 / tasks_per_s:.1f} us each, "
        f"one per {pairs_per_s / tasks_per_s:.1f} pairs of {1e6 / pairs_per_s:.2f} us (at most {1 / TARGET:g})"
    )
    row = {
        "ratio": round(tasks_per_s / pairs_per_s, 4),
        "target": TARGET,
        "ours": round(tasks_per_s),
        "theirs": round(pairs_per_s),
        "unit": "simulated tasks/s against heap push-pop pairs/s, one core",
        "mean_group": round(group, 2),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "msgspec": msgspec.__version__,
            "machine": platform.machine(),
        },
    }
    return {"core_speed": row}


def _config() -> Any:
    overrides = ("router.groups=[8]", f"workload.rate={RATE}", f"workload.duration_s={DURATION_S}")
    return load_config(CLUSTER, (*overrides, "record.level=summary"))


def _push_and_pop(heap: list[tuple[float, int, int, None]], count: int) -> None:
    for sequence in range(count):
        heappush(heap, (heap[0][0] + 0.5, 0, sequence, None))
        heappop(heap)


def _step(simulation: Simulation, count: int) -> None:
    step = simulation.step
    for _ in range(count):
        step()
        if simulation.done:
            return


if __name__ == "__main__":
    sys.exit(0 if run()["core_speed"]["ratio"] >= TARGET else 1)
