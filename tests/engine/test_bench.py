"""A live run under a workload: true labels, intended arrivals, drained or cut, and complete when interrupted."""

import _thread
import asyncio
import gc
import signal

import pytest

from slim_scheduler.engine.bench import bench, due
from slim_scheduler.model import checkpoint
from slim_scheduler.run.summary import summarize
from slim_scheduler.setup.config import Config, config_from

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
    config = workload(model_dir, rate=40.0, duration_s=3.0)  # and 3 s to drain: a busy machine may stand
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


async def test_late_arrivals_come_together_and_leave_the_loop_its_turns():
    offered = [0]  # in each turn of the loop

    def now() -> float:
        return sum(offered) * 1e-4  # taking one takes twice as long as there is between two

    async def offer() -> None:
        async for _ in due([i * 5e-5 for i in range(2000)], now):
            offered[-1] += 1

    offering = asyncio.create_task(offer())
    while not offering.done():
        await asyncio.sleep(0)
        offered.append(0)
    in_turns = [count for count in offered if count]
    assert sum(in_turns) == 2000
    assert 15 <= max(in_turns) <= 25, "2 ms of arrivals, then a turn"
    assert len(in_turns) <= 2000 / 15


def test_no_garbage_is_looked_for_while_a_run_goes_on(model_dir):
    enabled: list[bool] = []
    bench(workload(model_dir), "jsq:0.25", progress=lambda done, of: enabled.append(gc.isenabled()))
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()


def test_a_cut_run_leaves_the_rest_in_flight(model_dir):
    config = workload(model_dir, rate=20_000.0, duration_s=0.3, end="cut")
    run = bench(config, seed=1)
    summary = summarize(run.recorder.record(run.info), config)
    assert summary["items_in_flight"] > 0
    assert summary["items_cancelled"] == 0
    assert summary["items_completed"] + summary["items_in_flight"] == summary["items_arrived"]


@pytest.fixture
def _ctrl_c_works():
    """Shells start what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_works")
def test_ctrl_c_ends_the_run_and_what_was_recorded_is_complete(model_dir, tmp_path):
    config = workload(model_dir, duration_s=30.0)
    pressed: list[float] = []

    def press_once_under_way(done: float, of: float) -> None:
        if done > 0.5 and not pressed:
            pressed.append(done)
            _thread.interrupt_main()

    run = bench(config, seed=2, progress=press_once_under_way)
    assert run.info.interrupted
    assert pressed[0] <= run.info.ended_at < 30.0, "before its end"
    run.recorder.write(tmp_path / "record.parquet", run.info)
    from slim_scheduler.record.recorder import read_record

    summary = summarize(read_record(tmp_path / "record.parquet"), config)
    assert summary["interrupted"]
    assert summary["items_completed"] > 20
