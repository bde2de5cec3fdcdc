"""The bound on clusters small enough to solve by hand."""

import msgspec
import pytest

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.profile import Curve, LatencyTable
from slim_scheduler.core.router.plan.program import PlanProgram, work_and_power
from tests.core.facts import Table, cluster, server, ten_ms_per_item

# One server: an item takes 5 + 5 ms at (0.5, 0.5), 15 ms at one wide segment, 20 ms at (1, 1).


def by_tuple(plan):
    return {choice.first: rate for choice, rate in plan.choices.items()}


def test_one_server_carries_at_most_what_the_narrowest_tuple_allows():
    program = PlanProgram(cluster(server("a")), Table())
    assert program.max_load() == pytest.approx(100.0)
    assert program.most_accurate(101.0) is None


def test_half_the_load_affords_the_widest_tuple():
    plan = PlanProgram(cluster(server("a")), Table()).most_accurate(50.0)
    assert plan.accuracy == pytest.approx(0.9)
    assert by_tuple(plan) == pytest.approx({(1.0, 1.0): 50.0})
    assert plan.work["a"] == pytest.approx(1.0)


def test_between_the_spare_time_goes_where_it_buys_most():
    # At 80 items/s, 0.8 s of each second is spent narrow; 0.2 s left buy 40 items/s a wide last segment.
    plan = PlanProgram(cluster(server("a")), Table()).most_accurate(80.0)
    assert by_tuple(plan) == pytest.approx({(0.5, 0.5): 40.0, (0.5, 1.0): 40.0})
    assert plan.accuracy == pytest.approx(0.6 + 0.2 / 2)


def test_rho_leaves_room():
    assert PlanProgram(cluster(server("a")), Table(), rho=0.5).max_load() == pytest.approx(50.0)
    with pytest.raises(InputError, match=r"rho is 1\.5"):
        PlanProgram(cluster(server("a")), Table(), rho=1.5)


def test_a_slower_server_adds_its_share():
    facts = cluster(server("a"), server("b", lambda *kind: 4 * ten_ms_per_item(*kind)))
    assert PlanProgram(facts, Table()).max_load() == pytest.approx(125.0)


def test_the_configured_slowdown_and_shared_execution_count():
    slow = server("a", slowdown=2.0)
    assert PlanProgram(cluster(slow), Table()).max_load() == pytest.approx(50.0)
    profile = msgspec.structs.replace(slow.profile, sharing=(1.0, 1.6))
    both = msgspec.structs.replace(slow, profile=profile, latency=LatencyTable(profile, 8), concurrency=2)
    assert PlanProgram(cluster(both), Table()).max_load() == pytest.approx(80.0)


def test_batches_are_the_most_efficient_size():
    facts = cluster(server("a", lambda segment, previous, width, batch: 0.004 + 0.001 * batch))
    assert PlanProgram(facts, Table()).max_load() == pytest.approx(8 / (2 * 0.012))


# An item's way to one server: the input's 100 bytes and two messages of 46; back: logits of 40 bytes and two messages.
DOWN, UP = 192.0, 132.0


def test_a_link_that_carries_the_inputs_bounds_the_load():
    facts = cluster(server("a", bytes_per_s=10 * DOWN))
    assert PlanProgram(facts, Table()).max_load() == pytest.approx(10.0)


def test_links_may_be_left_more_room_than_devices():
    facts = cluster(server("a", bytes_per_s=10 * DOWN))
    whole, room = PlanProgram(facts, Table()), PlanProgram(facts, Table(), links=0.8)
    assert room.max_load() == pytest.approx(0.8 * whole.max_load())
    wired = cluster(server("a"))
    assert PlanProgram(wired, Table(), links=0.8).max_load() == pytest.approx(PlanProgram(wired, Table()).max_load())


def test_two_links_carry_twice_as_much_but_one_shared_medium_does_not():
    two = (server("a", bytes_per_s=10 * DOWN), server("b", bytes_per_s=10 * DOWN))
    assert PlanProgram(cluster(*two), Table()).max_load() == pytest.approx(20.0)
    shared = PlanProgram(cluster(*two, shared_link=True), Table())
    assert shared.max_load() == pytest.approx(10 * DOWN / (DOWN + UP))


def test_activations_stay_where_moving_them_costs_too_much():
    # Each device is fast at one segment only: 2.5 ms there, 20 ms at the other. All links are narrow.
    def first(segment, previous, width, batch):
        return batch * (0.0025 if segment == 0 else 0.020)

    def second(segment, previous, width, batch):
        return batch * (0.0025 if segment == 1 else 0.020)

    free = cluster(server("a", first), server("b", second))
    assert PlanProgram(free, Table()).max_load() == pytest.approx(400.0)
    # With m items/s moved from a to b and n kept whole on either: devices 2.5 m + 22.5 n <= 1000 ms, and b's link takes
    # a message and an activation of 200 for each moved: 246 m + 192 n <= 20,000 bytes/s.
    m = (20_000 - DOWN * 1000 / 22.5) / (246 - DOWN * 2.5 / 22.5)
    n = (1000 - 2.5 * m) / 22.5
    links = {"bytes_per_s": 20_000.0}
    charged = cluster(server("a", first, **links), server("b", second, **links), move_activations=True)
    program = PlanProgram(charged, Table())
    assert program.max_load() == pytest.approx(m + 2 * n)
    plan = program.most_accurate(program.max_load() * (1 - 1e-9))
    assert sum(plan.stays.values()) == pytest.approx(2 * n, rel=1e-3)


def test_energy_is_the_least_at_the_accuracy():
    # Power 100 W idle and 200 W busy: 50 items/s narrow are busy half of the time, 150 W, 3 J per item.
    program = PlanProgram(cluster(server("a")), Table())
    assert program.least_power(50.0, 0.0).energy_per_item == pytest.approx(3.0)
    assert program.most_accurate(50.0).energy_per_item == pytest.approx(4.0)
    assert program.least_power(50.0, 0.95) is None


def test_work_goes_to_the_device_that_burns_less():
    hungry = server("a", power=Curve((0.0, 1.0), (10.0, 510.0)))
    frugal = server("b", power=Curve((0.0, 1.0), (10.0, 60.0)))
    plan = PlanProgram(cluster(hungry, frugal), Table()).least_power(50.0, 0.0)
    assert plan.work == pytest.approx({"a": 0.0, "b": 0.5})


def test_the_even_plan_leaves_every_device_the_same_room():
    plan = PlanProgram(cluster(server("a"), server("b")), Table()).most_even(20.0)
    assert plan.accuracy == pytest.approx(0.9)
    assert plan.work == pytest.approx({"a": 0.2, "b": 0.2}, rel=1e-4)


def test_a_device_that_slows_down_does_most_work_at_the_knee():
    curve = Curve((0.0, 0.9, 1.0), (1.0, 1.0, 2.0))
    most, _ = work_and_power(server("a", curve=curve), rho=1.0)
    assert most == pytest.approx(0.9)


def test_power_is_its_lower_hull():
    # A concave curve is charged by its chord: half the time at rest and half at full speed costs that much.
    _, lines = work_and_power(server("a", power=Curve((0.0, 0.5, 1.0), (100.0, 190.0, 200.0))), rho=1.0)
    assert lines == [pytest.approx((100.0, 100.0))]


def test_shares_by_segment_sum_to_one():
    plan = PlanProgram(cluster(server("a"), server("b")), Table()).most_accurate(170.0)
    for by in plan.shares().values():
        assert sum(by.values()) == pytest.approx(1.0)
