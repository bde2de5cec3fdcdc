"""Second passes: which items run again, what becomes of them, and what they are answered with."""

from itertools import cycle
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.confidence import Calibration, Logistic
from slim_scheduler.core.dispatch.dispatcher import ANSWER_LEAD
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import CancelTasks, RequestCancelled, ServerLeft, TasksReturned, TimerFired
from slim_scheduler.core.router.escalation import Choice, FixedEscalation, two_passes
from slim_scheduler.core.router.plan.choices import efficient, pairs
from slim_scheduler.core.router.plan.follower import PlanFollower, PlanLedger
from slim_scheduler.core.router.plan.plans import HeadKind, Plans, Shares
from slim_scheduler.core.router.plan.program import PlanProgram
from slim_scheduler.core.types import Decision, Outcome
from slim_scheduler.core.view import Head
from tests.core.facts import Table, cluster, seen, server, view
from tests.core.networks import SEGMENTS, Scripted, arrive, dispatcher, done, jsq, only, replies, report, request, sent

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


def test_no_second_pass_begins_that_would_not_fit_into_half_of_the_time_left():
    machine = made()
    commands = through(machine, arrive(machine, request(1, deadline=8.9), 0.0), 0.0, margin=0.0)
    assert replies(commands)[0].items[0].widths == NARROW


# How long second passes take, of items whose first one takes 0.3 s


def quick(machine, commands, start):
    """As `through`, a tenth of a second each."""
    for segment in range(SEGMENTS):
        (block,) = sent(commands)
        at = start + 0.1 * (segment + 1)
        commands = machine.handle(done(block, at, margins=(0.0,) * (segment == SEGMENTS - 1)), at)
    return commands


def after_second_passes_of(seconds, machine=None, numbers=range(1, 800), anytime=True):
    """A machine in which second passes took so long, and the time: one at a time, with a deadline far away."""
    machine, start = machine or made(), 0.0
    for number in numbers:
        event = request(number, at=start, deadline=start + 100.0, anytime=anytime)
        commands = quick(machine, arrive(machine, event, start), start)
        assert sent(commands), "there is time"
        assert replies(quick(machine, commands, start + seconds))
        start += seconds + 0.3
    return machine, start


def runs_again(machine, now, left):
    """Whether an item does whose first pass has just ended, `left` seconds before its deadline."""
    arriving = request(9000 + round(now), at=now, deadline=now + 0.3 + left)
    return bool(sent(quick(machine, arrive(machine, arriving, now), now)))


@pytest.mark.parametrize(("left", "again"), [(1.4, False), (1.6, True)])
def test_a_second_pass_is_begun_where_half_of_the_time_left_is_what_others_took(left, again):
    machine, now = after_second_passes_of(0.9)
    assert runs_again(machine, now, left) == again


def test_what_others_took_is_forgotten_while_no_second_pass_ends():
    machine, now = after_second_passes_of(0.9)
    assert not runs_again(machine, now, 0.7)
    assert runs_again(machine, now + 10.0, 0.7), "as long as the first again"


def test_second_passes_that_were_cut_at_their_deadline_count():
    machine, now = after_second_passes_of(0.3)
    begun = 0
    for number in range(1000, 1200):
        event = request(number, at=now, deadline=now + 3.0)
        if not sent(quick(machine, arrive(machine, event, now), now)):
            break
        begun, now = begun + 1, now + 3.0
        assert replies(machine.handle(TimerFired(), now - ANSWER_LEAD))[-1].items[0].passes == 1
        for name in machine.servers:
            machine.handle(report(name, now), now)
    assert 20 < begun < 100, "they took 9 times as long as the first, at least"


def test_who_takes_no_first_answer_does_not_count():
    machine, now = after_second_passes_of(0.9, anytime=False)
    assert runs_again(machine, now, 0.7)


