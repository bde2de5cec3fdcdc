"""Second passes: which items run again, what becomes of them, and what they are answered with."""

import numpy as np
import pytest

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.dispatch.dispatcher import ANSWER_LEAD
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import CancelTasks, RequestCancelled, TasksReturned, TimerFired
from slim_scheduler.core.router.escalation import FixedEscalation, two_passes
from slim_scheduler.core.router.plan.choices import Choice, efficient, pairs, uniform
from slim_scheduler.core.router.plan.follower import PlanFollower
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.router.plan.program import PlanProgram
from slim_scheduler.core.types import Outcome
from tests.core.facts import cluster, seen, server, view
from tests.core.networks import SEGMENTS, arrive, dispatcher, done, only, replies, request, sent

WIDE = (1.0,) * SEGMENTS
NARROW = (0.5,) * SEGMENTS


def made(**limits):
    return dispatcher(escalation=FixedEscalation(WIDE, 0.4), **limits)


def through(machine, commands, start, margin):
    """Runs a block of one item through all segments, a second each; the commands at the end."""
    for segment in range(SEGMENTS):
        (block,) = sent(commands)
        at = start + segment + 1.0
        commands = machine.handle(done(block, at, margins=(margin,) if segment == SEGMENTS - 1 else ()), at)
    return commands


def test_a_sure_answer_is_given_at_once():
    machine = made()
    (answer,) = replies(through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.4))
    (item,) = answer.items
    assert (item.outcome, item.widths, item.passes, item.margin) == (Outcome.ANSWERED, NARROW, 1, 0.4)


def test_an_unsure_answer_runs_again_from_its_input_at_exactly_the_second_tuple():
    machine = made()
    commands = through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.39)
    assert not replies(commands)
    (block,) = sent(commands)
    assert (block.segment, block.previous_width, block.tasks[0].home, block.exact) == (0, None, None, True)
    assert block.width == 1.0, "whatever the router would have liked"
    (answer,) = replies(through(machine, commands, 3.0, margin=0.1))
    (item,) = answer.items
    assert (item.widths, item.other_widths, item.passes, item.margin) == (WIDE, NARROW, 2, 0.1)
    assert item.compute_s == pytest.approx(0.06), "of both passes"
    assert machine.counts["items"] == {**machine.counts["items"], "received": 1, "answered": 1, "in_flight": 0}


def test_the_activation_of_the_first_pass_is_dropped():
    machine = made(max_activation_bytes=1)
    commands = through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.0)
    assert sent(commands), "it held the only room there is"
    machine.check_invariants()


def test_who_asked_for_exact_widths_is_answered_with_them():
    machine = made()
    commands = through(machine, arrive(machine, request(1, widths=NARROW), 0.0), 0.0, margin=0.0)
    assert replies(commands)[0].items[0].passes == 1


def test_no_second_pass_begins_that_has_less_time_left_than_the_first_took():
    machine = made()
    commands = through(machine, arrive(machine, request(1, deadline=5.9), 0.0), 0.0, margin=0.0)
    assert replies(commands)[0].items[0].widths == NARROW


def test_an_item_on_its_second_pass_is_answered_with_the_first_before_its_deadline():
    machine = made()
    commands = through(machine, arrive(machine, request(1, deadline=6.5), 0.0), 0.0, margin=0.2)
    (block,) = sent(commands)
    at = 6.5 - ANSWER_LEAD
    commands = machine.handle(TimerFired(), at)
    (answer,) = replies(commands)
    (item,) = answer.items
    assert (answer.outcome, item.widths, item.passes, item.margin) == (Outcome.ANSWERED, NARROW, 1, 0.2)
    assert only(commands, CancelTasks)[0].tasks == (block.tasks[0].task_id,)
    assert not replies(machine.handle(done(block, 6.6), 6.6)), "a late word changes nothing"


def test_before_the_deadline_only_items_that_have_an_answer_end():
    machine = made(servers=("a",), credit=1)
    commands = arrive(machine, request(1, items=2, deadline=30.0), 0.0)
    for segment in range(SEGMENTS):  # the second item's segments run in between
        first, at = sent(commands)[0], 2.0 * segment + 1.0
        margins = (0.0,) if segment == SEGMENTS - 1 else ()
        commands = machine.handle(done(first, at, margins=margins), at)
        if segment < SEGMENTS - 1:
            (other,) = sent(commands)
            commands = machine.handle(done(other, at + 1.0), at + 1.0)
    assert not replies(machine.handle(TimerFired(), 30.0 - ANSWER_LEAD))
    (answer,) = replies(machine.handle(TimerFired(), 30.0))
    assert [item.outcome for item in answer.items] == [Outcome.ANSWERED, Outcome.EXPIRED]


