"""A live run under a workload: true labels, intended arrivals, drained or cut, and complete when interrupted."""

import _thread

import pytest

from slim_scheduler.config import Config, config_from
from slim_scheduler.engine.bench import bench
from slim_scheduler.model import checkpoint
from slim_scheduler.summary import summarize

from .live import tiny_network


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    checkpoint.save(tiny_network(), folder, mean=(0.3,), std=(0.4,))
    return folder


def workload(model_dir, **changes) -> Config:
    return config_from(
        {
            "model": {"path": str(model_dir)},
            "servers": [{"name": "a", "device": "cpu"}, {"name": "b", "device": "cpu", "slowdown": 2.0}],
            "router": {"name": "jsq:random", "fallback": "jsq:0.5"},
            "workload": {"rate": 200.0, "duration_s": 0.6, "warmup_s": 0.0, "data": "digits", **changes},
        }
    )


def test_every_arrival_is_answered_and_judged_by_its_true_label(model_dir):
    config = workload(model_dir)
    run = bench(config, "jsq:random", seed=3)
    summary = summarize(run.recorder.record(run.info), config)
    assert summary["mode"] == "live"
    assert not summary["interrupted"]
    assert summary["items_arrived"] == summary["items_completed"] == run.arrivals.items > 50
    assert 0 < summary["accuracy"] < 0.5, "random weights guess"
    assert summary["latency_s"]["mean"] > 0
    assert summary["generator_lag_s"]["p99"] is not None
    assert summary["decision_us"]["mean"] > 0
    assert summary["decision_us"]["p99"] > 0  # below the mean where the machine stopped in one decision
    assert "CPU" in run.info.machine


def test_the_same_seed_offers_the_same_items_to_every_router(model_dir):
    runs = [bench(workload(model_dir), router, seed=5, level="summary") for router in ("random", "jsq:0.25")]
    assert (runs[0].arrivals.samples == runs[1].arrivals.samples).all()
    assert (runs[0].arrivals.times == runs[1].arrivals.times).all()


def test_a_cut_run_leaves_the_rest_in_flight(model_dir):
    config = workload(model_dir, rate=20_000.0, duration_s=0.3, end="cut")
    run = bench(config, seed=1)
    summary = summarize(run.recorder.record(run.info), config)
    assert summary["items_in_flight"] > 0
    assert summary["items_cancelled"] == 0
    assert summary["items_completed"] + summary["items_in_flight"] == summary["items_arrived"]


def test_ctrl_c_ends_the_run_and_what_was_recorded_is_complete(model_dir, tmp_path):
    config = workload(model_dir, duration_s=30.0)
    pressed: list[float] = []

    def press_once_under_way(done: float, of: float) -> None:
        if done > 0.5 and not pressed:
            pressed.append(done)
            _thread.interrupt_main()

    run = bench(config, seed=2, path=tmp_path / "record.parquet", progress=press_once_under_way)
    assert run.info.interrupted
    assert pressed[0] <= run.info.ended_at < 15
    run.recorder.write(tmp_path / "record.parquet", run.info)
    from slim_scheduler.record import read_record

    summary = summarize(read_record(tmp_path / "record.parquet"), config)
    assert summary["interrupted"]
    assert summary["items_completed"] > 20