def test_an_item_on_its_second_pass_is_answered_with_the_first_before_its_deadline():
    machine = made()
    commands = through(machine, arrive(machine, request(1, deadline=9.5), 0.0), 0.0, margin=0.2)
    (block,) = sent(commands)
    at = 9.5 - ANSWER_LEAD
    commands = machine.handle(TimerFired(), at)
    (answer,) = replies(commands)
    (item,) = answer.items
    assert (answer.outcome, item.widths, item.passes, item.margin) == (Outcome.ANSWERED, NARROW, 1, 0.2)
    assert only(commands, CancelTasks)[0].tasks == (block.tasks[0].task_id,)
    assert not replies(machine.handle(done(block, 9.6), 9.6)), "a late word changes nothing"


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


def test_a_request_of_many_items_ends_its_second_passes_once():
    machine = made(servers=("a",), credit=64)
    commands = arrive(machine, request(1, items=50, deadline=90.0), 0.0)
    for at in range(3 * SEGMENTS):
        for block in sent(commands)[:1]:
            last = block.segment == SEGMENTS - 1
            commands = machine.handle(
                done(block, at + 1.0, margins=(0.0,) * len(block.tasks) if last else ()), at + 1.0
            )
        if any(task.again for block in sent(commands) for task in block.tasks):
            break
    assert sum(flight.first is not None for flight in machine._ledger.items.values()) > 1
    assert len(machine._deadlines) == 2, "the deadline, and the time just before it"


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


def test_who_stops_the_engine_answers_with_what_there_is():
    machine = made()
    through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.0)
    arrive(machine, request(2), 4.0)
    (first,) = replies(machine.handle(RequestCancelled(1, stopping=True), 4.0))
    assert (first.outcome, first.items[0].widths, first.items[0].passes) == (Outcome.ANSWERED, NARROW, 1)
    (other,) = replies(machine.handle(RequestCancelled(2, stopping=True), 4.0))
    assert (other.outcome, other.reason) == (Outcome.CANCELLED, "the engine is stopping")


def test_a_server_lost_in_the_second_pass_is_made_up_for_and_nobody_is_refused():
    machine = made(servers=("a", "b"), no_server_timeout=5.0)
    (block,) = sent(through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.0))
    commands = machine.handle(ServerLeft(block.server, "its process died"), 4.0)
    (other,) = sent(commands)
    assert (other.server, other.segment, other.exact) == ({"a": "b", "b": "a"}[block.server], 0, True)
    assert not replies(machine.handle(ServerLeft(other.server, "its process died"), 4.5))
    (answer,) = replies(machine.handle(TimerFired(), 10.0))
    assert (answer.outcome, answer.items[0].widths, answer.items[0].passes) == (Outcome.ANSWERED, NARROW, 1)


def test_the_cost_of_either_pass_is_told():
    machine = made()
    commands = through(machine, arrive(machine, request(1), 0.0), 0.0, margin=0.2)
    (block,) = sent(commands)
    commands = machine.handle(msgspec.structs.replace(done(block, 4.0), energy_j=2.0), 4.0)
    (item,) = replies(machine.handle(RequestCancelled(1, stopping=True), 4.5))[0].items
    assert (item.compute_s, item.other_compute_s) == pytest.approx((0.04, 0.01))
    assert (item.energy_j, item.other_energy_j) == (None, 2.0), "of the first nobody knows it"
    commands = through(machine, arrive(machine, request(2), 5.0), 5.0, margin=0.2)
    (item,) = replies(through(machine, commands, 8.0, margin=0.2))[0].items
    assert (item.compute_s, item.other_compute_s) == pytest.approx((0.06, 0.03))


def test_the_energy_of_either_pass_is_told():
    def measured(block, at, joules):
        return msgspec.structs.replace(done(block, at, margins=(0.2,)), energy_j=joules)

    machine, now = made(), 0.0
    commands = arrive(machine, request(1), now)
    for joules in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        (block,) = sent(commands)
        now += 1.0
        commands = machine.handle(measured(block, now, joules), now)
    (item,) = replies(commands)[0].items
    assert (item.passes, item.energy_j, item.other_energy_j) == (2, 63.0, 7.0)


# ---- second passes that go on from an activation of the first

LAST_WIDE = (0.5, 0.5, 1.0)
REST_WIDE = (0.5, 1.0, 1.0)


