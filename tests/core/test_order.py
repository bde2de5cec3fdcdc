"""Which waiting task is next under `shortest` and `least-slack`, and by what it may be passed."""

import pytest

from slim_scheduler.core.dispatch.order import REMEMBERED, Order, RemainingTime
from slim_scheduler.core.messages import TasksReturned
from slim_scheduler.core.router.escalation import FixedEscalation
from slim_scheduler.core.types import Decision
from tests.core.networks import SEGMENTS, WIDTHS, Scripted, arrive, dispatcher, done, request, sent

NARROW, WIDE = (0.25,) * SEGMENTS, (1.0,) * SEGMENTS
LONG = 1000.0  # a bound that nothing here reaches


def remaining():
    """A full batch takes 4 s at width 1 and 1 s at 0.25."""
    return RemainingTime([{width: 4 * width for width in WIDTHS}] * SEGMENTS)


def ordered(bound=LONG, by_slack=False, **options):
    """One server that takes one task at a time, at 0.25 where nobody fixed the width."""
    order = Order(remaining(), bound, by_slack)
    return dispatcher(Scripted(Decision("a", 0.25, 1)), credit=1, order=order, **options)


def order_of(made, running, at):
    """The items in the order in which they are sent from now on, each once; a second passes for each task."""
    found = []
    while running:
        (block,) = running
        at += 1.0
        last = block.segment == SEGMENTS - 1
        found.append(block.tasks[0].item)
        running = sent(made.handle(done(block, at, margins=(1.0,) if last else ()), at))
        made.check_invariants()
    return list(dict.fromkeys(found))


def test_what_has_less_left_goes_first_though_it_came_later():
    made = ordered()
    running = sent(arrive(made, request(1, widths=NARROW), 0.0))
    arrive(made, request(2, at=0.1, widths=WIDE), 0.1)
    arrive(made, request(3, at=0.2, widths=NARROW), 0.2)
    assert order_of(made, running, 0.3) == [100, 300, 200]


def test_nothing_is_passed_by_what_came_later_than_the_bound():
    made = ordered(bound=5.0)
    running = sent(arrive(made, request(1, widths=NARROW), 0.0))
    arrive(made, request(2, at=0.1, widths=WIDE), 0.1)  # counts from 5.1, not from 12.1
    for late in range(3, 8):
        arrive(made, request(late, at=0.1 + late, widths=NARROW), 0.1 + late)  # from three seconds later
    assert order_of(made, running, 8.0)[:2] == [100, 200]


def test_an_item_on_its_second_pass_lets_shorter_ones_pass():
    made = ordered(escalation=FixedEscalation(WIDE, 0.5))
    running = sent(arrive(made, request(1), 0.0))
    for segment in range(SEGMENTS - 1):
        running = sent(made.handle(done(running[0], segment + 1.0), segment + 1.0))
    arrive(made, request(2, at=2.9), 2.9)
    running = sent(made.handle(done(running[0], 3.0, margins=(0.1,)), 3.0))
    assert running[0].tasks[0].item == 200
    assert order_of(made, running, 3.0) == [200, 100]


def test_the_least_slack_goes_first_and_what_has_no_deadline_is_not_forgotten():
    made = ordered(by_slack=True, bound=20.0)
    running = sent(arrive(made, request(1, widths=NARROW), 0.0))
    arrive(made, request(2, at=0.1, widths=NARROW), 0.1)  # counts from 20.1
    arrive(made, request(3, at=0.2, deadline=25.0, widths=NARROW), 0.2)  # 3 s left: from 22
    arrive(made, request(4, at=0.3, deadline=26.0, widths=WIDE), 0.3)  # 12 s left: from 14
    assert order_of(made, running, 0.3) == [100, 400, 200, 300]


def test_a_task_that_is_tried_again_keeps_its_place():
    made = ordered(bound=5.0)
    (running,) = sent(arrive(made, request(1, widths=WIDE), 0.0))
    (again,) = sent(made.handle(TasksReturned("a", 0, (running.tasks[0].task_id,), "device lost"), 1.0))
    (task,) = again.tasks
    assert (task.entered, task.arrival) == (0.0, 5.0)


def test_a_first_pass_is_expected_at_the_widths_that_ran_lately_and_with_its_share_of_second_passes():
    made = ordered(escalation=FixedEscalation(WIDE, 0.5))
    ranker = remaining()
    arrive(made, request(1), 0.0)
    flight = made._ledger.items[100]
    assert ranker.of(flight, 0) == pytest.approx(SEGMENTS), "before anything ran: the narrowest"
    for segment in range(SEGMENTS):
        ranker.ran(segment, 1.0, REMEMBERED)
    assert ranker.of(flight, 1) == pytest.approx(4.0 * (SEGMENTS - 1))
    for _ in range(8 * REMEMBERED):
        ranker.first_ended(WIDE, 0)
        ranker.first_ended(None, 0)
    assert ranker.of(flight, 1) == pytest.approx(4.0 * (SEGMENTS - 1) + 2.0 * SEGMENTS, abs=0.01)
    for _ in range(16 * REMEMBERED):
        ranker.first_ended(WIDE, SEGMENTS - 1)
    assert ranker.of(flight, 1) == pytest.approx(4.0 * (SEGMENTS - 1) + 4.0, abs=0.01), "the last segment goes again"
