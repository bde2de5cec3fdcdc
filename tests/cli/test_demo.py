"""The demo's day, simulated with the shipped profile: the wide router drowns, the learned one adapts."""

from pathlib import Path

import numpy as np
import pytest

from slim_scheduler.record.columns import items_of
from slim_scheduler.report.run_folder import RunFolder
from slim_scheduler.run.compare import run_simulated, trials
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import carried_by_width, in_items_per_second
from tests.cli.conftest import ROOT

WIDE, NARROW, LEARNED = "cost-model:1", "cost-model:0.25", "ppo:examples/demo/policies/adaptive"


@pytest.fixture(autouse=True)
def _root(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_surge_is_beyond_what_width_1_carries_and_well_within_what_the_narrowest_does() -> None:
    config = load_config(ROOT / "examples/demo/day.toml")
    carried = carried_by_width(config)
    surge = in_items_per_second(config).workload.rate * max(factor for _, factor in config.workload.steps)
    assert 1.2 * carried[1.0] < surge < 0.75 * carried[0.25]


@pytest.mark.slow
def test_the_learned_router_adapts_to_the_surge_in_which_the_wide_one_drowns(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples/demo/day.toml")
    plan = trials([WIDE, NARROW, LEARNED], range(3), tmp_path)
    runs = {(run.trial.router, run.trial.seed): run for run in run_simulated(config, plan)}
    for seed in range(3):
        wide, narrow, learned = (runs[router, seed].summary for router in (WIDE, NARROW, LEARNED))
        assert learned["accuracy"] >= (narrow["accuracy"] + wide["accuracy"]) / 2
        assert learned["latency_s"]["p99"] <= 1.5 * narrow["latency_s"]["p99"]
        in_surge = [surge_p99(runs[router, seed].trial.out) for router in (WIDE, LEARNED)]
        assert in_surge[0] >= 10 * in_surge[1]


def surge_p99(folder: Path) -> float:
    """Of the items that arrived in the second step, seconds."""
    run = RunFolder(folder)
    calm, surge = (seconds for seconds, _ in run.config.workload.steps[:2])
    items = items_of(run.record)
    latency = (items.ended - items.arrival)[(items.arrival >= calm) & (items.arrival < calm + surge)]
    return float(np.percentile(latency, 99))