class Elsewhere(Scripted):
    """Each decision goes to another server than the one before."""

    def __init__(self, *servers):
        super().__init__(None)
        self._servers = cycle(servers)

    def decide(self, view, rng):
        return Decision(next(self._servers), 0.5, 8)


def resuming(second=REST_WIDE, router=None, servers=("a",), **limits):
    return dispatcher(router, servers, escalation=FixedEscalation(second, 0.4), **limits)


def ran_once(machine, wider_from=SEGMENTS, **asks):
    """The commands after one item's first pass, which is unsure; from a segment on a wider instance was free."""
    commands = arrive(machine, request(1, **asks), 0.0)
    for segment in range(SEGMENTS):
        (block,) = sent(commands)
        at, margins = segment + 1.0, (0.0,) if segment == SEGMENTS - 1 else ()
        width = 0.75 if segment >= wider_from else None
        commands = machine.handle(done(block, at, width=width, margins=margins), at)
        machine.check_invariants()
    return commands


@pytest.mark.parametrize(("second", "segment"), [(WIDE, 0), (REST_WIDE, 1), (LAST_WIDE, 2), ((0.5, 0.75, 0.5), 1)])
def test_a_second_pass_goes_on_where_the_tuples_differ(second, segment):
    machine = resuming(second)
    commands = ran_once(machine)
    (block,) = sent(commands)
    (task,) = block.tasks
    assert (block.segment, block.width, block.exact, task.again) == (segment, second[segment], True, True)
    assert (task.home, block.previous_width) == ((None, None) if segment == 0 else ("a", 0.5))
    for at in range(segment, SEGMENTS):
        (block,) = sent(commands)
        assert not block.tasks[0].keep, "there is no third pass"
        margins = (0.1,) if at == SEGMENTS - 1 else ()
        commands = machine.handle(done(block, 4.0 + at, margins=margins), 4.0 + at)
        machine.check_invariants()
    (item,) = replies(commands)[0].items
    assert (item.widths, item.other_widths, item.passes, item.margin) == (second, NARROW, 2, 0.1)
    assert len(item.servers) == SEGMENTS
    assert item.compute_s - item.other_compute_s == pytest.approx(0.01 * (SEGMENTS - segment)), "of what ran again"


def test_only_activations_that_a_second_pass_may_go_on_from_are_kept():
    for second, kept in ((WIDE, [False] * 3), (REST_WIDE, [False, True, False]), (LAST_WIDE, [False, True, True])):
        machine = resuming(second)
        commands, found = arrive(machine, request(1), 0.0), []
        for segment in range(SEGMENTS):
            (block,) = sent(commands)
            found.append(block.tasks[0].keep)
            commands = machine.handle(done(block, segment + 1.0, margins=(0.9,) * (segment == 2)), segment + 1.0)
        assert found == kept


def test_who_ran_wider_on_the_way_goes_on_from_what_is_still_alike():
    for wider_from, segment in ((0, 0), (1, 1), (2, 2)):
        (block,) = sent(ran_once(resuming(LAST_WIDE), wider_from))
        assert block.segment == segment


def test_what_is_kept_counts_as_activations_until_the_second_pass_has_read_it():
    """Each is 128 bytes: in the last segment its input and what is kept are two."""
    for second, room in ((WIDE, True), (REST_WIDE, False)):
        machine = resuming(second, max_activation_bytes=256)
        commands = arrive(machine, request(1), 0.0)
        for segment in range(SEGMENTS - 1):
            (block,) = sent(commands)
            commands = machine.handle(done(block, segment + 1.0), segment + 1.0)
        (last,) = sent(commands)
        assert bool(sent(arrive(machine, request(2), 2.5))) == room
    begun = sent(machine.handle(done(last, 3.0, margins=(0.0,)), 3.0))
    assert {block.tasks[0].item for block in begun} == {100, 200}, "of two activations one is left"


class Changing:
    """Keeps every activation, and decides when the first pass is done."""

    pairs = ()

    def __init__(self, second):
        self._second = second

    def second(self, ran, margin):
        return self._second

    def may_resume(self, ran):
        return True


