"""Guarantee 10: at twice the peak load, goodput under the deadline stays at 80 % of the peak or more. And a device
behind a link is not short of work while some waits."""

import numpy as np
import pytest

from slim_scheduler.core.messages import BatchReported, Reply
from slim_scheduler.core.types import Outcome, Request
from slim_scheduler.sim.host import simulate
from tests.sim.clusters import Journal, run_requests, small_cluster

SECONDS = 3.0


def answered_per_second(folder, rate: float, deadline: float | None) -> float:
    """Answers in the last two thirds of the arrivals' time; one after its deadline does not exist."""
    arrivals = np.sort(np.random.default_rng(1).uniform(0.0, SECONDS, int(rate * SECONDS)))
    requests = [
        Request(i, (i,), at, None if deadline is None else at + deadline) for i, at in enumerate(arrivals.tolist())
    ]
    replies = run_requests(small_cluster(folder, ({}, {})), requests).commands(Reply)
    return sum(r.outcome is Outcome.ANSWERED and SECONDS / 3 < at < SECONDS for at, r in replies) / (2 * SECONDS / 3)


@pytest.mark.parametrize("times", [1.2, 2.0, 10.0])
def test_goodput_beyond_the_peak_is_that_of_the_peak(tmp_path, times):
    peak = max(answered_per_second(tmp_path, rate, None) for rate in (500.0, 600.0, 700.0))
    assert answered_per_second(tmp_path, times * peak, 0.2) >= 0.8 * peak


def busy_share(folder, credit) -> float:
    """Of a device 10 ms away, in the second half of 3 s in which it is asked for twice what it carries."""
    overload = {"workload": {"rate": 700.0, "duration_s": SECONDS, "end": "cut"}, "network": {"latency_ms": 10.0}}
    config = small_cluster(folder, [{"credit_tasks": credit}], dispatch={"reentry": "oldest-item"}, **overload)
    journal = Journal()
    simulate(config, "cost-model:0.5", 3, recorder=journal)
    batches = [r for _, r in journal.commands(BatchReported) if r.started >= SECONDS / 2]
    return sum(r.finished - r.started for r in batches) / (SECONDS / 2)


def test_automatic_credit_keeps_a_device_behind_a_link_busy(tmp_path):
    assert busy_share(tmp_path, "auto") > 0.97
    assert busy_share(tmp_path, None) < 0.85, "twice the largest batch is too little, else this test shows nothing"
