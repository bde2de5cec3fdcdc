"""What a decision costs those behind it: hand-computed on one queue, and on the clusters it prices."""

import math

import pytest

from slim_scheduler.core.types import Decision
from slim_scheduler.training.episode import Episode
from slim_scheduler.training.imposed import BUSIEST, MEMORY, ImposedDelay, WorkQueue
from slim_scheduler.training.scenario import Scenarios
from tests.training.clusters import small_table, training_cluster

SPREAD = 0.2  # of accuracy, in the table


def test_a_queue_delays_those_who_come_while_it_is_worked_off():
    queue = WorkQueue()
    # Two tasks of 0.1 s: 0.2 s of work, and 2 / MEMORY tasks per second come meanwhile. Busy: 0.2 / MEMORY of the time.
    assert queue.take(10.0, 2, 0.1, 0.0) == pytest.approx(2 / MEMORY * 0.2 / (1 - 0.2 / MEMORY))
    # After 0.15 s, 0.05 s of it are left, and one more task of 0.1 s comes.
    fade = math.exp(-0.15 / MEMORY)
    tasks, busy = 2 / MEMORY * fade + 1 / MEMORY, 0.2 / MEMORY * fade + 0.1 / MEMORY
    assert queue.take(10.15, 1, 0.1, 0.0) == pytest.approx(tasks * 0.15 / (1 - busy))


def test_those_who_are_held_back_wait_as_well_and_a_full_device_has_a_limit():
    assert WorkQueue().take(0.0, 1, 1e-9, 50.0) == pytest.approx(50.0, rel=1e-3)
    assert WorkQueue().take(0.0, 10, 1.0, 0.0) == pytest.approx(10 / MEMORY * 10 / (1 - BUSIEST))


def test_wider_slower_and_busier_cost_more(tmp_path):
    config = training_cluster(tmp_path, reward={"beta": 1.0, "gamma": 0.0})
    facts = Scenarios(config).facts
    view = Episode(config, small_table(), seed=0).view

    def costs(*choices):
        imposed = ImposedDelay(facts, config.reward, SPREAD)
        return [imposed.charge(view, Decision(server, width, 1)) for server, width in choices]

    assert costs(("a", 1.0)) > costs(("a", 0.5)) > [0.0]
    assert costs(("c", 0.5)) > costs(("a", 0.5))
    first, second = costs(("a", 0.5), ("a", 0.5))
    assert second > first


def test_a_deep_queue_costs_no_more_than_what_leaves_only_the_slimmest_width(tmp_path):
    config = training_cluster(tmp_path, workload={"rate": 50_000.0}, reward={"beta": 1.0, "gamma": 0.0})
    facts = Scenarios(config).facts
    flooded = Episode(config, small_table(), seed=0, backlog=0.5)
    while flooded.view.now == 0.0:
        flooded.decide(Decision(next(s.name for s in flooded.view.servers.values() if s.available), 0.5, 1))
    waiting = flooded.view
    few = Episode(config, small_table(), seed=0).view

    def cost(view, width):
        return ImposedDelay(facts, config.reward, SPREAD).charge(view, Decision("a", width, 1))

    assert waiting.fifo_length > 10_000 > few.fifo_length
    assert cost(waiting, 1.0) - cost(waiting, 0.5) > SPREAD > cost(few, 1.0) - cost(few, 0.5)
    assert cost(waiting, 1.0) < 10 * SPREAD


def test_on_one_medium_moving_an_activation_costs_those_who_wait_for_it(tmp_path):
    network = {"latency_ms": 1.0, "shared_mbps": 1.0, "activations": True}
    config = training_cluster(tmp_path, ({}, {}), network=network, reward={"beta": 1.0, "gamma": 0.0})
    facts = Scenarios(config).facts
    episode = Episode(config, small_table(), seed=0)
    while episode.view.head.home is None:
        episode.decide(Decision("a", 0.5, 1))
    home = episode.view.head.home
    stays = ImposedDelay(facts, config.reward, SPREAD).charge(episode.view, Decision(home, 0.5, 1))
    moves = ImposedDelay(facts, config.reward, SPREAD).charge(episode.view, Decision("b", 0.5, 1))
    size = facts.shape.activation(0, episode.view.head.previous_width)
    seconds = size / facts.servers["b"].bytes_per_s
    assert moves - stays == pytest.approx(seconds * seconds / MEMORY / (1 - min(BUSIEST, seconds / MEMORY)))


def test_a_credit_says_what_its_decision_cost_others(tmp_path):
    config = training_cluster(tmp_path)
    imposed = ImposedDelay(Scenarios(config).facts, config.reward, SPREAD)
    episode = Episode(config, small_table(), seed=0, imposed=imposed)
    for _ in range(20):
        episode.decide(Decision("a", 0.5, 1) if episode.view.servers["a"].available else Decision("b", 0.5, 1))
    episode.end()
    assert all(credit.imposed > 0 for credit in episode.take_credits())