@pytest.mark.parametrize(
    ("second", "segment"), [((0.25, 1.0, 1.0), 0), (REST_WIDE, 1), (LAST_WIDE, 2), ((0.75, 0.5, 0.5), 0)]
)
def test_of_what_was_kept_a_second_pass_goes_on_only_from_what_its_own_tuple_begins_with(second, segment):
    machine = dispatcher(escalation=Changing(second))
    (block,) = sent(ran_once(machine))
    assert block.segment == segment
    (item,) = replies(rest(machine, block)).pop().items
    assert (item.widths, item.passes) == (second, 2)


def rest(machine, block):
    """The commands at the end of a second pass."""
    for at in range(block.segment, SEGMENTS):
        commands = machine.handle(done(block, 4.0 + at, margins=(0.1,) * (at == SEGMENTS - 1)), 4.0 + at)
        machine.check_invariants()
        for block in sent(commands):
            assert block.segment == at + 1
    return commands


def test_nothing_is_kept_for_who_asks_for_widths_or_confidence():
    for asked in ({"widths": NARROW}, {"confidence_floor": 0.9}):
        machine = dispatcher(calibration=EVEN, escalation=Changing(REST_WIDE))
        (block,) = sent(arrive(machine, request(1, **asked), 0.0))
        (block,) = sent(machine.handle(done(block, 1.0), 1.0))
        assert not block.tasks[0].keep


def test_nobody_runs_again_at_no_more_than_what_has_run():
    for second, again in ((NARROW, False), ((0.25, 0.5, 0.5), False), ((0.25, 0.25, 0.75), True)):
        (commands,) = [ran_once(dispatcher(escalation=FixedEscalation(second, 0.4)))]
        assert bool(sent(commands)) == again


def test_a_second_pass_begins_from_the_input_where_the_kept_activation_is_lost():
    machine = resuming(router=Elsewhere("a", "b", "b", "b"), servers=("a", "b"))
    commands = arrive(machine, request(1), 0.0)
    for segment in range(SEGMENTS):
        (block,) = sent(commands)
        if segment == 1:  # which holds what segment 1 made; segment 0's output lies at a
            assert (block.server, block.tasks[0].home, block.tasks[0].keep) == ("b", "a", True)
        at, margins = segment + 1.0, (0.0,) if segment == SEGMENTS - 1 else ()
        if segment == 2:
            machine.handle(ServerLeft("a", "its process died"), 2.5)
        commands = machine.handle(done(block, at, margins=margins), at)
        machine.check_invariants()
    (block,) = sent(commands)
    assert (block.server, block.segment, block.tasks[0].home, block.tasks[0].again) == ("b", 0, None, True)
    (item,) = replies(through(machine, commands, 4.0, margin=0.1))[0].items
    assert (item.widths, item.passes) == (REST_WIDE, 2)


def test_a_resumed_pass_of_which_nothing_ran_does_not_count_as_another():
    machine = resuming()
    commands = ran_once(machine, deadline=20.0)
    assert sent(commands)[0].segment > 0
    machine._wake_at = 0.0
    (answer,) = replies(machine.handle(TimerFired(), 20.0 - ANSWER_LEAD))
    assert (answer.items[0].passes, answer.items[0].other_widths) == (1, ())


def test_a_resumed_pass_whose_activation_is_not_found_begins_from_the_input():
    machine = resuming()
    (block,) = sent(ran_once(machine))
    lost = TasksReturned("a", 0, (block.tasks[0].task_id,), "its activation is lost", activation_lost=True)
    commands = machine.handle(lost, 4.0)
    assert sent(commands)[0].segment == 0
    (item,) = replies(through(machine, commands, 4.0, margin=0.1))[0].items
    assert (item.widths, item.passes, item.other_widths) == (REST_WIDE, 2, NARROW)


def test_a_resumed_pass_that_is_tried_again_goes_on_from_the_same_activation():
    machine = resuming()
    (block,) = sent(ran_once(machine))
    (again,) = sent(machine.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), 4.0))
    assert (again.segment, again.tasks[0].home) == (1, "a")


