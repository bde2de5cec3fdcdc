"""The summary of a small run, every number worked out by hand.

Ten seconds, the first not measured; two servers at 100 W and 50 W; two segments at widths 0.5 and 1. Item 0 belongs
to the warm-up, item 1 is right, item 2 late and wrong, item 3 expires, item 4 is still on its way at the end.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import msgspec
import numpy as np
import pytest

from slim_scheduler.core import messages as m
from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.reward import block_reward
from slim_scheduler.core.types import Decision, ItemOutcome, Outcome, Request
from slim_scheduler.core.view import ServerReport
from slim_scheduler.record.recorder import Recorder, RunInfo
from slim_scheduler.run.summary import summarize
from slim_scheduler.setup.config import Config, RewardConfig, ServerConfig, WorkloadConfig

CONFIG = Config(
    servers=(ServerConfig(name="a", device="cpu"), ServerConfig(name="b", device="cpu")),
    workload=WorkloadConfig(duration_s=10.0, warmup_s=1.0, slo_ms=500.0),
    reward=RewardConfig(alpha=1.0, beta=0.1, gamma=0.001, delta=0.5, center_accuracy=True),
)
# Priors: 0.375 after (0.5,), 0.625 after (1,), mean top-1 0.5.
ACCURACY = AccuracyTable(
    {
        (0.5, 0.5): np.array([1, 0, 0, 0], bool),
        (0.5, 1.0): np.array([1, 1, 0, 0], bool),
        (1.0, 0.5): np.array([1, 1, 0, 0], bool),
        (1.0, 1.0): np.array([1, 1, 1, 0], bool),
    },
    split="test",
    data="four items",
)
INFO = RunInfo(mode="simulated", router="jsq:0.5", seed=7, ended_at=10.0)


@dataclass
class Run:
    """Writes a record as a host would, with only the messages that the summary reads."""

    recorder: Recorder

    def arrives(self, item: int, at: float, deadline: float | None = None, heard: float | None = None) -> None:
        request = Request(item, (item,), at, deadline)
        self.recorder.step("dispatcher", at if heard is None else heard, m.RequestArrived(request), [])

    def block(self, decided: float, finished: float, latency: float, *ran: tuple[int, tuple[float, ...]]) -> None:
        segment = len(ran[0][1]) - 1
        done = m.BlockFinished(
            *(0, Decision("a", 0.5, 8), segment, None, len(ran), decided, finished, latency, ran, 0, 0, 0, "jsq:0.5")
        )
        self.recorder.step("dispatcher", finished, m.TimerFired(), [done])

    def ends(self, item: int, at: float, outcome: Outcome, widths: tuple[float, ...] = ()) -> None:
        ended = ItemOutcome(item, outcome, widths, ("a",) * len(widths), 0.0, 0.0)
        self.recorder.step("dispatcher", at, m.TimerFired(), [m.Reply(item, outcome, (ended,))])

    def reports(
        self, server: str, at: float, utilization: float, power_w: float | None, energy_j: float | None
    ) -> None:
        report = ServerReport(
            *(server, 0, at, (0, 0), 0, 0, 0, 0, (), ()),
            utilization=utilization,
            power_w=power_w,
            energy_j=energy_j,
            energy_source="estimated",
        )
        self.recorder.step(server, at, m.DeviceSampled(utilization), [m.ServerReported(report)])


def small_run() -> Run:
    run = Run(Recorder("summary", judge=lambda item, widths: item in (0, 1)))
    for second in range(10):  # the last report comes a second before the end
        run.reports("a", second, 0.8, 100.0, 100.0 * second)
        run.reports("b", second, 0.4 if second < 5 else 0.8, 50.0, 50.0 * second)
    run.arrives(0, at=0.5)
    run.block(0.5, 1.5, 1.0, (0, (1.0, 1.0)))
    run.ends(0, 1.5, Outcome.ANSWERED, (1.0, 1.0))
    run.arrives(1, at=2.0, heard=2.003)
    run.arrives(2, at=2.0)
    run.block(2.0, 2.2, 0.2, (1, (0.5,)), (2, (0.5,)))
    run.block(2.2, 2.4, 0.2, (1, (0.5, 1.0)))
    run.ends(1, 2.4, Outcome.ANSWERED, (0.5, 1.0))
    run.block(2.2, 3.0, 0.8, (2, (0.5, 1.0)))
    run.ends(2, 3.0, Outcome.ANSWERED, (0.5, 1.0))
    run.arrives(3, at=4.0, deadline=4.3)
    run.ends(3, 4.3, Outcome.EXPIRED)
    run.arrives(4, at=9.0)
    return run


def summary_of(run: Run, config: Config = CONFIG, accuracy: AccuracyTable | None = ACCURACY) -> dict[str, Any]:
    return summarize(run.recorder.record(INFO), config, accuracy)


def test_every_item_that_arrived_after_the_warm_up_is_counted_once() -> None:
    summary = summary_of(small_run())
    outcomes = ("completed", "rejected", "expired", "cancelled", "failed", "in_flight")
    assert [summary[f"items_{outcome}"] for outcome in outcomes] == [2, 0, 1, 0, 0, 1]
    assert summary["items_arrived"] == 4


def test_rates_count_what_ended_after_the_warm_up() -> None:
    summary = summary_of(small_run())
    assert (summary["duration_s"], summary["measured_s"]) == (10.0, 9.0)
    assert summary["throughput_items_s"] == pytest.approx(3 / 9)
    assert summary["goodput_items_s"] == pytest.approx(1 / 9)
    assert summary["slo_attainment"] == pytest.approx(1 / 4)


def test_accuracy_is_of_the_answered_and_of_all_that_arrived() -> None:
    summary = summary_of(small_run())
    assert (summary["accuracy"], summary["accuracy_arrived"]) == (0.5, 0.25)


def test_item_latency_runs_from_the_intended_arrival() -> None:
    summary = summary_of(small_run())
    assert summary["latency_s"] == pytest.approx({"mean": 0.7, "sd": 0.3, "p50": 0.7, "p95": 0.97, "p99": 0.994})
    assert summary["generator_lag_s"]["p99"] == pytest.approx(0.003, rel=0.05)


def test_block_latency_and_energy_are_weighted_by_tasks() -> None:
    summary = summary_of(small_run())
    assert summary["block_latency_s"] == pytest.approx({"mean": 0.35, "sd": sqrt(0.0675), "p99": 0.8})
    # 75 W is the servers' mean, so E is 15, 15, 15 and 60 J.
    assert summary["energy_block_j"] == pytest.approx({"mean": 26.25, "sd": 75 * sqrt(0.0675), "p99": 60})


def test_device_energy_is_integrated_over_the_measured_time_idle_included() -> None:
    summary = summary_of(small_run())
    assert summary["energy_device_j"] == pytest.approx(150 * 9)
    assert summary["energy_per_item_j"] == pytest.approx(150 * 9 / 3)
    assert summary["energy_source"] == "estimated"


def test_variance_of_utilisation_is_weighted_by_time() -> None:
    variance = summary_of(small_run())["utilization_variance"]
    mean = 4 * 0.04 / 9  # 0.04 for four of nine seconds, then 0
    assert variance == pytest.approx({"mean": mean, "sd": sqrt(4 * 0.04**2 / 9 - mean**2)})


def test_reward_is_summed_over_segments_and_charges_what_was_left_undone() -> None:
    answered = [-0.18 + 0.445, -0.18 - 0.66]
    undone = [-2 * 0.5 - 0.1 * 6.0, -2 * 0.5 - 0.1 * 1.0]
    rewards = np.array([*answered, *undone])
    assert summary_of(small_run())["reward"] == pytest.approx({"mean": rewards.mean(), "sd": rewards.std()})


@pytest.mark.parametrize("item", [1, 2])
def test_of_two_passes_the_answer_that_was_given_counts_once(item: int) -> None:
    run = Run(Recorder("summary", judge=lambda item, widths: item == 1))
    run.arrives(item, at=2.0)
    for at, ran in ((2.2, (0.5,)), (2.4, (0.5, 0.5)), (2.6, (1.0,)), (2.8, (1.0, 1.0))):
        run.block(at - 0.2, at, 0.2, (item, ran))
    run.ends(item, 2.8, Outcome.ANSWERED, (1.0, 1.0))
    config = msgspec.structs.replace(CONFIG, reward=RewardConfig(alpha=1.0, beta=0.0, gamma=0.0, delta=0.0))
    answered = 0.5 if item == 1 else -0.5
    assert summary_of(run, config)["reward"]["mean"] == pytest.approx(-0.125 + 0.125 + answered)


def test_widths_are_shared_by_the_tasks_that_ran() -> None:
    assert summary_of(small_run())["width_share"] == {"0.5": 0.5, "1": 0.5}
    assert summary_of(small_run())["decisions"] == 3


def test_energy_is_integrated_from_power_where_there_is_no_counter() -> None:
    run = Run(Recorder("summary", judge=lambda item, widths: None))
    for second in range(11):
        run.reports("a", second, 0.5, 10.0 * second, None)
    assert summary_of(run)["energy_device_j"] == pytest.approx((100**2 - 10**2) / 20)


def test_a_counter_that_was_reset_does_not_give_energy_back() -> None:
    run = Run(Recorder("summary", judge=lambda item, widths: None))
    for second, counter in enumerate([0, 10, 20, 30, 0, 10, 20, 30, 40, 50, 60]):
        run.reports("a", second, 0.5, None, counter)
    assert summary_of(run)["energy_device_j"] == pytest.approx(20 + 0 + 60)


def test_what_nobody_measured_is_unknown_and_not_zero() -> None:
    run = Run(Recorder("summary", judge=lambda item, widths: None))
    run.arrives(1, at=2.0)
    run.block(2.0, 2.2, 0.2, (1, (0.5, 1.0)))
    run.ends(1, 2.2, Outcome.ANSWERED, (0.5, 1.0))
    summary = summary_of(run)
    unknown = ("accuracy", "accuracy_arrived", "energy_device_j", "energy_per_item_j")
    assert [summary[key] for key in unknown] == [None] * 4
    assert summary["energy_source"] == "none"
    for key in ("utilization_variance", "reward"):
        assert summary[key] == {"mean": None, "sd": None}
    assert summary["energy_block_j"] == {"mean": None, "sd": None, "p99": None}
    assert summary["decision_us"] == {"mean": None, "p99": None}


def test_a_run_that_ended_in_its_warm_up_measured_no_energy() -> None:
    run = Run(Recorder("summary", judge=lambda item, widths: None))
    for second in (0.0, 0.5):
        run.reports("a", second, 0.5, 10.0, 10.0 * second)
    ended = msgspec.structs.replace(INFO, ended_at=0.6)
    assert summarize(run.recorder.record(ended), CONFIG, ACCURACY)["energy_device_j"] is None


def test_a_server_that_went_silent_leaves_the_variance_to_the_others() -> None:
    run = Run(Recorder("summary", judge=lambda item, widths: None))
    for second in range(6):
        run.reports("a", second, 0.8, None, None)
        run.reports("b", second, 0.4, None, None)
    run.recorder.step("dispatcher", 5.5, m.TimerFired(), [m.ServerChanged("b", False, "silent", 0)])
    # 0.04 from 1 to 5.5; from then on b's utilisation is unknown, and one server alone does not vary.
    assert summary_of(run)["utilization_variance"]["mean"] == pytest.approx(0.04 * 4.5 / 9)


def test_a_run_without_any_item_has_a_summary() -> None:
    summary = summary_of(Run(Recorder("summary", judge=lambda item, widths: None)))
    assert summary["items_arrived"] == 0
    assert (summary["accuracy"], summary["slo_attainment"], summary["latency_s"]["p99"]) == (None, None, None)


def test_reward_is_equation_seven() -> None:
    weights = RewardConfig(alpha=2.0, beta=0.5, gamma=0.01, delta=3.0, bonus=0.25, center_accuracy=False)
    assert block_reward(weights, 0.75, 0.4, 20.0, 0.04) == pytest.approx(1.5 - 0.2 - 0.2 - 0.12 + 0.25)
