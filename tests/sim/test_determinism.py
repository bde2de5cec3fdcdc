import os
import subprocess
import sys
from pathlib import Path

import pytest

from slim_scheduler.record.recorder import Recorder, RunInfo, record_hash
from slim_scheduler.setup.config import Config, load_config
from slim_scheduler.setup.workload import generate
from slim_scheduler.sim.host import Simulation, simulate
from tests.sim.clusters import small_cluster
from tests.sim.fault_run import margin_of

EVERYTHING = {
    "faults": [
        {"server": "a", "at_s": 0.3, "kind": "crash", "duration_s": 0.4},
        {"server": "b", "at_s": 0.2, "kind": "hang", "duration_s": 0.9},
        {"server": "c", "at_s": 0.0, "kind": "drop-messages", "share": 0.1},
        {"server": "c", "at_s": 0.1, "kind": "delay-messages", "share": 0.2},
    ],
    "network": {"latency_ms": 1.0, "shared_mbps": 100.0},
    "workload": {"kind": "bursty", "rate": 300.0, "duration_s": 2.0, "deadline_ms": 900.0, "items_per_request": 2},
}


def everything(folder: Path, **parts: object) -> Config:
    servers = [{"batch_window_ms": "auto"}, {"slowdown": 1.5}, {"max_concurrent_batches": 2, "batch_window_ms": 20.0}]
    return small_cluster(folder, servers, **EVERYTHING, **parts)


def recorder() -> Recorder:
    return Recorder("full", lambda item, widths: item % 3 > 0)


def hash_of(kept: Recorder) -> str:
    return record_hash(kept.record(RunInfo(mode="simulated", router="any")))


def hash_of_run(folder: Path, router: str, seed: int, **parts: object) -> str:
    kept = recorder()
    config = everything(folder, **parts)
    arrivals = generate(config.workload, seed, 1)
    Simulation(config, router, seed, recorder=kept, arrivals=arrivals, margin=margin_of).run()
    return hash_of(kept)


@pytest.mark.parametrize("router", ["random", "p2c:random", "cost-model:0.5", "cost-model:0.5+1@0.5"])
def test_same_seed_gives_the_same_record_and_another_seed_another(tmp_path: Path, router: str) -> None:
    assert hash_of_run(tmp_path, router, 4) == hash_of_run(tmp_path, router, 4)
    assert hash_of_run(tmp_path, router, 4) != hash_of_run(tmp_path, router, 5)


@pytest.mark.parametrize("queue", ["shortest", "least-slack"])
def test_an_order_of_its_own_gives_the_same_record_and_another_than_first_come_first_served(tmp_path, queue) -> None:
    router = "cost-model:0.5+1@0.5"
    ordered = hash_of_run(tmp_path, router, 4, dispatch={"queue": queue})
    assert ordered == hash_of_run(tmp_path, router, 4, dispatch={"queue": queue}) != hash_of_run(tmp_path, router, 4)


@pytest.mark.parametrize("router", ["lp", "ppo:examples/demo/policies/balanced"])
def test_a_router_that_plans_or_has_learned_gives_the_same_record(router: str) -> None:
    settings = (
        "workload.duration_s=1.5",
        "workload.warmup_s=0",
        "workload.rate=600",
        "record.level=full",
        "telemetry.age_s=0.05",
    )
    windows = ('servers.0.batch_window_ms="auto"', "servers.1.batch_window_ms=5")
    config = load_config(Path("examples/demo/cluster.toml"), (*settings, *windows))

    def hash_with(seed: int) -> str:
        kept = recorder()
        simulate(config, router, seed, recorder=kept)
        return hash_of(kept)

    assert hash_with(4) == hash_with(4) != hash_with(5)


def test_the_record_does_not_depend_on_the_process_or_its_hash_seed(tmp_path: Path) -> None:
    code = f"from tests.sim.test_determinism import *; print(hash_of_run(Path({str(tmp_path)!r}), 'random', 4))"
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
    assert printed == [hash_of_run(tmp_path, "random", 4)] * 2


def test_a_run_that_stops_at_every_decision_leaves_the_same_record(tmp_path: Path) -> None:
    kept = recorder()
    simulation = Simulation(everything(tmp_path), "random", 4, recorder=kept)
    decisions = 0
    while (view := simulation.run_until_decision()) is not None:
        assert view.now == simulation.agenda.now
        assert simulation.decide().server in view.servers
        decisions += 1
    assert decisions > 50
    assert hash_of(kept) == hash_of_run(tmp_path, "random", 4)