# ---- confidence floors: a margin of 0.5 is a confidence of about 0.75

EVEN = Calibration(dict.fromkeys((0.25, 0.5, 0.75, 1.0), Logistic(1.0, 0.0)), "held-out")


def floored(**limits):
    return dispatcher(calibration=EVEN, **limits)


def test_an_answer_below_the_confidence_floor_runs_again_at_the_widest():
    machine = floored()
    assert machine.wants_margins
    assert replies(through(machine, arrive(machine, request(1, confidence_floor=0.74), 0.0), 0.0, margin=0.5))
    commands = through(machine, arrive(machine, request(2, confidence_floor=0.75), 0.0), 0.0, margin=0.49)
    (answer,) = replies(through(machine, commands, 3.0, margin=0.1))
    (item,) = answer.items
    assert (item.widths, item.passes, item.margin) == (WIDE, 2, 0.1), "the widest has answered"
    commands = arrive(machine, request(3, confidence_floor=1.0, widths=WIDE), 9.0)
    assert replies(through(machine, commands, 9.0, margin=0.1))[0].items[0].passes == 1


def test_fixed_widths_are_those_of_the_first_pass_where_there_is_a_confidence_floor():
    machine = floored()
    quarter = (0.25,) * SEGMENTS
    commands = arrive(machine, request(1, confidence_floor=0.9, widths=quarter), 0.0)
    (item,) = replies(through(machine, through(machine, commands, 0.0, margin=0.2), 3.0, margin=0.9))[0].items
    assert (item.widths, item.other_widths) == (WIDE, quarter)


def test_a_confidence_floor_decides_instead_of_the_routers_plan():
    machine = dispatcher(calibration=EVEN, escalation=FixedEscalation(WIDE, 1.0))
    commands = arrive(machine, request(1, confidence_floor=0.6), 0.0)
    assert replies(through(machine, commands, 0.0, margin=0.4))[0].items[0].passes == 1


def test_a_confidence_floor_needs_a_calibration():
    (answer,) = replies(dispatcher().handle(request(1, confidence_floor=0.5), 0.0))
    assert (answer.outcome, answer.retry_after) == (Outcome.REJECTED, None)
    assert answer.reason.startswith("confidence_floor needs a model whose answers were measured; run `slim accuracy`")


def test_who_wants_no_answer_below_the_floor_gets_none_at_the_deadline():
    machine = floored()
    for number, anytime in ((1, True), (2, False)):
        event = request(number, at=10.0 * number, deadline=10.0 * number + 9.5, confidence_floor=0.9, anytime=anytime)
        through(machine, arrive(machine, event, 10.0 * number), 10.0 * number, margin=0.2)
        early = replies(machine.handle(TimerFired(), 10.0 * number + 9.5 - ANSWER_LEAD))
        (answer,) = early or replies(machine.handle(TimerFired(), 10.0 * number + 9.5))
        assert answer.outcome is (Outcome.ANSWERED if anytime else Outcome.EXPIRED)
        assert bool(early) == anytime


# ---- accuracy floors count on plans: narrow 0.6, wide 0.9, and narrow with the half that is unsure again 0.85


class Measured:
    def top1(self, widths):
        return {NARROW: 0.6, WIDE: 0.9}.get(widths, 0.3)


PAIRS = (Choice(NARROW, 0.85, WIDE, 0.5, 0.5), Choice(NARROW, 0.8, WIDE, 0.3, 0.3))


def test_an_accuracy_floor_leaves_widths_that_reach_it_in_two_passes():
    def widths(floor, pairs):
        machine = dispatcher(accuracy=Measured(), escalation=FixedEscalation(WIDE, 0.5, pairs))
        return sent(arrive(machine, request(1, accuracy_floor=floor), 0.0))[0].width

    assert widths(0.7, ()) == 1.0
    assert widths(0.7, PAIRS) == 0.5, "which the router prefers"
    assert widths(0.86, PAIRS) == 1.0


