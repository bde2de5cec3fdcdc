"""SlackFit on the made-up device: through both segments a batch of n takes n x (5 or 10) ms each, by width."""

import msgspec
import pytest
from numpy.random import default_rng

from slim_scheduler.core.router.slackfit import SlackFit
from slim_scheduler.core.types import Decision
from tests.core.facts import Table, cluster, seen, server, view

RNG = default_rng(0)


def pick(left: float, waiting: int = 8, **changes) -> Decision:
    router = SlackFit(cluster(server("a", bytes_per_s=1e15)), Table(), slo=10.0)
    return router.decide(view(seen("a"), slack=left, waiting=waiting, **changes), RNG)


@pytest.mark.parametrize(
    ("left_ms", "decision"),
    [
        (1000.0, Decision("a", 1.0, 8)),
        (160.1, Decision("a", 1.0, 8)),  # 8 x (10 + 10)
        (159.9, Decision("a", 0.5, 8)),  # (0.5, 1): the wide last segment is worth more than a wide first
        (80.1, Decision("a", 0.5, 8)),  # 8 x (5 + 5)
        (79.9, Decision("a", 0.5, 4)),  # no batch of 8 fits; of 4, (1, 1) takes 80 and (0.5, 1) 60
        (10.1, Decision("a", 0.5, 1)),
        (9.9, Decision("a", 0.5, 8)),  # too late for anything: narrow, and all of them
    ],
)
def test_the_slack_picks_batch_and_widths(left_ms, decision):
    assert pick(left_ms / 1e3) == decision


def test_a_batch_is_no_larger_than_what_waits():
    assert pick(1.0, waiting=3) == Decision("a", 1.0, 2)


def test_for_a_full_server_that_is_chosen_all_the_same_the_group_is_what_waits():
    router = SlackFit(cluster(server("a", bytes_per_s=1e15)), Table(), slo=10.0)
    full = view(seen("a", credit=0), slack=1.0, waiting=3)
    full = msgspec.structs.replace(full, choices=full.servers)
    assert router.decide(full, RNG) == Decision("a", 1.0, 2)


def test_where_no_group_is_small_enough_one_task_goes_at_the_width_that_its_slack_allows():
    facts = cluster(server("a", bytes_per_s=1e15), groups=(4, 8))
    router = SlackFit(facts, Table(), slo=10.0)
    assert router.decide(view(seen("a"), slack=1.0, waiting=3), RNG) == Decision("a", 1.0, 1)
    assert router.decide(view(seen("a"), slack=1.0, waiting=5), RNG) == Decision("a", 1.0, 4)


def test_in_the_last_segment_only_that_segment_has_to_fit():
    assert pick(0.0801, segment=1, previous=0.5) == Decision("a", 1.0, 8)
    assert pick(0.0799, segment=1, previous=0.5) == Decision("a", 0.5, 8)


def test_the_backlog_is_taken_off_the_slack_and_the_shortest_one_is_joined():
    router = SlackFit(cluster(server("a", bytes_per_s=1e15), server("b", bytes_per_s=1e15)), Table(), slo=10.0)
    busy, less = seen("a", {(0, 1.0): 16}), seen("b", {(0, 1.0): 8})  # 160 ms and 80 ms
    assert router.decide(view(busy, less, slack=0.2401), RNG) == Decision("b", 1.0, 8)
    assert router.decide(view(busy, less, slack=0.2399), RNG) == Decision("b", 0.5, 8)


def test_without_a_deadline_the_objective_counts_from_the_items_arrival():
    router = SlackFit(cluster(server("a", bytes_per_s=1e15)), Table(), slo=0.200)
    assert router.decide(view(seen("a"), item_age=0.0399), RNG).width == 1.0
    assert router.decide(view(seen("a"), item_age=0.0401), RNG).width == 0.5


def test_the_wait_of_this_segment_is_expected_again_before_the_next():
    assert pick(0.2001, age=0.040).width == 1.0
    assert pick(0.1999, age=0.040).width == 0.5
    assert pick(0.0801, segment=1, previous=0.5, age=0.040).width == 1.0


def test_only_allowed_widths_are_chosen():
    assert pick(1.0, widths=(0.5,)).width == 0.5
    assert pick(0.001, widths=(1.0,)).width == 1.0
