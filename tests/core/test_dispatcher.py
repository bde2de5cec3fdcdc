import sys

import msgspec
import numpy as np
import pytest

from slim_scheduler.core.dispatch.dispatcher import STALE_DEADLINES
from slim_scheduler.core.messages import (
    BlockFinished,
    CancelTasks,
    RequestCancelled,
    RouteNow,
    RouterFellBack,
    RouterTooSlow,
    RouteSoon,
    ServerLeft,
    TasksReturned,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.router.heuristics import RandomRouter
from slim_scheduler.core.types import Block, Decision, Outcome
from tests.core.networks import Scripted, arrive, dispatcher, done, jsq, only, replies, request, sent


def test_requests_that_come_together_are_decided_about_together():
    made = dispatcher()
    for number in (1, 2, 3, 4):
        assert not sent(made.handle(request(number), 0.0))
    block = sent(made.handle(RouteNow(), 0.0))[0]
    assert [task.item for task in block.tasks] == [request(n).request.items[0] for n in (1, 2, 3, 4)]


def test_routing_is_asked_for_once_and_only_where_a_server_has_room():
    made = dispatcher(credit=2)
    first, second = made.handle(request(1), 0.0), made.handle(request(2), 0.0)
    assert RouteSoon() in first
    assert RouteSoon() not in second
    assert made.held_up == 0, "both are routed soon"
    (block,) = sent(made.handle(RouteNow(), 0.0))
    assert made.handle(request(3), 0.1) == [], "the server is full: what frees it routes"
    assert made.held_up == 1
    assert sent(made.handle(done(block, 1.0, 0.5), 1.0))


def test_routing_is_not_asked_for_behind_a_head_that_is_held():
    router = Scripted(Decision("a", 0.5, 1))
    router.chooses_full = True
    made = dispatcher(router, servers=("a", "b"), credit=1)
    arrive(made, request(1), 0.0)
    assert RouteSoon() in made.handle(request(2), 0.1)
    assert sent(made.handle(RouteNow(), 0.1)) == [], "held for a, which is full"
    assert made.handle(request(3), 0.2) == []


def test_an_item_goes_through_every_segment_and_is_answered_once():
    made = dispatcher()
    commands = arrive(made, request(1), 0.0)
    widths = (0.5, 1.0, 0.5)
    for segment, width in enumerate(widths):
        block = sent(commands)[0]
        assert (block.segment, block.previous_width) == (segment, widths[segment - 1] if segment else None)
        commands = made.handle(done(block, segment + 1.0, width), segment + 1.0)
    answer = replies(commands)[0]
    assert (answer.outcome, answer.items[0].widths, answer.items[0].servers) == (Outcome.ANSWERED, widths, ("a",) * 3)
    assert answer.items[0].compute_s == pytest.approx(0.03)
    assert answer.items[0].queue_s == pytest.approx(2.97)
    assert made.counts["items"]["in_flight"] == 0


def test_a_request_is_answered_when_its_last_item_is():
    made = dispatcher(Scripted(Decision("a", 0.5, 1)))
    blocks = sent(arrive(made, request(1, items=2), 0.0))
    assert len(blocks) == 2
    first = blocks[0]
    for at in (1.0, 2.0, 3.0):
        commands = made.handle(done(first, at), at)
        first = (sent(commands) or [None])[0]
    assert replies(commands) == []
    second = blocks[1]
    for at in (4.0, 5.0, 6.0):
        commands = made.handle(done(second, at), at)
        second = (sent(commands) or [None])[0]
    assert [item.item for item in replies(commands)[0].items] == [100, 101]


def test_a_block_is_the_first_of_one_key_up_to_group_and_credit():
    made = dispatcher(Scripted(Decision("a", 0.5, 3)), credit=5)
    blocks = [b for i in range(1, 8) for b in sent(arrive(made, request(i), 0.0))]
    assert [len(b.tasks) for b in blocks] == [1] * 5
    assert made.fifo_length == 2
    (block,) = sent(made.handle(done(blocks[0], 1.0), 1.0))
    assert [t.item for t in block.tasks] == [600], "one credit came free, and item 600 is older than what re-entered"


def test_continuing_tasks_enter_at_the_back_or_keep_their_items_place():
    for reentry_back, expected in ((True, [200]), (False, [100])):
        made = dispatcher(Scripted(Decision("a", 0.5, 1)), credit=1, reentry_back=reentry_back)
        (block,) = sent(arrive(made, request(1, at=0.0), 0.0))
        arrive(made, request(2, at=0.5), 0.5)
        (block,) = sent(made.handle(done(block, 1.0), 1.0))
        assert [t.item for t in block.tasks] == expected


def test_random_holds_the_head_for_the_server_it_drew():
    made = dispatcher(RandomRouter((1,)), servers=("a", "b"), credit=2)
    blocks = []
    while made.fifo_length == 0:
        blocks += sent(arrive(made, request(len(blocks) + 1), 0.0))
    full = next(name for name, view in made.servers.items() if not view.available)
    other = next(name for name in made.servers if name != full)
    if made.servers[other].available:
        assert sent(arrive(made, request(50), 0.1)) == [], "the head waits although the other server has credit"
    block = next(b for b in blocks if b.server == full)
    assert sent(made.handle(done(block, 1.0), 1.0))[0].server == full


class Prefers:
    """Wants server a, full or not; b where a is none of its choices."""

    name, chooses_full = "prefers", True

    def decide(self, view, rng):
        return Decision("a" if "a" in view.choices else "b", 0.5, 1)


def test_a_head_waits_for_the_full_server_that_was_chosen_and_all_behind_it_as_well():
    made = dispatcher(Prefers(), servers=("a", "b"), credit=1)
    (first,) = sent(arrive(made, request(1), 0.0))
    assert sent(arrive(made, request(2), 0.1)) == []
    assert sent(arrive(made, request(3), 0.149)) == []
    assert sent(made.handle(TimerFired(), 0.5)) == []
    (second,) = sent(made.handle(done(first, 0.6), 0.6))
    assert (second.server, second.tasks[0].item) == ("a", 200), "whose head it was"


def test_who_may_be_chosen_is_computed_once_for_all_routers():
    seen = []

    class Watches:
        name, chooses_full = "watches", False

        def decide(self, view, rng):
            seen.append((self.chooses_full, tuple(view.choices)))
            return Decision(next(iter(view.choices)), 0.5, 1)

    for full_too in (False, True):
        router = Watches()
        router.chooses_full = full_too
        made = dispatcher(router, servers=("a", "b", "c"), credit=1)
        made.handle(ServerLeft("c", "its process died"), 0.0)
        arrive(made, request(1), 0.0)
        arrive(made, request(2), 0.1)
    assert seen == [(False, ("a", "b")), (False, ("b",)), (True, ("a", "b")), (True, ("a", "b"))]


def test_a_view_has_what_came_refused_or_not():
    seen = []

    class Watches:
        name, chooses_full = "watches", False

        def decide(self, view, rng):
            seen.append((view.received, view.squares))
            return Decision("a", 0.5, 8)

    made = dispatcher(Watches(), credit=100, max_waiting_items=4)
    for number, items in enumerate((3, 1, 5, 2), start=1):
        arrive(made, request(number, items=items), 0.0)
    assert seen == [(3, 9), (4, 10), (11, 39)], "five are too many"


def test_random_waits_for_its_server_however_much_waits():
    made = dispatcher(RandomRouter((1,)), servers=("a", "b"), credit=3)
    commands = arrive(made, request(1, items=20), 0.0)
    assert len(sent(commands)) < 6, "one server has credit left"
    assert not only(commands, RouterFellBack)


def test_a_head_does_not_wait_for_a_server_that_left():
    made = dispatcher(Prefers(), servers=("a", "b"), credit=1)
    arrive(made, request(1), 0.0)
    assert sent(arrive(made, request(2), 0.1)) == []
    blocks = sent(made.handle(ServerLeft("a", "its process died"), 0.11))
    assert [block.server for block in blocks] == ["b"]


def test_a_decision_for_a_head_that_was_cancelled_is_not_the_next_ones():
    router = Prefers()
    made = dispatcher(router, servers=("a", "b"), credit=1)
    (first,) = sent(arrive(made, request(1), 0.0))
    assert sent(arrive(made, request(2), 0.1)) == []
    for number in (1, 2):
        made.handle(RequestCancelled(number), 0.11)
    made.handle(done(first, 0.12), 0.12)
    router.decide = lambda view, rng: Decision("b", 0.5, 1)
    assert [block.server for block in sent(arrive(made, request(3), 0.13))] == ["b"]


def test_other_routers_see_a_full_server_masked():
    made = dispatcher(jsq(), servers=("a", "b"), credit=1)
    servers = [b.server for i in (1, 2, 3) for b in sent(arrive(made, request(i), 0.0))]
    assert sorted(servers) == ["a", "b"]
    assert made.fifo_length == 1


def test_a_full_queue_rejects_with_a_reason_and_retry_after():
    made = dispatcher(credit=1, max_waiting_items=2)
    for i in (1, 2, 3):
        arrive(made, request(i), 0.0)
    answer = replies(arrive(made, request(4), 0.1))[0]
    assert answer.outcome is Outcome.REJECTED
    assert "2 items wait" in answer.reason
    assert "limit is 2" in answer.reason
    assert answer.retry_after > 0


def test_the_limit_never_rejects_a_continuing_task():
    made = dispatcher(credit=1, max_waiting_items=1)
    (block,) = sent(arrive(made, request(1), 0.0))
    arrive(made, request(2), 0.1)
    commands = made.handle(done(block, 1.0), 1.0)
    assert replies(commands) == []
    assert made.counts["items"]["in_flight"] == 2


def test_waiting_activations_are_bounded_by_holding_back_segment_0():
    made = dispatcher(Scripted(Decision("a", 1.0, 1)), credit=1, max_activation_bytes=256)
    (first,) = sent(arrive(made, request(1), 0.0))
    arrive(made, request(2), 0.1)
    (continued,) = sent(made.handle(done(first, 1.0), 1.0))
    assert (continued.segment, continued.tasks[0].item) == (1, 100), "item 200 is older in the FIFO but held back"
    (last,) = sent(made.handle(done(continued, 2.0), 2.0))
    (block,) = sent(made.handle(done(last, 3.0), 3.0))
    assert (block.segment, block.tasks[0].item) == (0, 200)


def test_a_deadline_expires_waiting_and_sent_items_at_once():
    made = dispatcher(credit=1)
    commands = arrive(made, request(1, deadline=0.5), 0.0)
    (block,) = sent(commands)
    assert only(commands, WakeAt) == [WakeAt(0.5)]
    arrive(made, request(2, deadline=0.5), 0.1)
    commands = made.handle(TimerFired(), 0.5)
    assert [(r.request_id, r.outcome) for r in replies(commands)] == [(1, Outcome.EXPIRED), (2, Outcome.EXPIRED)]
    assert only(commands, CancelTasks) == [CancelTasks("a", (block.tasks[0].task_id,))]
    assert replies(made.handle(done(block, 0.6), 0.6)) == [], "the late answer is dropped"


def test_the_deadline_of_an_answered_request_asks_for_no_timer():
    made = dispatcher(credit=1)
    (block,) = sent(arrive(made, request(1, deadline=0.5), 0.0))
    for number, deadline in ((2, 0.6), (3, 0.9)):
        arrive(made, request(number, deadline=deadline), 0.0)
    answered = 0
    while answered < 2:
        commands = made.handle(done(block, 0.1), 0.1)
        answered += len(replies(commands))
        (block,) = sent(commands)
    assert only(made.handle(TimerFired(), 0.5), WakeAt) == [WakeAt(0.9)]


def test_a_request_past_its_deadline_on_arrival_never_runs():
    commands = dispatcher().handle(request(1, deadline=1.0), 1.0)
    assert sent(commands) == []
    assert replies(commands)[0].outcome is Outcome.EXPIRED


def test_a_cancelled_request_is_removed_and_its_credit_comes_back_with_the_servers_word():
    made = dispatcher(credit=1)
    (block,) = sent(arrive(made, request(1), 0.0))
    arrive(made, request(2), 0.1)
    commands = made.handle(RequestCancelled(1), 0.2)
    assert replies(commands)[0].outcome is Outcome.CANCELLED
    assert sent(commands) == []
    returned = TasksReturned("a", 0, (block.tasks[0].task_id,), "cancelled")
    assert sent(made.handle(returned, 0.3))[0].tasks[0].item == 200


def test_a_doubled_report_counts_once():
    made = dispatcher()
    (block,) = sent(arrive(made, request(1), 0.0))
    (next_block,) = sent(made.handle(done(block, 1.0), 1.0))
    assert sent(made.handle(done(block, 1.1), 1.1)) == []
    assert next_block.segment == 1


def refused_after(reports_per_batch: int) -> str:
    """Why a deadline cannot be kept after two seconds in which a server ran a task in 10 ms, with 20 items in hand."""
    made, now, number = dispatcher(credit=1), 0.0, 0
    commands = []
    for number in range(20):
        commands += arrive(made, request(number), now)
    while now < 2.0:
        (block,) = sent(commands)
        now += 0.01
        commands = [command for _ in range(reports_per_batch) for command in made.handle(done(block, now), now)]
        for _ in replies(commands):
            number += 1
            commands += arrive(made, request(number, at=now), now)
    (refused,) = replies(made.handle(request(number + 1, at=now, deadline=now + 0.4), now))
    return refused.reason


def test_doubled_reports_do_not_make_the_servers_look_faster():
    assert "about 600 ms of work wait and the deadline is in 400 ms" in refused_after(1)
    assert refused_after(2) == refused_after(1)


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (ValueError("bad weights"), "ValueError: bad weights"),
        (Decision("z", 0.5, 1), "chose server z, which is unknown"),
        (Decision("a", float("nan"), 1), "chose width nan"),
        (Decision("a", 0.6, 1), "chose width 0.6"),
        (Decision("a", 0.5, 0), "chose a group of 0"),
        (Decision("a", 0.5, 1.0), "chose a group of 1.0, which is no whole number"),
        (None, "AttributeError"),
    ],
)
def test_a_router_that_fails_is_replaced_for_that_decision(decision, reason):
    made = dispatcher(Scripted(decision))
    commands = arrive(made, request(1), 0.0)
    assert sent(commands)[0].width == 0.5
    assert only(commands, RouterFellBack)[0].reason.startswith(reason)