def test_a_plan_whose_second_tuple_is_no_wider_is_no_second_pass_for_a_floor():
    class Known:
        def top1(self, widths):
            return {WIDE: 0.7, NARROW: 0.6}.get(widths, 0.3)

    pair = Choice(WIDE, 0.75, NARROW, 0.5, 0.5)
    machine = dispatcher(jsq("1"), accuracy=Known(), escalation=FixedEscalation(WIDE, 0.5, (pair,)))
    commands = through(machine, arrive(machine, request(1, accuracy_floor=0.72), 0.0), 0.0, 0.1)
    assert replies(commands)[0].items[0].passes == 1


@pytest.mark.parametrize(("floor", "margin", "passes"), [(0.7, 0.29, 2), (0.7, 0.3, 1), (0.82, 0.4, 2), (0.6, 0.0, 1)])
def test_the_cheapest_plan_that_meets_an_accuracy_floor_says_who_runs_again(floor, margin, passes):
    machine = dispatcher(accuracy=Measured(), escalation=FixedEscalation(WIDE, 0.5, PAIRS))
    commands = through(machine, arrive(machine, request(1, accuracy_floor=floor), 0.0), 0.0, margin)
    if passes == 2:
        commands = through(machine, commands, 3.0, margin)
    assert replies(commands)[0].items[0].passes == passes


@pytest.mark.parametrize(("floor", "margin", "passes"), [(0.6, 0.2, 2), (0.6, 0.3, 1), (0.9, 0.3, 2)])
def test_a_request_with_both_floors_runs_again_where_either_asks_for_it(floor, margin, passes):
    """The accuracy floor asks below a margin of 0.3, a confidence floor of 0.6 below 0.2, one of 0.9 below 0.8."""
    machine = dispatcher(accuracy=Measured(), calibration=EVEN, escalation=FixedEscalation(WIDE, 0.5, PAIRS))
    commands = arrive(machine, request(1, accuracy_floor=0.7, confidence_floor=floor), 0.0)
    commands = through(machine, commands, 0.0, margin)
    if passes == 2:
        commands = through(machine, commands, 3.0, margin)
    (item,) = replies(commands)[0].items
    assert (item.passes, item.widths) == (passes, WIDE if passes == 2 else NARROW)


def test_who_was_led_off_the_plan_of_an_accuracy_floor_runs_again_at_the_widest():
    machine = dispatcher(accuracy=Measured(), escalation=FixedEscalation(WIDE, 0.5, PAIRS))
    commands = arrive(machine, request(1, accuracy_floor=0.7), 0.0)
    for segment, width in enumerate((0.5, 0.75, 0.75)):  # a wider instance was free
        (block,) = sent(commands)
        margins = (0.99,) if segment == SEGMENTS - 1 else ()
        commands = machine.handle(done(block, segment + 1.0, width=width, margins=margins), segment + 1.0)
    (item,) = replies(through(machine, commands, 3.0, margin=0.9))[0].items
    assert (item.widths, item.passes) == (WIDE, 2)


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
    found = {choice.again: choice for choice in pairs(FACTS, table())}
    for share, choice in found.items():
        assert (choice.first, choice.second) == ((0.5, 0.5), (1.0, 1.0))
        below = table().margin((0.5, 0.5)) < choice.threshold
        assert below.mean() == pytest.approx(share)
        assert choice.accuracy == pytest.approx(0.6 + 0.9 * 0 + np.mean(below & (np.arange(100) < 90)), abs=1e-6)


def test_pairs_begin_with_efficient_tuples_and_those_that_a_mix_beats_are_left_out():
    assert efficient(FACTS, table()) == [(0.5, 0.5), (1.0, 1.0)]
    sure = AccuracyTable(
        {t: table().correct(t) for t in table().tuples},
        split="held-out",
        data="made up",
        margins=dict.fromkeys(table().tuples, np.linspace(0, 1, 100)),  # the wrong ones are the surest
    )
    assert pairs(FACTS, sure) == [], "a mix of the two tuples is better"


