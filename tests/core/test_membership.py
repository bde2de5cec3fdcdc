"""Servers that get lost, fall silent, come back, leave, and fail."""

import pytest

from slim_scheduler.core.messages import (
    ServerChanged,
    ServerDraining,
    ServerJoined,
    ServerLeft,
    TasksReturned,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.types import Decision, Outcome
from tests.core.networks import Scripted, arrive, dispatcher, done, only, replies, report, request, sent


def test_a_lost_servers_tasks_run_elsewhere_and_its_late_answer_is_dropped():
    made = dispatcher(Scripted(Decision("a", 0.5, 8)), servers=("a", "b"))
    (block,) = sent(arrive(made, request(1), 0.0))
    commands = made.handle(ServerLeft("a", "its process died"), 0.5)
    assert only(commands, ServerChanged) == [ServerChanged("a", False, "its process died", 1)]
    (again,) = sent(commands)
    assert (again.server, again.tasks[0].item) == ("b", 100)
    assert sent(made.handle(done(block, 0.6, server="a"), 0.6)) == []


def test_a_report_of_a_life_that_is_over_brings_no_server_back():
    made = dispatcher(servers=("a", "b"))
    made.handle(report("a", 0.1), 0.1)
    made.handle(ServerLeft("a", "its process died"), 0.5)
    assert only(made.handle(report("a", 0.4), 0.6), ServerChanged) == []
    assert not made.servers["a"].up
    commands = made.handle(report("a", 0.9, incarnation=1), 0.9)
    assert [change.up for change in only(commands, ServerChanged)] == [True]


def test_an_item_whose_activation_was_on_the_lost_server_starts_again():
    made = dispatcher(Scripted(Decision("a", 0.5, 8)), servers=("a", "b"))
    (block,) = sent(arrive(made, request(1), 0.0))
    (second,) = sent(made.handle(done(block, 0.1), 0.1))
    assert second.segment == 1
    (again,) = sent(made.handle(ServerLeft("a", "gone"), 0.5))
    assert (again.segment, again.previous_width, again.tasks[0].entered) == (0, None, 0.1)


def test_a_silent_server_is_taken_out_and_comes_back_when_heard():
    made = dispatcher(servers=("a", "b"), heartbeat_timeout=0.8)
    made.handle(report("a", 0.3), 0.3)
    made.handle(report("b", 0.3), 0.3)
    made.handle(report("b", 0.9), 0.9)
    commands = made.handle(TimerFired(), 0.8)
    (wake,) = only(commands, WakeAt)
    assert wake.at == pytest.approx(1.1)
    commands = made.handle(TimerFired(), wake.at)
    assert [(c.server, c.up) for c in only(commands, ServerChanged)] == [("a", False)]
    assert [c.up for c in only(made.handle(report("a", 2.0), 2.0), ServerChanged)] == [True]


def test_silence_while_this_process_slept_proves_nothing():
    made = dispatcher(heartbeat_timeout=0.8)
    commands = made.handle(TimerFired(), 60.0)
    assert only(commands, ServerChanged) == []
    assert only(commands, WakeAt) == [WakeAt(60.4)]


def test_a_restarted_server_loses_what_it_had():
    made = dispatcher()
    made.handle(report("a", 0.1), 0.1)
    arrive(made, request(1), 0.2)
    commands = made.handle(report("a", 0.3, incarnation=1), 0.3)
    assert [c.up for c in only(commands, ServerChanged)] == [False, True]
    assert sent(commands)[0].tasks[0].item == 100


def test_a_block_that_reports_keep_leaving_out_is_sent_again():
    made = dispatcher(loss_grace=1.0)
    (block,) = sent(arrive(made, request(1), 0.0))
    for at in (0.5, 1.5):
        assert sent(made.handle(report("a", at), at)) == []
    made.handle(report("a", 2.0, open_blocks=(block.block_id,)), 2.0)
    made.handle(report("a", 2.4), 2.4)
    (again,) = sent(made.handle(report("a", 3.5), 3.5))
    assert again.tasks[0].item == 100


def test_with_every_server_gone_what_waits_fails_in_the_end():
    made = dispatcher(no_server_timeout=30.0)
    made.handle(ServerLeft("a", "gone"), 0.0)
    wake = only(arrive(made, request(1), 1.0), WakeAt)[0]
    assert wake.at == 30.0
    answer = replies(made.handle(TimerFired(), 30.0))[0]
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, "no server was in service for 30 s")


def test_a_draining_server_finishes_what_it_has_and_gets_no_more():
    made = dispatcher(servers=("a", "b"), credit=1)
    (first,) = sent(arrive(made, request(1), 0.0))
    made.handle(ServerDraining(first.server), 0.1)
    (other,) = sent(arrive(made, request(2), 0.2))
    assert other.server != first.server
    assert sent(made.handle(done(first, 0.3), 0.3)) == [], "its next segment waits for the other server"
    assert made.counts["items"]["in_flight"] == 2


def test_where_all_others_are_ejected_a_drain_brings_them_back():
    made = dispatcher(Scripted(Decision("a", 0.5, 1)), servers=("a", "b"), max_retries=100)
    (block,) = sent(arrive(made, request(1), 0.0))
    for _ in range(5):
        (block,) = sent(made.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), 0.1))
    assert made.servers["a"].limit == 0
    made.handle(ServerDraining("b"), 0.2)
    assert [made.servers[name].limit for name in "ab"] == [8, 0]
    (block,) = sent(arrive(made, request(2), 0.3))
    for _ in range(10):
        (block,) = sent(made.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), 0.4))
    assert made.servers["a"].limit == 8, "who drains does not count as left"
    made.handle(report("b", 5.0), 5.0)
    made.check_invariants()