def test_a_router_may_calculate_with_numpys_types():
    decision = Decision(np.str_("a"), np.float32(0.5), np.int64(1))
    (block,) = sent(arrive(dispatcher(Scripted(decision)), request(1), 0.0))
    assert [type(of) for of in (block.server, block.width)] == [str, float]
    assert msgspec.json.decode(msgspec.json.encode(block), type=Block) == block


@pytest.mark.parametrize("group", [sys.maxsize, np.uint64(2**63), 10**30])
def test_a_group_of_any_size_is_all_that_wait(group):
    machine = dispatcher(Scripted(Decision("a", 0.5, group)))
    commands = arrive(machine, request(1, items=3), 0.0)
    (block,) = sent(commands)
    assert len(block.tasks) == 3
    assert only(commands, RouterFellBack) == []
    (finished,) = only(machine.handle(done(block, 1.0), 1.0), BlockFinished)
    assert finished.decision.group < 2**31, "what a record can hold"


@pytest.mark.parametrize("suspended", [False, True])
def test_where_the_fallback_fails_as_well_the_work_goes_narrow_to_whom_least_was_sent(suspended):
    made = dispatcher(Scripted(ValueError("one")), fallback=Scripted(Decision("a", 0.5, 0)), servers=("a", "b"))
    if suspended:
        made.handle(RouterTooSlow(0.05), 0.0)
    commands = arrive(made, request(1, items=3), 0.0)
    (block,) = sent(commands)
    assert (block.server, block.width, len(block.tasks)) == ("a", 0.25, 3)
    (told,) = only(commands, RouterFellBack)
    also = "" if suspended else "ValueError: one; "
    assert told.reason == also + "chose a group of 0, which is below 1 (the fallback scripted)"
    assert told.raised is not suspended
    assert sent(arrive(made, request(2), 0.1))[0].server == "b"