def test_the_program_spends_spare_time_on_second_passes():
    # 160 items/s narrow take 1.6 of the 2 seconds; 0.4 are left for 20 of the 64 wrong ones.
    program = PlanProgram(FACTS, table(), 1.0, pairs(FACTS, table()))
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
        plans = Plans(FACTS, table(), rho=1.0, pairs=pairs(FACTS, table()))
        router = PlanFollower(plans)
        router.decide(view(seen("a"), seen("b"), waiting=0, now=1.0, completed=load), np.random.default_rng(0))
        margins = table().margin((0.5, 0.5)).astype(float).tolist()
        decided = [router.second((0.5, 0.5), margin) for _ in range(10) for margin in margins]
        assert set(decided) <= {None, (1.0, 1.0)}
        shares.append(np.mean([second is not None for second in decided]))
    assert shares[0] > shares[1] > 0


def resumed_table() -> AccuracyTable:
    """The same where a wide last segment is all that is needed."""
    narrow, wide = np.arange(100) < 60, np.arange(100) < 90
    margins = np.where(narrow, 0.9, np.linspace(0.1, 0.5, 100))
    right = {(0.5, 0.5): narrow, (0.5, 1.0): wide, (1.0, 0.5): narrow, (1.0, 1.0): wide}
    return AccuracyTable(right, split="held-out", data="made up", margins=dict.fromkeys(right, margins))


def test_a_pair_that_begins_alike_costs_what_differs():
    found = pairs(FACTS, resumed_table())
    assert {(choice.first, choice.second, choice.shared) for choice in found} == {((0.5, 0.5), (0.5, 1.0), 1)}
    # 14 ms for what the second tuple alone does in 15; repeating the first segment it would be 16.
    assert max(choice.accuracy for choice in found) == pytest.approx(0.9)
    # 160 items/s narrow take 1.6 of the 2 seconds; the 0.4 that are left are enough for 40 wide last segments.
    plan = PlanProgram(FACTS, resumed_table(), 1.0, found).most_accurate(160.0)
    again = sum(rate * choice.again for choice, rate in plan.choices.items())
    assert again == pytest.approx(40.0, rel=0.02)
    steps = {step for (_, step) in plan.steps if step.again}
    assert {(step.segment, step.previous_width, step.width) for step in steps} == {(1, 0.5, 1.0)}
    assert sum(plan.work.values()) == pytest.approx(2.0)


def linked(**servers):
    """`servers`: how long a segment takes at each, by segment and width; links of `bytes_per_s` and no other limit."""
    bytes_per_s = servers.pop("bytes_per_s")
    seconds = {name: lambda s, p, w, b, f=f: f(s, w) * b for name, f in servers.items()}
    made = [server(name, seconds[name], bytes_per_s=bytes_per_s) for name in servers]
    return cluster(*made, move_activations=True)


RESUMED = Choice((0.5, 0.5), 0.95, (0.5, 1.0), 0.4, 0.5)  # half of the items run the last segment again


@pytest.mark.parametrize(("bytes_per_s", "carried"), [(10_800, True), (10_700, False)])
def test_one_server_moves_nothing_for_second_passes(bytes_per_s, carried):
    """50 items/s: 100 bytes of input, and 46 bytes of message for each of 2.5 tasks, are 10,750 bytes/s."""
    facts = linked(a=lambda segment, width: 0.001, bytes_per_s=bytes_per_s)
    plan = PlanProgram(facts, resumed_table(), 1.0, [RESUMED]).most_accurate(50.0)
    assert (plan.choices.get(RESUMED, 0.0) == pytest.approx(50.0, rel=1e-3)) == carried


@pytest.mark.parametrize(("bytes_per_s", "carried"), [(11_700, True), (11_500, False)])
def test_an_activation_that_a_second_pass_reads_elsewhere_leaves_its_server(bytes_per_s, carried):
    """Only b can run the last segment wide. From a go, for each of 50 items/s, 46 bytes of message for either segment,
    40 of answer, and half of the 200 bytes of an activation: 11,600 bytes/s."""
    facts = linked(
        a=lambda segment, width: 0.001 if segment == 0 or width == 0.5 else 1e3,
        b=lambda segment, width: 0.001 if segment == 1 and width == 1.0 else 1e3,
        bytes_per_s=bytes_per_s,
    )
    plan = PlanProgram(facts, Table(), 1.0, [RESUMED]).most_accurate(50.0)
    assert (plan.choices.get(RESUMED, 0.0) == pytest.approx(50.0, rel=1e-3)) == carried


