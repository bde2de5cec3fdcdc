"""The observation `planned`: to follow the plan is to copy its next choice."""

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng

from slim_scheduler.core.router.learned.encoders import build_encoder, escalation_of
from slim_scheduler.core.router.learned.planned import MOST_BEHIND
from slim_scheduler.core.router.plan.choices import pairs
from slim_scheduler.core.router.plan.follower import PlanFollower
from slim_scheduler.core.router.plan.plans import RHO, Plans
from slim_scheduler.core.types import Decision
from tests.core.facts import FACTS_OF_TWO, WIDTHS, Table, seen, view
from tests.core.test_escalation import table

FACTS = FACTS_OF_TWO
KINDS = [(0, None), (1, 0.5), (1, 1.0)]


def planned(rho=RHO):
    return build_encoder("planned", FACTS, 0.1, lambda: Plans(FACTS, Table(), rho))


def told(encoder, now):
    """The plan's next width and server, as the observation has them: one of each, or none."""
    seen, layout = encoder.encode(now), encoder.layout
    return seen.shared[layout.shared["next_width"]], seen.servers[:, layout.server["next_server"]]


@pytest.mark.parametrize("load", [39, 86, 126])
def test_the_plans_next_choice_is_what_the_plan_follower_decides(load):
    teacher = PlanFollower(Plans(FACTS, Table()))
    encoder, rng = planned(), default_rng(load)
    chosen = set()
    for step in range(400):
        segment, previous = KINDS[rng.integers(3)]
        full = seen("b", {(0, 0.5): 8}, credit=8 if rng.random() < 0.3 else 64)
        now = view(
            seen("a"),
            full,
            segment=segment,
            previous=previous,
            waiting=int(rng.integers(1, 9)),
            now=0.01 * step,
            completed=int(0.01 * step * load),
        )
        next_width, next_server = told(encoder, now)
        decision = teacher.decide(now, rng)
        theirs = decision.server, decision.width
        assert decision.width == WIDTHS[int(np.argmax(next_width))]
        assert next_width.sum() == 1.0
        assert decision.server == encoder.names[int(np.argmax(next_server))]
        assert next_server.sum() == 1.0
        assert decision.server != "b" or full.available
        encoder.took(now, decision)
        chosen.add(theirs)
    assert len(chosen) > 1


def test_what_was_decided_is_what_counts():
    encoder = planned()
    columns = encoder.layout.server
    now = view(seen("a"), seen("b"), segment=1, previous=0.5, waiting=8)
    before = encoder.encode(now).servers.copy()
    shares, behind = before[:, columns["planned_share"]], before[:, columns["behind"]]
    shared = np.argwhere((shares > 0) & (shares < 1))
    assert len(shared) > 1, "a plan that mixes"
    row, column = shared[0]
    encoder.took(now, Decision(encoder.names[row], WIDTHS[column], 8))
    after = encoder.encode(now).servers[:, columns["behind"]]
    assert after[row, column] < behind[row, column], "it is less behind"
    assert all(after[r, c] > behind[r, c] for r, c in shared[1:]), "the others are more"


def test_figures_are_bounded_and_shares_sum_to_one():
    encoder = planned()
    now = view(seen("a"), seen("b"), waiting=100_000)
    rows = encoder.encode(now).servers
    columns = encoder.layout.server
    assert np.abs(rows[:, columns["behind"]]).max() == MOST_BEHIND
    assert rows[:, columns["planned_share"]].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("rho", "widths"), [(0.9, 0), (1.5, 1)])
def test_with_all_planned_servers_full_the_width_is_told_where_the_queue_may_grow(rho, widths):
    full = view(seen("a", {(0, 0.5): 64}), seen("b", {(0, 0.5): 64}))
    next_width, next_server = told(planned(rho), full)
    assert (next_width.sum(), next_server.sum()) == (widths, 0)


def on_second_pass(now, margin):
    """The same view of a head on its second pass."""
    return msgspec.structs.replace(now, head=msgspec.structs.replace(now.head, again=True, margin=margin))


def test_a_policy_of_second_passes_sees_pass_and_margin_beside_the_plan():
    plans = Plans(FACTS, Table(), 1.0, pairs(FACTS, table()))
    encoder = build_encoder("escalating", FACTS, 0.1, lambda: plans)
    beside = build_encoder("planned", FACTS, 0.1, lambda: plans)
    columns, more = encoder.layout.shared, slice(beside.layout.shared.size, None)
    for again, margin in ((0.0, None), (1.0, 0.25)):
        now = view(seen("a"), seen("b"), waiting=4)
        if again:
            now = on_second_pass(now, margin)
        found, known = encoder.encode(now), beside.encode(now)
        assert (found.shared[columns["again"]], found.shared[columns["margin"]]) == (again, margin or 0.0)
        assert list(found.shared[more]) == [again, margin or 0.0], "new figures stand behind the known ones"
        assert np.array_equal(found.shared[: len(known.shared)], known.shared)
        assert np.array_equal(found.servers, known.servers)


def test_the_plan_that_is_seen_says_who_runs_again():
    plans = Plans(FACTS, table(), 1.0, pairs(FACTS, table()))
    encoder = build_encoder("escalating", FACTS, 0.1, lambda: plans)
    encoder.encode(view(seen("a"), seen("b"), waiting=0, now=1.0, completed=110))
    margins = table().margin((0.5, 0.5)).astype(float).tolist()
    decided = [encoder.second((0.5, 0.5), margin) for _ in range(10) for margin in margins]
    assert set(decided) == {None, (1.0, 1.0)}
    assert escalation_of(encoder) is encoder
    assert escalation_of(planned()) is None, "a plan of one pass lets nobody run again"
