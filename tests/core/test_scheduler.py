import msgspec
import pytest

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.messages import (
    BatchDone,
    BatchFailed,
    BatchReported,
    BlockArrived,
    CancelTasks,
    DeviceSampled,
    InstanceFailed,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    ServerReported,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.server.scheduler import REMEMBERED_BLOCKS, RETURN, ServerKnobs, ServerScheduler
from tests.core.networks import SHAPE, VARIANT, WEIGHT, block, only, task


def server(**knobs):
    return ServerScheduler("a", ServerKnobs(**{"max_batch": 4, "vram_budget": 100 * WEIGHT, **knobs}), SHAPE)


def loaded(scheduler, segment, width, now=0.0):
    """Brings one instance into being by a first task of its key, which then runs and is done."""
    first = task(9000 + int(100 * width) + segment, segment, 0.5 if segment else None)
    load = only(scheduler.handle(BlockArrived(block(first.task_id, (first,), width, exact=True)), now), LoadInstance)
    started = only(scheduler.handle(InstanceReady(load[0].instance), now), StartBatch)
    scheduler.handle(BatchDone(started[0].batch.batch_id), now)
    return load[0].instance


def started(commands):
    return [command.batch for command in only(commands, StartBatch)]


def ran(commands):
    return [task.task_id for batch in started(commands) for task in batch.tasks]


def test_the_first_task_loads_its_instance_and_runs_when_it_is_ready():
    scheduler = server()
    commands = scheduler.handle(BlockArrived(block(1, (task(1),), 0.5)), 0.0)
    assert commands == [LoadInstance(1, 0, 0.5, 2 * WEIGHT)]
    commands = scheduler.handle(InstanceReady(1), 0.3)
    assert ran(commands) == [1]
    commands = scheduler.handle(BatchDone(1, energy_j=2.0), 0.4)
    assert commands[0] == BatchReported("a", 0, 1, 0, 0.5, (1,), 0.3, 0.4, 2.0)


def test_a_batch_is_the_first_of_the_heads_key_across_blocks():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    loaded(scheduler, 1, 0.5)
    scheduler.handle(BlockArrived(block(1, (task(1),), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(2, (task(2), task(3)), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(3, (task(4, 1, 0.5),), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(4, (task(5), task(6), task(7)), 0.5)), 1.0)
    assert ran(scheduler.handle(BatchDone(3), 1.1)) == [2, 3, 5, 6]
    assert ran(scheduler.handle(BatchDone(4), 1.2)) == [4]


def test_tasks_with_their_items_arrival_keep_its_place():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    loaded(scheduler, 1, 0.5)
    scheduler.handle(BlockArrived(block(1, (task(1),), 0.5)), 1.0)
    new, old = (msgspec.structs.replace(task(2), arrival=0.9), msgspec.structs.replace(task(3, 1, 0.5), arrival=0.4))
    scheduler.handle(BlockArrived(block(2, (new,), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(3, (old,), 0.5)), 1.1)
    assert ran(scheduler.handle(BatchDone(3), 1.2)) == [3], "its item came first, though its block came last"
    assert ran(scheduler.handle(BatchDone(4), 1.3)) == [2]


def test_after_a_long_batch_its_items_come_before_younger_ones():
    scheduler = server(awaits_return=True)
    loaded(scheduler, 0, 0.5)
    loaded(scheduler, 1, 0.5)
    loaded(scheduler, 2, 0.5)
    old, young = (msgspec.structs.replace(task(n), arrival=at) for n, at in ((1, 0.4), (2, 0.9)))
    scheduler.handle(BlockArrived(block(1, (old,), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(2, (young,), 0.5)), 1.0)
    commands = scheduler.handle(BatchDone(4), 1.1)
    assert ran(commands) == []
    assert WakeAt(1.1 + RETURN) in commands, "the machine asks for the end of its wait itself"
    back = msgspec.structs.replace(task(3, 1, 0.5), arrival=0.4)
    assert ran(scheduler.handle(BlockArrived(block(3, (back,), 0.5)), 1.1)) == [], "others may be on their way"
    assert ran(scheduler.handle(TimerFired(), 1.1 + RETURN)) == [3]
    assert ran(scheduler.handle(BatchDone(5), 1.2)) == []
    assert ran(scheduler.handle(TimerFired(), 1.2 + RETURN)) == [2], "nothing came back: the younger one's turn"


def test_after_a_short_batch_or_the_last_segment_nobody_comes_back():
    scheduler = server(awaits_return=True)
    for segment in range(3):
        loaded(scheduler, segment, 0.5)
    scheduler.handle(BlockArrived(block(1, (task(1),), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(2, (task(2, 2, 0.5),), 0.5)), 1.0)
    scheduler.handle(BlockArrived(block(3, (task(3),), 0.5)), 1.0)
    assert ran(scheduler.handle(BatchDone(4), 1.001)) == [2], "a short batch is not worth an idle device"
    assert ran(scheduler.handle(BatchDone(5), 1.2)) == [3], "answered"


def test_best_fit_is_the_narrowest_free_instance_that_is_wide_enough():
    scheduler = server()
    for width in (1.0, 0.75, 0.25):
        loaded(scheduler, 0, width)
    batch = started(scheduler.handle(BlockArrived(block(1, (task(1),), 0.5)), 1.0))[0]
    assert (batch.width, batch.requested_width) == (0.75, 0.5)


def test_an_exact_width_is_never_served_wider():
    scheduler = server()
    loaded(scheduler, 0, 1.0)
    commands = scheduler.handle(BlockArrived(block(1, (task(1),), 0.5, exact=True)), 1.0)
    assert [(c.segment, c.width) for c in only(commands, LoadInstance)] == [(0, 0.5)]
    assert not started(commands)


def test_an_upgrade_is_not_missed_by_rounding():
    assert server(max_upgrade=0.1)._widest(0.7, exact=False) >= 0.8 > 0.7 + 0.1


def test_max_upgrade_bounds_how_much_wider_an_instance_may_be():
    scheduler = server(max_upgrade=0.25)
    loaded(scheduler, 0, 1.0)
    assert only(scheduler.handle(BlockArrived(block(1, (task(1),), 0.5)), 1.0), LoadInstance)


def test_no_load_while_utilisation_is_at_its_block_and_the_next_sample_below_lets_it():
    scheduler = server(utilization_block=0.9)
    scheduler.handle(DeviceSampled(0.9), 0.0)
    assert only(scheduler.handle(BlockArrived(block(1, (task(1),))), 0.1), LoadInstance) == []
    assert only(scheduler.handle(DeviceSampled(0.89), 0.2), LoadInstance)


def test_a_device_that_others_keep_busy_is_not_waited_for_without_end():
    scheduler = server(utilization_block=0.9)
    scheduler.handle(DeviceSampled(1.0), 0.0)
    scheduler.handle(BlockArrived(block(1, tuple(task(n) for n in range(1, 65)))), 0.1)
    loads = {at: only(scheduler.handle(DeviceSampled(1.0), at / 10), LoadInstance) for at in range(2, 15)}
    assert [at for at, load in loads.items() if load] == [11], "a sample looks back a second: all of it is others'"
    assert len(scheduler._queue._heads) == 1


def test_a_device_that_has_just_run_waits_for_a_sample_of_its_own_rest():
    scheduler = server(utilization_block=0.9, max_upgrade=0.0)
    scheduler.handle(DeviceSampled(1.0), 0.0)
    scheduler.handle(DeviceSampled(0.5), 0.1)
    loaded(scheduler, 0, 0.5, now=2.0)
    scheduler.handle(DeviceSampled(1.0), 2.1)
    wide = task(1)
    assert only(scheduler.handle(BlockArrived(block(1, (wide,), 1.0)), 2.2), LoadInstance) == []
    assert only(scheduler.handle(DeviceSampled(1.0), 3.0), LoadInstance) == []
    assert only(scheduler.handle(DeviceSampled(1.0), 3.2), LoadInstance)


def test_a_crowded_key_loads_several_instances_at_once_and_a_short_one_only_one():
    knobs = {"max_concurrent_batches": 2, "scale_queue_threshold": 3, "max_new_instances": 2}
    few, many = server(**knobs), server(**knobs)
    assert len(only(few.handle(BlockArrived(block(1, (task(1), task(2)))), 0.0), LoadInstance)) == 1
    assert len(only(many.handle(BlockArrived(block(1, (task(1), task(2), task(3)))), 0.0), LoadInstance)) == 2


def test_a_second_trigger_waits_for_the_instance_that_is_loading():
    scheduler = server()
    scheduler.handle(BlockArrived(block(1, (task(1),))), 0.0)
    assert only(scheduler.handle(BlockArrived(block(2, (task(2),))), 0.1), LoadInstance) == []


def test_a_head_blocked_by_memory_alone_evicts_the_least_recently_used():
    scheduler = server(vram_budget=7 * WEIGHT)
    old = loaded(scheduler, 0, 1.0, now=0.0)
    loaded(scheduler, 1, 0.5, now=1.0)
    commands = scheduler.handle(BlockArrived(block(1, (task(1, 2, 0.5),), 0.5)), 2.0)
    assert commands[0] == UnloadInstance(old)
    assert not only(commands, LoadInstance)
    commands = scheduler.handle(InstanceUnloaded(old), 2.1)
    assert [(c.segment, c.width) for c in only(commands, LoadInstance)] == [(2, 0.5)]


def test_a_variant_is_built_on_first_use_and_counts_as_memory():
    scheduler = server()
    loaded(scheduler, 1, 0.5)
    before = report_of(scheduler).memory_used
    commands = scheduler.handle(BlockArrived(block(1, (task(1, 1, 0.25),), 0.5)), 1.0)
    assert only(commands, StartBatch)[0].build_variant
    assert report_of(scheduler).memory_used == before + VARIANT
    scheduler.handle(BatchDone(2), 1.1)
    assert not only(scheduler.handle(BlockArrived(block(2, (task(2, 1, 0.25),), 0.5)), 1.2), StartBatch)[
        0
    ].build_variant


def report_of(scheduler, now=5.0):
    return only(scheduler.handle(DeviceSampled(0.5), now), ServerReported)[0].report


def test_an_idle_instance_is_unloaded_after_idle_unload_and_not_before():
    scheduler = server(idle_unload=10.0)
    scheduler.handle(BlockArrived(block(1, (task(1),))), 0.0)
    scheduler.handle(InstanceReady(1), 1.0)
    assert only(scheduler.handle(BatchDone(1), 2.0), WakeAt) == [WakeAt(12.0)]
    assert scheduler.handle(TimerFired(), 12.0) == [UnloadInstance(1)]


def test_a_timer_during_a_batch_neither_unloads_nor_wakes_in_the_past():
    scheduler = server(idle_unload=1.0)
    loaded(scheduler, 0, 0.5, now=0.0)
    scheduler.handle(BlockArrived(block(1, (task(1),))), 0.5)
    assert scheduler.handle(TimerFired(), 1.0) == []
    assert only(scheduler.handle(BatchDone(2), 9.0), WakeAt) == [WakeAt(10.0)]


def test_an_expired_task_never_runs_and_is_returned():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    scheduler.handle(BlockArrived(block(1, (task(1),))), 1.0)
    scheduler.handle(BlockArrived(block(2, (task(2, deadline=1.5), task(3)))), 1.0)
    commands = scheduler.handle(BatchDone(2), 2.0)
    assert only(commands, TasksReturned) == [TasksReturned("a", 0, (2,), "expired")]
    assert ran(commands) == [3]


def test_cancelled_tasks_leave_the_queue_and_running_ones_finish():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    scheduler.handle(BlockArrived(block(1, (task(1),))), 1.0)
    scheduler.handle(BlockArrived(block(2, (task(2), task(3)))), 1.0)
    assert scheduler.handle(CancelTasks("a", (1, 3)), 1.1)[0].tasks == (3,)
    assert ran(scheduler.handle(BatchDone(2), 1.2)) == [2]


def test_out_of_memory_splits_the_batch_and_is_remembered():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    batch = started(scheduler.handle(BlockArrived(block(1, tuple(task(i) for i in range(1, 5)))), 1.0))[0]
    commands = scheduler.handle(BatchFailed(batch.batch_id, "out of memory", out_of_memory=True), 1.1)
    assert ran(commands) == [1, 2]
    assert ran(scheduler.handle(BatchDone(3), 1.2)) == [3, 4]
    scheduler.handle(BatchDone(4), 1.3)
    assert ran(scheduler.handle(BlockArrived(block(2, tuple(task(i) for i in range(5, 9)))), 1.4)) == [5, 6]


def test_an_older_batch_that_fails_later_raises_no_limit():
    scheduler = server(max_concurrent_batches=2, scale_queue_threshold=3, max_new_instances=2)
    commands = scheduler.handle(BlockArrived(block(1, tuple(task(i) for i in range(1, 9)))), 0.0)
    batches = [started(scheduler.handle(InstanceReady(load.instance), 0.1))[0] for load in only(commands, LoadInstance)]
    assert [len(batch.tasks) for batch in batches] == [4, 4]
    failed = batches[0]
    for left in (2, 1):
        (failed,) = started(scheduler.handle(BatchFailed(failed.batch_id, "out of memory", out_of_memory=True), 0.2))
        assert len(failed.tasks) == left
    (after,) = started(scheduler.handle(BatchFailed(batches[1].batch_id, "out of memory", out_of_memory=True), 0.3))
    assert len(after.tasks) == 1


def test_out_of_memory_with_a_single_task_returns_it_for_good():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    batch = started(scheduler.handle(BlockArrived(block(1, (task(1),))), 1.0))[0]
    commands = scheduler.handle(BatchFailed(batch.batch_id, "out of memory", out_of_memory=True), 1.1)
    assert only(commands, TasksReturned) == [TasksReturned("a", 0, (1,), "out of memory", permanent=True)]


def test_a_failed_load_returns_what_waited_for_it_and_frees_the_memory():
    scheduler = server()
    scheduler.handle(BlockArrived(block(1, (task(1), task(2)))), 0.0)
    commands = scheduler.handle(InstanceFailed(1, "device lost"), 0.1)
    assert commands == [TasksReturned("a", 0, (1, 2), "device lost")]
    assert report_of(scheduler).memory_used == 0


def test_a_second_instance_that_cannot_be_loaded_costs_the_tasks_of_the_first_nothing():
    scheduler = server(scale_queue_threshold=4, max_new_instances=1, max_concurrent_batches=2)
    loaded(scheduler, 0, 0.5)
    commands = scheduler.handle(BlockArrived(block(7, tuple(task(i) for i in range(1, 13)))), 1.0)
    (second,) = only(commands, LoadInstance)
    assert scheduler.handle(InstanceFailed(second.instance, "CUDA out of memory"), 1.1) == []
    (batch,) = started(commands)
    commands = scheduler.handle(BatchDone(batch.batch_id), 1.2)
    assert ran(commands) == [5, 6, 7, 8]
    assert only(commands, LoadInstance) == [], "not again at once"
    later = scheduler.handle(BatchDone(started(commands)[0].batch_id), 2.2)
    assert ran(later) == [9, 10, 11, 12]
    arrived = scheduler.handle(BlockArrived(block(8, tuple(task(i) for i in range(13, 17)))), 2.3)
    assert len(only(arrived, LoadInstance)) == 1, "but once more after a second"


def test_a_block_that_is_delivered_twice_runs_once():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    same = BlockArrived(block(1, (task(1),)))
    assert ran(scheduler.handle(same, 1.0)) == [1]
    scheduler.handle(same, 1.1)
    assert ran(scheduler.handle(BatchDone(2), 1.2)) == []


def test_a_block_that_is_delivered_twice_runs_once_however_many_came_meanwhile():
    scheduler = server(max_batch=64)
    loaded(scheduler, 0, 0.5)
    blocks = [BlockArrived(block(n, (task(n),))) for n in range(REMEMBERED_BLOCKS + 3)]
    did = []
    for arrived in (*blocks, blocks[1]):  # the first runs, the others wait behind it
        did += ran(scheduler.handle(arrived, 1.0))
        scheduler.check_invariants()
    for batch_id in range(2, 3 + len(blocks)):
        did += ran(scheduler.handle(BatchDone(batch_id), 1.1))
        scheduler.check_invariants()
        if len(did) >= len(blocks):
            break
    assert did == list(range(len(blocks)))


def test_percentiles_are_of_the_time_at_the_server_whatever_the_priority():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    scheduler.handle(BlockArrived(block(1, (task(1, priority=3),))), 1.0)
    scheduler.handle(BatchDone(2), 1.3)
    (reported,) = only(scheduler.handle(DeviceSampled(0.1), 1.4), ServerReported)
    assert reported.report.batch_p99 == pytest.approx(0.3)


def test_the_report_counts_queues_blocks_and_instances():
    scheduler = server()
    loaded(scheduler, 0, 0.5)
    scheduler.handle(BlockArrived(block(7, tuple(task(i) for i in range(1, 7)))), 1.0)
    report = report_of(scheduler)
    assert report.queue_per_segment == (2, 0, 0)
    assert (report.running_tasks, report.running_batches, report.open_blocks) == (4, 1, (7,))
    assert [(i.segment, i.width, i.busy) for i in report.instances] == [(0, 0.5, 1)]
    assert report.memory_used == 2 * WEIGHT


def test_a_budget_too_small_for_the_network_is_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"vram_budget is .* needs .* raise vram_budget_gib or lower max_batch"):
        server(vram_budget=2 * WEIGHT)


def test_a_task_that_counts_as_having_come_later_is_passed_until_then_and_no_longer():
    """How a dispatcher's order by cost reaches the servers' queues: the bound on waiting is kept in them too."""
    scheduler, bound, took = server(max_batch=1), 1.0, 0.1
    loaded(scheduler, 0, 0.5)
    loaded(scheduler, 0, 1.0)
    numbers = iter(range(1, 100))

    def arrives(width, now, counts_from):
        one = msgspec.structs.replace(task(next(numbers)), arrival=counts_from)
        return scheduler.handle(BlockArrived(block(one.task_id, (one,), width, exact=True)), now)

    (running,) = started(arrives(0.5, 0.0, 0.0))
    arrives(1.0, 0.0, bound)  # dear: counts as late as it may
    widths = []
    for step in range(1, 20):
        now = step * took
        arrives(0.5, now - took / 2, now - took / 2)  # cheap ones keep coming, one for each that ends
        (running,) = started(scheduler.handle(BatchDone(running.batch_id), now))
        widths.append(running.width)
        scheduler.check_invariants(now)
    assert widths.index(1.0) in (9, 10), "as soon as none that came before the bound waits"
    assert widths.count(1.0) == 1