def test_what_lies_at_its_home_goes_where_the_plan_has_its_pass():
    """Here the first pass's last segment stays at a, and the second's is read by b."""
    facts = linked(
        a=lambda segment, width: 0.001 if segment == 0 or width == 0.5 else 1e3,
        b=lambda segment, width: 0.001 if segment == 1 and width == 1.0 else 1e3,
        bytes_per_s=1e6,
    )
    plan = PlanProgram(facts, Table(), 1.0, [RESUMED]).most_accurate(50.0)
    shares = Shares(plan)
    for again, target in ((False, ("a", 0.5)), (True, ("b", 1.0))):
        assert shares.of(HeadKind(1, 0.5, "a", again)) == pytest.approx({target: 1.0}, rel=1e-3)


def test_a_plan_lets_nobody_run_again_at_no_more_than_what_has_run():
    router = PlanFollower(Plans(FACTS, resumed_table(), 1.0, pairs(FACTS, resumed_table())))
    router.decide(view(seen("a"), seen("b"), waiting=0, now=1.0, completed=110), np.random.default_rng(0))
    assert (0.5, 1.0) in {router.second((0.5, 0.5), 0.0) for _ in range(100)}
    for ran in ((0.5, 1.0), (1.0, 1.0)):
        assert {router.second(ran, 0.0) for _ in range(100)} == {None}


def test_activations_are_kept_for_the_plan_that_is_followed():
    router = PlanFollower(Plans(FACTS, resumed_table(), 1.0, pairs(FACTS, resumed_table())))
    assert not router.may_resume((0.5,)), "before the first plan"
    router.decide(view(seen("a"), seen("b"), waiting=0, now=1.0, completed=110), np.random.default_rng(0))
    assert router.may_resume((0.5,))
    assert not router.may_resume((1.0,))


@pytest.mark.parametrize(
    ("second", "shared"), [((0.5, 0.5, 1.0), 2), ((0.5, 1.0, 0.5), 1), ((1.0, 0.5, 0.5), 0), ((0.5, 0.5, 0.5), 2)]
)
def test_tuples_share_the_segments_before_the_first_difference_and_never_all(second, shared):
    assert Choice((0.5, 0.5, 0.5), 0.6, second, 0.4, 0.2).shared == shared


@pytest.mark.parametrize("others", [0, 1, 4])
def test_second_passes_keep_the_plans_shares_whatever_other_widths_their_kind_has(others):
    """The plan has 60 % of the narrow second passes on a; `others` wide ones of the same kind come after each."""
    ledger = PlanLedger(Plans(FACTS, Table()))
    ledger._plan_for = lambda view: None
    ledger._shares = SimpleNamespace(
        of=lambda kind: {("a", 0.5): 0.12, ("b", 0.5): 0.08, ("a", 1.0): 0.4, ("b", 1.0): 0.4}
    )
    sent_narrow = {"a": 0, "b": 0}
    for _ in range(500):
        for width in (0.5, *[1.0] * others):
            head = Head(1, 0.5, None, 1, 0.0, None, (width,), None, 0.0, True, 0.1)
            now = SimpleNamespace(head=head, choices={"a": 1, "b": 1})
            target = ledger.next(now, ledger.behind(now, ledger.shares(now)))
            ledger.sent(head, target, 1)
            if width == 0.5:
                sent_narrow[target[0]] += 1
    assert sent_narrow == pytest.approx({"a": 300, "b": 200}, abs=1)


def test_a_choice_is_named_as_a_routers_w():
    assert Choice((0.5, 0.5), 0.6).name == "0.5"
    assert Choice((0.5, 1.0), 0.7, (1.0, 1.0), 0.4, 0.2).name == "0.5/1+1@0.4"