def test_a_slow_router_rests_until_its_probe():
    made = dispatcher(Scripted(Decision("a", 1.0, 1)), router_probe=1.0)
    (event,) = only(made.handle(RouterTooSlow(0.05), 0.0), RouterFellBack)
    assert (event.reason, event.until) == ("took 50.0 ms, limit 20 ms", 1.0)
    assert sent(arrive(made, request(1), 0.9))[0].width == 0.5, "the fallback decides"
    assert sent(arrive(made, request(2), 1.0))[0].width == 1.0, "the probe"


def test_a_finished_block_says_what_was_decided_what_ran_and_how_long_it_took():
    made = dispatcher(Scripted(Decision("a", 0.5, 8)))
    (block,) = sent(arrive(made, request(2, items=2, at=1.0), 1.0))
    finished = only(made.handle(done(block, 3.0, width=0.75), 3.0), BlockFinished)[0]
    assert finished.decision == Decision("a", 0.5, 8)
    assert (finished.size, finished.latency, finished.lost) == (2, 2.0, 0)
    assert finished.ran == ((200, (0.75,)), (201, (0.75,)))


def test_fixed_widths_are_kept_and_exact():
    made = dispatcher(jsq("1"))
    (block,) = sent(arrive(made, request(1, widths=(0.25, 0.5, 0.75)), 0.0))
    assert (block.width, block.exact) == (0.25, True)
    (block,) = sent(made.handle(done(block, 1.0), 1.0))
    assert block.width == 0.5