def test_words_that_come_twice_count_once():
    made = dispatcher(Scripted(Decision("a", 0.5, 1)), servers=("a", "b"), max_retries=100, heartbeat_timeout=0.8)
    made.handle(report("b", 0.0), 0.0)
    (block,) = sent(arrive(made, request(1), 0.0))
    returned = TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost")
    for _ in range(6):
        made.handle(returned, 0.1)
    assert made.servers["a"].limit == 8, "one failure"
    last = report("a", 0.5)
    made.handle(last, 0.5)
    made.handle(report("b", 0.6), 0.6)
    made.handle(TimerFired(), 0.8)
    made.handle(TimerFired(), 1.3)
    assert not made.servers["a"].up
    made.handle(last, 1.5)
    assert not made.servers["a"].up, "nothing new was heard"


def test_old_work_that_is_told_twice_is_no_successful_probe():
    made = dispatcher(Scripted(Decision("a", 0.5, 1)), servers=("a", "b"), max_retries=100)
    (block,) = sent(arrive(made, request(1, items=1), 0.0))
    old = done(block, 0.05)
    (block,) = sent(made.handle(old, 0.05))
    for _ in range(5):
        (block,) = sent(made.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), 0.1))
    for at in (0.7, 1.4, 2.0):
        made.handle(report("a", at), at)
        made.handle(report("b", at), at)
        made.handle(TimerFired(), at + 0.1)
    assert made.servers["a"].limit == 4
    made.handle(old, 2.2)
    assert made.servers["a"].limit == 4


def test_a_server_that_is_down_can_be_drained_and_removed():
    made = dispatcher(servers=("a", "b"))
    made.handle(ServerLeft("a", "its machine died"), 0.1)
    made.handle(ServerDraining("a"), 0.2)
    made.handle(report("a", 0.3), 0.3)
    assert [sent(arrive(made, request(n), 0.3 + n / 10))[0].server for n in (1, 2)] == ["b", "b"], "though it is back"
    made.handle(ServerLeft("a", "was removed", removed=True), 0.9)
    assert list(made.servers) == ["b"]


def test_a_removed_server_is_no_longer_seen_by_routers():
    made = dispatcher(servers=("a", "b"))
    made.handle(ServerLeft("a", "removed", removed=True), 0.1)
    assert list(made.servers) == ["b"]
    assert sent(arrive(made, request(1), 0.2))[0].server == "b"
    made.handle(ServerJoined("a", 8), 0.3)
    assert list(made.servers) == ["b", "a"]


def test_a_report_that_comes_late_changes_nothing():
    made = dispatcher()
    made.handle(report("a", 1.0), 1.0)
    newest = made.servers["a"].report
    made.handle(report("a", 0.5), 1.1)
    assert made.servers["a"].report is newest
    assert made.servers["a"].heard_at == 1.0


def test_a_server_that_keeps_failing_is_ejected_probed_and_reinstated():
    made = dispatcher(Scripted(Decision("a", 0.5, 1)), servers=("a", "b"), max_retries=100)
    made.handle(report("b", 0.0), 0.0)
    (block,) = sent(arrive(made, request(1), 0.0))
    for _ in range(5):
        commands = made.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), 0.1)
        block = sent(commands)[0]
    assert [(c.server, c.up, c.reason) for c in only(commands, ServerChanged)] == [("a", False, "ejected: device lost")]
    assert (block.server, made.servers["a"].credit) == ("b", 0)
    for at in (0.7, 1.4, 2.0):
        made.handle(report("a", at), at)
        made.handle(report("b", at), at)
        made.handle(TimerFired(), at + 0.1)
    assert made.servers["a"].limit == 4, "the probe: a few tasks after two seconds"
    (probe,) = sent(arrive(made, request(2, at=2.2), 2.2))
    assert probe.server == "a"
    commands = made.handle(done(probe, 2.3), 2.3)
    assert [c.reason for c in only(commands, ServerChanged)] == ["its probe succeeded"]
    assert made.servers["a"].limit == 8


def test_not_every_server_can_be_ejected():
    made = dispatcher(servers=("a", "b"), max_retries=1000)
    (block,) = sent(arrive(made, request(1), 0.0))
    for _ in range(40):
        returned = TasksReturned(block.server, 0, (block.tasks[0].task_id,), "device lost")
        (block,) = sent(made.handle(returned, 0.1))
    assert sorted(view.limit for view in made.servers.values()) == [0, 8]


def test_the_next_silence_of_the_only_server_is_noticed_as_soon_as_the_first():
    made = dispatcher(heartbeat_timeout=0.8, no_server_timeout=30.0)
    arrive(made, request(1), 0.0)
    made.handle(TimerFired(), 0.8)
    assert not made.servers["a"].up
    (wake,) = only(made.handle(report("a", 2.0), 2.0), WakeAt)
    assert wake.at == pytest.approx(2.8), "and not when all would have been given up, at 30.8"
    commands = made.handle(TimerFired(), wake.at)
    assert [(c.server, c.up) for c in only(commands, ServerChanged)] == [("a", False)]
