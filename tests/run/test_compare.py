"""Which runs a comparison makes, in which order, and where they go."""

from multiprocessing import active_children
from pathlib import Path

import pytest

from slim_scheduler.core.errors import ConfigError, WorkerLostError
from slim_scheduler.run.compare import folder_name, run_simulated, trials
from slim_scheduler.setup.config import load_config

DEMO = Path(__file__).parents[2] / "examples/demo/cluster.toml"


def test_routers_take_turns_and_each_seed_begins_with_another() -> None:
    plan = trials(["a", "b", "c"], [7, 8], Path("out"))
    assert [(trial.router, trial.seed) for trial in plan] == [
        ("a", 7),
        ("b", 7),
        ("c", 7),
        ("b", 8),
        ("c", 8),
        ("a", 8),
    ]


def test_every_run_has_a_folder_of_its_own() -> None:
    routers = ["jsq:0.25", "jsq:0.25/0.5/0.75/1", "ppo:examples/demo/policies/balanced", "jsq@runs/other"]
    assert [folder_name(router) for router in routers] == [
        "jsq-0.25",
        "jsq-0.25-0.5-0.75-1",
        "ppo-examples-demo-policies-balanced",
        "jsq@runs-other",
    ]


@pytest.mark.parametrize(
    ("routers", "seeds", "said"), [([], [0], "no router"), (["a", "a"], [0], "named twice"), (["a"], [], "at least 1")]
)
def test_a_plan_without_runs_is_refused(routers: list[str], seeds: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trials(routers, seeds, Path("out"))


def test_workers_that_are_told_to_stop_while_they_start_end_by_themselves(tmp_path: Path) -> None:
    workers = []

    def stop(*_: object) -> None:
        workers.extend(active_children())
        raise KeyboardInterrupt

    config = load_config(DEMO, ("workload.duration_s=600",))
    with pytest.raises(KeyboardInterrupt):
        list(run_simulated(config, trials(["random"], [0, 1], tmp_path), workers=2, progress=stop))
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    def kill_one(*_: object) -> None:
        active_children()[0].kill()

    config = load_config(DEMO, ("workload.duration_s=600",))
    with pytest.raises(WorkerLostError, match="was killed"):
        list(run_simulated(config, trials(["random"], [0, 1], tmp_path), workers=2, progress=kill_one))
