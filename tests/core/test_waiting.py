"""How fast a queue is worked off where waiting is cheap: against what else could be done with it."""

import math
from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slim_scheduler.core.router.plan.waiting import Waiting, queues, slopes, waiting
from slim_scheduler.setup.config import RewardConfig

STEP: float = 0.002  # seconds of the simulated fluid


def bent(bend: float, steps: int = 100) -> tuple[list[float], list[float]]:
    """Rates up to 1, and accuracies of which rate * accuracy bends evenly."""
    rates = [(i + 1) / steps for i in range(steps)]
    return rates, [0.9 - bend / 2 * rate for rate in rates]


def lost(rates, accuracies, cost, mean, queue, chosen) -> float:
    """What working a queue off costs in all: waiting, and accuracy against that of the load that comes."""
    total = 0.0
    for _ in range(round(120 / STEP)):
        if queue <= 0:
            return total
        i = chosen(queue)
        total += STEP * cost * queue
        total += STEP * (rates[i] * (accuracies[mean] - accuracies[i]))
        queue -= STEP * (rates[i] - rates[mean])
    return math.inf


@pytest.mark.parametrize("bend", [0.05, 0.2])
@pytest.mark.parametrize("cost", [0.002, 0.02])
def test_where_f_bends_evenly_the_rate_goes_by_the_root_of_the_queue(bend, cost):
    rates, accuracies = bent(bend)
    worth = queues(rates, slopes(rates, accuracies), 40, cost)
    for i in range(45, 85):  # beyond, what is smoothed ends
        assert rates[i] - rates[40] == pytest.approx(math.sqrt(2 * cost * worth[i] / bend), rel=0.15)


@pytest.mark.parametrize(("mean", "queue"), [(20, 0.3), (50, 0.1), (50, 1.0), (80, 0.3)])
def test_no_steady_pace_costs_less(mean, queue):
    rates, accuracies = bent(0.2)
    worth = queues(rates, slopes(rates, accuracies), mean, 0.01)
    best = lost(rates, accuracies, 0.01, mean, queue, lambda left: bisect_right(worth, left) - 1)
    steady = [lost(rates, accuracies, 0.01, mean, queue, lambda _, i=i: i) for i in range(mean + 1, len(rates))]
    at_once = lost(
        rates, accuracies, 0.01, mean, queue, lambda left: min(len(rates) - 1, mean + 1 + int(left / 0.0015))
    )
    assert best <= 1.02 * min(*steady, at_once)


@given(
    drops=st.lists(st.floats(0, 0.05), min_size=5, max_size=60),
    cost=st.just(0.0) | st.floats(1e-6, 1),
    data=st.data(),
)
def test_a_longer_queue_is_worked_off_no_slower(drops, cost, data):
    rates = [10.0 * (i + 1) for i in range(len(drops))]
    accuracies = [1 - float(drop) / len(drops) for drop in np.cumsum(drops)]
    at = data.draw(st.integers(0, len(drops) - 1))
    worth = queues(rates, slopes(rates, accuracies), at, cost)
    assert len(worth) == len(rates)
    assert worth == sorted(worth)
    assert worth[: at + 1] == [0.0] * (at + 1)
    dearer = queues(rates, slopes(rates, accuracies), at, 2 * cost + 0.1)
    assert all(b <= a for a, b in zip(worth, dearer, strict=True)), "what costs more stands less"


def test_slopes_never_ascend():
    found = slopes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0.9, 0.9, 0.8, 0.85, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5])
    assert found == sorted(found, reverse=True)


def test_waiting_that_costs_nothing_is_never_cut_short_for_accuracy():
    rates, accuracies = bent(0.2)
    worth = queues(rates, slopes(rates, accuracies), 40, 0.0)
    assert worth[60] == math.inf


def test_accuracy_that_is_worth_nothing_is_given_up_at_once():
    cost = Waiting(0.1, alpha=0.0, beta=0.1, gamma=0.0).cost(4, 100.0)
    rates, accuracies = bent(0.2)
    assert queues(rates, slopes(rates, accuracies), 40, cost) == [0.0] * len(rates)


def test_what_waiting_costs_is_the_rewards_to_say():
    weights = RewardConfig(alpha=2.0, beta=0.05, gamma=0.001)
    stands = waiting(0.1, weights)
    assert stands is not None
    assert stands.queue == 0.1
    assert stands.cost(4, 50.0) == pytest.approx((0.05 + 0.001 * 50) / (2.0 * 2.5))
    assert waiting(0.0, weights) is None
