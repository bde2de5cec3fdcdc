"""The batch window: when a server holds a key back, and what ends the wait."""

import msgspec
import pytest

from slim_scheduler.core.messages import (
    BatchDone,
    BatchFailed,
    BlockArrived,
    CancelTasks,
    DeviceSampled,
    InstanceReady,
    LoadInstance,
    RequestArrived,
    StartBatch,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.server.pace import Pace
from slim_scheduler.core.server.scheduler import ServerKnobs, ServerScheduler
from slim_scheduler.core.types import Request
from tests.core import facts
from tests.core.networks import SHAPE, WEIGHT, arrive, block, dispatcher, done, only, request, sent, task

WINDOW = 0.010
FIXED, EACH = 0.004, 0.001  # seconds of a batch, and of each task in it


def batch_time(segment, previous_width, width, size):
    return FIXED + EACH * size


def server(profile=True, pace=None, **knobs):
    """One server with an instance of each segment at width 0.5, and a window."""
    asked = {"max_batch": 8, "vram_budget": 100 * WEIGHT, "batch_window": WINDOW, "tile": 4, **knobs}
    made = ServerScheduler("a", ServerKnobs(**asked), SHAPE, batch_time=batch_time if profile else None, pace=pace)
    for segment in range(SHAPE.segments):
        first = task(9000 + segment, segment, 0.5 if segment else None)
        load = only(made.handle(BlockArrived(block(first.task_id, (first,), 0.5)), -9.0), LoadInstance)[0]
        (batch,) = only(made.handle(InstanceReady(load.instance), -9.0), StartBatch)
        made.handle(BatchDone(batch.batch.batch_id), -9.0)
    return made


def arrives(scheduler, now, *ids, more=1, segment=0, width=0.5, deadline=None, priority=0):
    tasks = tuple(task(i, segment, 0.5 if segment else None, deadline, priority) for i in ids)
    event = BlockArrived(msgspec.structs.replace(block(ids[0], tasks, width), more=more))
    commands = scheduler.handle(event, now)
    scheduler.check_invariants(now)
    return commands


def ran(commands):
    return [t.task_id for start in only(commands, StartBatch) for t in start.batch.tasks]


def wakes(commands):
    return [command.at for command in only(commands, WakeAt)]


def fires(scheduler, now):
    commands = scheduler.handle(TimerFired(), now)
    scheduler.check_invariants(now)
    return commands


def test_a_key_waits_for_its_window_and_the_machine_asks_for_the_timer():
    scheduler = server()
    commands = arrives(scheduler, 1.0, 1)
    assert ran(commands) == []
    assert wakes(commands) == [1.0 + WINDOW]
    assert ran(arrives(scheduler, 1.004, 2)) == [], "the second does not begin the window anew"
    assert ran(fires(scheduler, 1.009)) == [], "a spare timer"
    assert ran(fires(scheduler, 1.0 + WINDOW)) == [1, 2]


def test_a_full_tile_does_not_wait_and_takes_what_fits_into_a_batch():
    scheduler = server()
    arrives(scheduler, 1.0, 1, 2, 3)
    assert ran(arrives(scheduler, 1.001, 4, 5)) == [1, 2, 3, 4, 5]


def test_nobody_waits_for_what_cannot_come():
    scheduler = server()
    arrives(scheduler, 1.0, 1, more=3)
    assert ran(arrives(scheduler, 1.001, 2, more=0)) == [1, 2], "the last block says that nothing follows"


def test_with_all_credit_here_nothing_more_can_come():
    scheduler = server(credit=3)
    arrives(scheduler, 1.0, 1)
    arrives(scheduler, 1.001, 2, segment=1)
    assert ran(arrives(scheduler, 1.002, 3, segment=2)) == [1], "the oldest goes"
    assert ran(arrives(server(credit=3, tile=8), 1.0, 1, 2, 3, 4)) == [1, 2, 3, 4], "also with more than it may hold"


def test_with_all_credit_here_the_most_urgent_key_waits_for_its_instance_and_no_riper_one_overtakes_it():
    scheduler = server(credit=3)
    arrives(scheduler, 1.0, 1)
    commands = arrives(scheduler, 1.001, 2, 3, width=1.0, deadline=1.5)
    assert ran(commands) == []
    assert len(only(commands, LoadInstance)) == 1
    assert ran(fires(scheduler, 1.0 + WINDOW)) == [], "ripe by its window, but less urgent"


def test_when_a_task_expires_the_key_that_runs_is_chosen_again():
    """Without it all of the credit waits here, so that the older key is as good as ripe and comes first."""
    scheduler = server(credit=3, batch_window=5.0, tile=8)
    arrives(scheduler, 1.0, 1, 2)
    two = (task(3, 0, None), task(4, 0, None, 1.001))
    commands = scheduler.handle(BlockArrived(block(3, two, 1.0)), 1.001)
    scheduler.check_invariants(1.001)
    assert ran(commands) == [1, 2]


def test_least_slack_starts_a_key_in_time_for_all_segments_that_are_left():
    scheduler = server(batch_window=1.0)
    need = 1.25 * 3 * (FIXED + 8 * EACH)
    commands = arrives(scheduler, 1.0, 1, deadline=1.5)
    assert ran(commands) == []
    assert wakes(commands) == [pytest.approx(1.5 - need)]
    assert ran(fires(scheduler, 1.5 - need)) == [1]


def test_what_is_under_way_to_other_segments_and_back_is_no_slack():
    scheduler = server(batch_window=1.0, link_latency=0.010)
    need = 1.25 * 3 * (FIXED + 8 * EACH) + 5 * 0.010
    assert wakes(arrives(scheduler, 1.0, 1, deadline=1.5)) == [pytest.approx(1.5 - need)]


def test_a_server_that_has_become_slow_starts_tasks_with_a_deadline_the_sooner():
    pace = Pace(batch_time, facts.server("a").profile)
    scheduler = server(batch_window=10.0, tile=8, pace=pace)
    now = 1.0
    for first in range(100, 140, 8):
        (start,) = only(arrives(scheduler, now, *range(first, first + 8)), StartBatch)
        now += 4 * (FIXED + 8 * EACH)
        if first == 100:
            arrives(scheduler, now, 1, segment=1, deadline=2.0)
        scheduler.handle(BatchDone(start.batch.batch_id), now)
        scheduler.check_invariants(now)
    latest = 2.0 - pace.value * 1.25 * 2 * (FIXED + 8 * EACH)
    assert pace.value > 1
    assert ran(fires(scheduler, latest - 0.001)) == []
    assert ran(fires(scheduler, latest)) == [1]


def test_a_lower_priority_does_not_make_a_task_late_on_an_idle_server():
    scheduler = server(batch_window=1.0)
    need = 1.25 * 3 * (FIXED + 8 * EACH)
    (wake,) = wakes(arrives(scheduler, 1.0, 1, deadline=1.5, priority=1))
    assert wake == pytest.approx(1.5 - need)
    assert ran(fires(scheduler, wake)) == [1]


def test_of_ripe_keys_with_the_same_deadline_the_higher_priority_goes_first():
    scheduler = server()
    arrives(scheduler, 1.0, 1, more=0)  # runs
    arrives(scheduler, 1.001, 2, segment=1, more=0, deadline=1.2, priority=1)
    arrives(scheduler, 1.003, 3, segment=2, more=0, deadline=1.2)
    assert ran(scheduler.handle(BatchDone(4), 1.004)) == [3]


def test_without_a_profile_deadlines_are_not_risked():
    scheduler = server(profile=False)
    assert ran(arrives(scheduler, 1.0, 1, deadline=1.5)) == [1]
    assert ran(arrives(scheduler, 1.0, 2, segment=1)) == [], "the others wait for their window"


def test_of_ripe_keys_the_least_slack_goes_first_and_without_deadlines_the_oldest():
    scheduler = server()
    arrives(scheduler, 1.0, 1, more=0)  # runs
    arrives(scheduler, 1.001, 2, segment=1, more=0)
    arrives(scheduler, 1.002, 3, segment=2, more=0, deadline=1.2)
    assert ran(scheduler.handle(BatchDone(4), 1.003)) == [3]
    arrives(scheduler, 1.004, 4, more=0)
    assert ran(scheduler.handle(BatchDone(5), 1.005)) == [2]
    assert ran(scheduler.handle(BatchDone(6), 1.006)) == [4]


def test_tasks_without_deadline_are_not_starved_by_those_with():
    scheduler = server()
    arrives(scheduler, 1.0, 1, more=0)  # runs
    arrives(scheduler, 1.0, 2, segment=1, more=0)
    arrives(scheduler, 2.5, 3, segment=2, more=0, deadline=3.0)
    assert ran(scheduler.handle(BatchDone(4), 2.5)) == [2], "it has waited longer than the other may"


def test_a_tile_is_never_larger_than_a_batch_may_be():
    assert ran(arrives(server(profile=False, tile=64), 1.0, *range(1, 9))) == list(range(1, 9))


def test_after_memory_ran_out_nobody_waits_for_more_than_fits():
    scheduler = server(batch_window=1.0, tile=8)
    (start,) = only(arrives(scheduler, 1.0, *range(1, 9)), StartBatch)
    commands = scheduler.handle(BatchFailed(start.batch.batch_id, "no memory", out_of_memory=True), 1.01)
    for now in (1.02, 1.03):
        (start,) = only(commands, StartBatch)
        commands = scheduler.handle(BatchDone(start.batch.batch_id), now)
    assert ran(arrives(scheduler, 2.0, 20, 21, 22)) == []
    assert ran(arrives(scheduler, 2.1, 23)) == [20, 21, 22, 23]


def test_nor_for_more_than_the_wider_instance_takes_that_runs_it():
    scheduler = server(batch_window=1.0, tile=8)
    (start,) = only(arrives(scheduler, 1.0, *range(1, 9), width=0.25), StartBatch)
    assert (start.batch.requested_width, start.batch.width) == (0.25, 0.5)
    commands = scheduler.handle(BatchFailed(start.batch.batch_id, "no memory", out_of_memory=True), 1.01)
    for now in (1.02, 1.03):
        (start,) = only(commands, StartBatch)
        commands = scheduler.handle(BatchDone(start.batch.batch_id), now)
    assert ran(arrives(scheduler, 2.0, 20, 21, 22, 23, width=0.25)) == [20, 21, 22, 23]


def test_what_a_waiting_key_needs_is_not_unloaded_meanwhile():
    scheduler = server(batch_window=1.0, tile=8, idle_unload=10.5)  # last used at -9.0
    arrives(scheduler, 1.0, 1)
    gone = {command.instance for command in only(fires(scheduler, 1.5), UnloadInstance)}
    assert len(gone) == SHAPE.segments - 1
    assert ran(fires(scheduler, 2.0)) == [1]


def test_a_cancelled_task_makes_nobody_wait_longer_or_shorter():
    scheduler = server()
    arrives(scheduler, 1.0, 1)
    arrives(scheduler, 1.004, 2)
    scheduler.handle(CancelTasks("a", (1,)), 1.005)
    scheduler.check_invariants(1.005)
    commands = fires(scheduler, 1.0 + WINDOW)
    assert ran(commands) == []
    assert wakes(commands) == [1.004 + WINDOW]
    assert ran(fires(scheduler, 1.004 + WINDOW)) == [2]
    scheduler.handle(BatchDone(4), 1.02)
    arrives(scheduler, 1.03, 3)
    scheduler.handle(CancelTasks("a", (3,)), 1.031)
    assert ran(fires(scheduler, 1.03 + WINDOW)) == []


@pytest.mark.parametrize("most", [12, 200])
def test_an_automatic_tile_is_the_knee_of_the_profile_and_the_window_a_pass_of_at_most_50_ms(most):
    scheduler = server(tile=None, batch_window=None, max_batch=most)
    knee = next(b for b in range(1, most + 1) if (FIXED / b + EACH) <= 1.05 * (FIXED / most + EACH))
    arrives(scheduler, 1.0, *range(1, knee), more=9)
    assert scheduler._window.due((0, 0.5, None, False)) == pytest.approx(1.0 + min(0.05, 3 * (FIXED + knee * EACH)))
    assert len(ran(arrives(scheduler, 1.001, 900, more=9))) == knee


def test_an_automatic_window_does_not_hold_what_comes_too_seldom():
    scheduler = server(batch_window=None)
    assert ran(arrives(scheduler, 1.0, 1)) == [1], "one task in a quarter of a second is not one more in 24 ms"
    scheduler.handle(BatchDone(4), 1.001)
    last = 0.0
    for i in range(2, 40):
        last = 1.0 + 0.005 * i
        for started in only(arrives(scheduler, last, i), StartBatch):
            scheduler.handle(BatchDone(started.batch.batch_id), last)
    assert ran(arrives(scheduler, last + 0.001, 40)) == [], "200 tasks/s are"


def test_window_zero_is_the_papers_rule():
    scheduler = server(batch_window=0.0)
    assert ran(arrives(scheduler, 1.0, 1, more=9)) == [1]


def follows(machine, event, now):
    return [(block.segment, len(block.tasks), block.more) for block in sent(machine.handle(event, now))]


def test_the_dispatcher_says_what_may_follow_a_block():
    machine = dispatcher(servers=("a", "b"), credit=8, batch_windows=True)
    (first,) = sent(arrive(machine, request(1, 1), 0.0))
    assert first.more == 0, "a lone request on an idle fleet"
    (second,) = sent(arrive(machine, request(2, 2), 0.1))
    assert second.more == 1, "others are about"
    assert follows(machine, done(first, 0.2), 0.2) == [(1, 1, 2)], "two more of that width are in segment 0"
    (third,) = sent(machine.handle(done(second, 0.3), 0.3))
    assert (third.segment, third.more) == (1, 0), "all that there is has come this far"


def test_the_items_of_one_request_expect_no_other_request():
    machine = dispatcher(servers=("a", "b"), credit=4, batch_windows=True)
    assert [b.more for b in sent(arrive(machine, request(1, 7), 0.0))] == [0, 0]


def test_a_full_server_is_told_that_nothing_follows():
    machine = dispatcher(servers=("a",), credit=2, batch_windows=True)
    arrive(machine, RequestArrived(Request(1, (1,), 0.0)), 0.0)
    assert [b.more for b in sent(arrive(machine, RequestArrived(Request(2, (2, 3), 0.0)), 0.0))] == [0]


def test_without_windows_a_block_says_nothing():
    machine = dispatcher(servers=("a", "b"), credit=8)
    arrive(machine, request(1, 1), 0.0)
    assert [b.more for b in sent(arrive(machine, request(2, 2), 0.1))] == [0]


def test_a_device_that_would_do_more_if_it_rested_comes_to_an_end_and_rests_in_proportion():
    scheduler = server(best_utilization=0.8, max_concurrent_batches=2)
    assert ran(arrives(scheduler, 1.0, 1, 2, 3, 4)) == [1, 2, 3, 4]
    assert ran(arrives(scheduler, 1.05, 5, 6, 7, 8, segment=1)) == [5, 6, 7, 8], "what it idled before pays for 0.1 s"
    scheduler.handle(BatchDone(4), 1.1)
    assert ran(arrives(scheduler, 1.108, 9, 10, 11, 12)) == [], "no second one joins it any more"
    commands = scheduler.handle(BatchDone(5), 1.108)
    assert (ran(commands), wakes(commands)) == ([], [pytest.approx(1.11)]), "8 ms more busy, a fifth of 10 ms at rest"
    assert ran(arrives(scheduler, 1.109, 13, more=0, segment=2)) == []
    assert ran(fires(scheduler, 1.11)) == [9, 10, 11, 12, 13]


def test_a_batch_that_failed_counts_as_busy():
    scheduler = server(best_utilization=0.8)
    arrives(scheduler, 1.0, 1, 2, 3, 4)
    assert wakes(scheduler.handle(BatchFailed(4, "out of memory", out_of_memory=True), 1.104)) == [pytest.approx(1.105)]
    assert ran(fires(scheduler, 1.105)) == [1, 2]


def test_without_a_window_a_server_never_rests():
    scheduler = server(best_utilization=0.8, batch_window=0.0)
    arrives(scheduler, 1.0, 1)
    arrives(scheduler, 1.001, 2)
    assert ran(scheduler.handle(BatchDone(4), 2.0)) == [2]


def test_a_device_on_which_nothing_runs_is_not_too_busy_for_an_instance():
    """Its last sample may be old. All that it holds would wait behind one key for the next."""
    scheduler = server()
    scheduler.handle(DeviceSampled(0.97), 1.0)
    assert len(only(arrives(scheduler, 1.001, 1, more=0, width=1.0), LoadInstance)) == 1


@pytest.mark.parametrize("window", [WINDOW, 0.0])
def test_while_it_runs_and_without_a_window_the_last_sample_counts(window):
    scheduler = server(batch_window=window, max_concurrent_batches=2)
    if window:
        assert ran(arrives(scheduler, 1.0, 1, more=0)) == [1]
    scheduler.handle(DeviceSampled(0.97), 1.0)
    assert only(arrives(scheduler, 1.001, 2, more=0, width=1.0), LoadInstance) == []
    assert len(only(scheduler.handle(DeviceSampled(0.9), 1.1), LoadInstance)) == 1