class Measured:
    """Accuracy that is simply the mean width."""

    def top1(self, widths):
        return sum(widths) / len(widths)


def test_an_accuracy_floor_leaves_only_widths_that_can_still_reach_it():
    made = dispatcher(jsq("0.25"), accuracy=Measured())
    (block,) = sent(arrive(made, request(1, accuracy_floor=0.75), 0.0))
    assert block.width == 0.25, "0.25, 1, 1 still reaches 0.75"
    (block,) = sent(made.handle(done(block, 1.0), 1.0))
    assert block.width == 1.0


def test_an_accuracy_floor_out_of_reach_is_refused_with_the_best_there_is():
    answer = replies(dispatcher(accuracy=Measured()).handle(request(1, accuracy_floor=1.01), 0.0))[0]
    assert (answer.outcome, answer.reason) == (
        Outcome.REJECTED,
        "accuracy_floor 1.01 is above the best expected accuracy, 1.0000; ask for at most that",
    )


def test_a_floor_above_what_its_own_widths_reach_is_refused_with_that():
    asked = request(1, accuracy_floor=0.6, widths=(0.25, 0.5, 0.75))
    answer = replies(dispatcher(accuracy=Measured()).handle(asked, 0.0))[0]
    assert answer.outcome is Outcome.REJECTED
    assert answer.reason == "accuracy_floor 0.6 is above these widths' expected accuracy, 0.5000; ask for at most that"