def test_a_second_pass_that_cannot_be_finished_is_answered_with_the_first():
    machine = made(max_retries=0)
    (block,) = sent(through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.0))
    lost = TasksReturned("a", 0, tuple(task.task_id for task in block.tasks), "device lost")
    (answer,) = replies(machine.handle(lost, 4.0))
    assert (answer.outcome, answer.items[0].widths, answer.items[0].reason) == (Outcome.ANSWERED, NARROW, "")


def test_a_second_pass_that_is_tried_again_stays_the_second():
    machine = made()
    (block,) = sent(through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.0))
    lost = TasksReturned("a", 0, tuple(task.task_id for task in block.tasks), "device lost")
    (answer,) = replies(through(machine, machine.handle(lost, 4.0), 4.0, margin=0.0))
    assert (answer.items[0].widths, answer.items[0].passes) == (WIDE, 2)


def test_a_client_that_cancels_on_the_second_pass_gets_no_answer():
    machine = made()
    through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.0)
    (answer,) = replies(machine.handle(RequestCancelled(1), 4.0))
    assert answer.outcome is Outcome.CANCELLED


def test_two_passes_are_written_with_a_plus():
    assert two_passes("0.25") is None
    assert two_passes("0.25+0.5/1@0.4") == ("0.25", "0.5/1", 0.4)
    for wrong in ("0.25+1", "+1@0.5", "0.25+@0.5", "0.25+1@2"):
        with pytest.raises(ConfigError, match="is no pair of passes; such as"):
            two_passes(wrong)


# ---- plans of pairs: 100 items; narrow 60 right, whose margin is 0.9, wide 90; each of the narrow right is wide right


def table() -> AccuracyTable:
    narrow, wide = np.arange(100) < 60, np.arange(100) < 90
    margins = np.where(narrow, 0.9, np.linspace(0.1, 0.5, 100))
    right = {(0.5, 0.5): narrow, (0.5, 1.0): narrow, (1.0, 0.5): narrow, (1.0, 1.0): wide}
    return AccuracyTable(right, split="held-out", data="made up", margins=dict.fromkeys(right, margins))


FACTS = cluster(server("a"), server("b"))  # 10 ms of device time narrow, 20 wide


def test_a_pair_costs_what_its_second_pass_is_taken_by_and_is_right_where_either_is_that_answers():
    found = {choice.again: choice for choice in pairs(FACTS, table(), uniform(table()))}
    for share, choice in found.items():
        assert (choice.first, choice.second) == ((0.5, 0.5), (1.0, 1.0))
        below = table().margin((0.5, 0.5)) < choice.threshold
        assert below.mean() == pytest.approx(share)
        assert choice.accuracy == pytest.approx(0.6 + 0.9 * 0 + np.mean(below & (np.arange(100) < 90)), abs=1e-6)


def test_pairs_are_made_of_efficient_tuples_and_those_that_a_mix_beats_are_left_out():
    assert efficient(FACTS, table()) == [(0.5, 0.5), (1.0, 1.0)]
    sure = AccuracyTable(
        {t: table().correct(t) for t in table().tuples},
        split="held-out",
        data="made up",
        margins=dict.fromkeys(table().tuples, np.linspace(0, 1, 100)),  # the wrong ones are the surest
    )
    assert pairs(FACTS, sure, uniform(sure)) == [], "a mix of the two tuples is better"


def test_the_program_spends_spare_time_on_second_passes():
    # 160 items/s narrow take 1.6 of the 2 seconds; 0.4 are left for 20 of the 64 wrong ones.
    program = PlanProgram(FACTS, table(), 1.0, pairs(FACTS, table(), uniform(table())))
    without = PlanProgram(FACTS, table()).most_accurate(160.0)
    plan = program.most_accurate(160.0)
    assert plan.accuracy > without.accuracy
    again = sum(rate * choice.again for choice, rate in plan.choices.items())
    wide = sum(rate for (_, step), rate in plan.steps.items() if step.again and step.segment == 0)
    assert wide == pytest.approx(again)
    assert sum(plan.work.values()) == pytest.approx(2.0)


def test_lp_lets_as_many_items_run_again_as_its_plan_says_and_fewer_under_more_load():
    shares = []
    for load in (110, 180):
        plans = Plans(FACTS, table(), rho=1.0, pairs=pairs(FACTS, table(), uniform(table())))
        router = PlanFollower(plans)
        router.decide(view(seen("a"), seen("b"), waiting=0, now=1.0, completed=load), np.random.default_rng(0))
        margins = table().margin((0.5, 0.5)).astype(float).tolist()
        decided = [router.second((0.5, 0.5), margin) for _ in range(10) for margin in margins]
        assert set(decided) <= {None, (1.0, 1.0)}
        shares.append(np.mean([second is not None for second in decided]))
    assert shares[0] > shares[1] > 0


def test_a_choice_is_named_as_a_routers_w():
    assert Choice((0.5, 0.5), 0.6).name == "0.5"
    assert Choice((0.5, 1.0), 0.7, (1.0, 1.0), 0.4, 0.2).name == "0.5/1+1@0.4"
