"""Guarantee 10: at twice the peak load, goodput under the deadline stays at 80 % of the peak or more."""

import numpy as np
import pytest

from slim_scheduler.core.messages import Reply
from slim_scheduler.core.types import Outcome, Request
from tests.sim.clusters import run_requests, small_cluster

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