def test_different_constraints_never_share_a_block():
    made = dispatcher(Scripted(Decision("a", 0.5, 8)), credit=2)
    (first,) = sent(arrive(made, request(1, items=2), 0.0))
    arrive(made, request(2), 0.1)
    arrive(made, request(3, widths=(0.5, 0.5, 0.5)), 0.2)
    arrive(made, request(4), 0.3)
    (block,) = sent(made.handle(done(first, 1.0), 1.0))
    assert [t.item for t in block.tasks] == [200, 400]
    block, *_ = sent(made.handle(done(block, 2.0), 2.0))
    assert [t.item for t in block.tasks] == [300]


def test_a_lower_priority_ages_and_is_not_starved():
    made = dispatcher(Scripted(Decision("a", 0.5, 1)), credit=1, priority_aging=1.0)
    (block,) = sent(arrive(made, request(1), 0.0))
    arrive(made, request(2, at=0.0, priority=1), 0.0)
    arrive(made, request(3, at=0.5), 0.5)
    arrive(made, request(4, at=1.5), 1.5)
    order = []
    for at in (2.0, 3.0, 4.0):
        (block,) = sent(made.handle(done(block, at), at))
        order.append(block.tasks[0].item)
    assert order == [300, 200, 400]


def test_far_deadlines_of_ended_requests_do_not_pile_up_behind_a_near_one():
    made = dispatcher(credit=4)
    most = 2 * STALE_DEADLINES
    for n in range(1, 3 * most):
        now = n * 0.001
        arrive(made, request(2 * n, at=now, deadline=now + 0.5), now)
        if n > 1:
            made.handle(RequestCancelled(2 * n - 2), now)
        arrive(made, request(2 * n + 1, at=now, deadline=now + 3600.0), now)
        made.handle(RequestCancelled(2 * n + 1), now)
        assert len(made._deadlines) <= most
    made.check_invariants()
