"""The pace of a server: what its batches took, beside its profile, and what routers make of it."""

from itertools import pairwise
from math import expm1

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from slim_scheduler.core.messages import (
    BatchDone,
    BatchFailed,
    BlockArrived,
    DeviceSampled,
    InstanceReady,
    LoadInstance,
    ServerReported,
    StartBatch,
)
from slim_scheduler.core.profile import Curve
from slim_scheduler.core.router.costs import ServerCost, seconds_per_item
from slim_scheduler.core.router.learned.observation import TIME_SCALE, ExtendedEncoder
from slim_scheduler.core.router.plan import plans as plans_module
from slim_scheduler.core.router.plan.follower import PlanFollower, PlanLedger
from slim_scheduler.core.router.plan.plans import MOST_FLEETS, Plans
from slim_scheduler.core.router.plan.program import NOTHING, PlanProgram
from slim_scheduler.core.router.slackfit import SlackFit
from slim_scheduler.core.server.pace import STAYS, STEP, Pace
from slim_scheduler.core.server.scheduler import ServerKnobs, ServerScheduler
from slim_scheduler.core.types import Batch
from tests.core.facts import Table, cluster, seen, server, view
from tests.core.networks import SHAPE, WEIGHT, block, only, task

RNG = default_rng(0)
PREDICTED = 0.05
FACTS = cluster(server("a"), server("b"))


def pace(sharing=(1.0, 1.0), slowdown=(1.0, 1.0)) -> Pace:
    profile = msgspec.structs.replace(
        server("a").profile, sharing=sharing, slowdown=Curve((0.0, 1.0), tuple(map(float, slowdown)))
    )
    return Pace(lambda segment, previous, width, size: PREDICTED, profile)


def batch(number: int, now: float) -> Batch:
    return Batch(number, 1, 0, 0.5, 0.5, None, (task(number),), now)


def run(pace: Pace, took: float, count: int = 100, at_once: int = 1, utilization=None, builds=False) -> float:
    """So many batches, so many at a time, which take `took` each; returns the pace."""
    now = 0.0
    for first in range(0, count, at_once):
        batches = [batch(first + i, now) for i in range(at_once)]
        for one in batches:
            pace.began(one, builds, now)
        now += took
        for one in batches:
            pace.ran(one, utilization, now)
        now += 0.02  # at rest
    return pace.value


def slow(name: str, pace: float, **changes):
    """A server as the router sees it, which reports that pace."""
    found = seen(name, **changes)
    found.report = msgspec.structs.replace(found.report, pace=pace)
    return found


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.3, 2.0, 3.0])
def test_it_is_what_batches_take_by_the_profile(factor):
    assert run(pace(), factor * PREDICTED) == pytest.approx(factor, rel=STEP**0.75 - 1 + 0.01)


@pytest.mark.parametrize("factor", [0.96, 1.04])
def test_what_may_be_chance_leaves_it_alone(factor):
    assert run(pace(), factor * PREDICTED) == 1.0


def test_one_batch_that_was_disturbed_decides_little_however_long_it_took():
    assert run(pace(), 2 * PREDICTED, count=1) == 1.0
    assert run(pace(), 100.0, count=1) == pytest.approx(STEP)
    assert run(pace(), 100.0) == pytest.approx(STEP**40), "but a server may really be so slow"


def test_a_server_that_gets_no_batches_is_forgiven():
    measured = pace()
    assert run(measured, 3 * PREDICTED) > 2.5
    told = [measured.at(100.0 + second) for second in range(0, 200, 10)]
    assert told == sorted(told, reverse=True)
    assert told[-1] == 1.0


def test_time_that_a_batch_runs_forgives_nothing():
    measured = pace()
    assert run(measured, 3 * PREDICTED) > 2.5
    measured.began(batch(1000, 17.0), False, 17.0)
    assert measured.at(1000.0) > 2.3


def test_batches_of_no_time_at_all_are_as_fast_as_can_be_told():
    assert run(pace(), 0.0, count=20_000) == pytest.approx(STEP**-40, rel=0.2)


@pytest.mark.parametrize(("sharing", "both"), [((1.0, 1.0), 2.0), ((1.0, 1.5), 2 / 1.5)])
def test_batches_that_share_the_device_are_not_slow(sharing, both):
    assert run(pace(sharing), both * PREDICTED, at_once=2) == 1.0
    assert run(pace(sharing), 2 * both * PREDICTED, at_once=2) == pytest.approx(2.0, rel=0.09)


def test_nor_is_a_device_that_is_as_slow_as_its_profile_says_where_it_is_busy():
    assert run(pace(slowdown=(1.0, 1.5)), 1.5 * PREDICTED, utilization=1.0) == 1.0
    assert run(pace(slowdown=(1.0, 1.5)), 1.5 * PREDICTED, utilization=0.0) == pytest.approx(1.5, rel=0.09)


def test_a_batch_that_built_something_or_failed_says_nothing():
    measured = pace()
    assert run(measured, 3 * PREDICTED, builds=True) == 1.0
    for number in range(100):
        measured.began(batch(number, number), False, float(number))
        measured.failed(batch(number, number), number + 0.9)
    assert measured.value == 1.0


@given(st.lists(st.floats(0.9, 1.1), min_size=30, max_size=60), st.floats(0.5, 4.0))
def test_it_stays_within_a_step_of_the_average_and_does_not_flutter(noise, factor):
    measured, told, now = pace(), [], 0.0
    for number, one in enumerate(noise * 4):
        measured.began(batch(number, now), False, now)
        now += one * factor * PREDICTED
        measured.ran(batch(number, now), None, now)
        told.append(measured.value)
    late = told[len(told) // 2 :]
    assert len(set(late)) <= 3
    assert 0.9 / STEP**STAYS * 0.95 < late[-1] / factor < 1.1 * STEP**STAYS * 1.05


def test_a_server_tells_the_pace_of_its_batches():
    """By all that its scheduler tells it: what was built, what failed, how busy the device is."""
    profile = msgspec.structs.replace(server("a").profile, sharing=(1.0,), slowdown=Curve((0.0, 1.0), (1.0, 1.0)))
    knobs = ServerKnobs(max_batch=1, vram_budget=100 * WEIGHT)

    def after(took: float, *, failing: int = 0, busy: float = 0.0, slowed: float = 1.0) -> float:
        curve = Curve((0.0, 1.0), (1.0, slowed))
        measured = Pace(lambda *of: PREDICTED, msgspec.structs.replace(profile, slowdown=curve))
        machine, now = ServerScheduler("a", knobs, SHAPE, 1, None, measured), 0.0
        for number in range(1, 120):
            commands = machine.handle(BlockArrived(block(number, (task(number),), 0.5)), now)
            for load in only(commands, LoadInstance):
                commands = machine.handle(InstanceReady(load.instance), now)
            machine.handle(DeviceSampled(busy), now)
            running = only(commands, StartBatch)[0].batch
            now += took
            if number <= failing:
                machine.handle(BatchFailed(running.batch_id, "broken"), now)
            else:
                machine.handle(BatchDone(running.batch_id), now)
        return only(machine.handle(DeviceSampled(busy), now), ServerReported)[0].report.pace

    assert after(PREDICTED) == 1.0
    assert after(2 * PREDICTED) == pytest.approx(2.0, rel=0.09)
    assert after(2 * PREDICTED, failing=20) == pytest.approx(2.0, rel=0.09), "what failed shares nothing any more"
    assert after(2 * PREDICTED, busy=1.0, slowed=2.0) == 1.0


def test_predictions_are_the_profiles_times_the_pace():
    cost = ServerCost(FACTS.servers["a"], FACTS)
    head = view(seen("a"), segment=1, previous=1.0, waiting=3).head
    usual, late = (cost.predict(slow("a", p, pending={(0, 0.5): 4}), head, 3) for p in (1.0, 2.0))
    assert late.backlog == pytest.approx(2 * usual.backlog)
    assert late.run == pytest.approx([2 * seconds for seconds in usual.run])
    assert late.transfer == usual.transfer
    encoder = ExtendedEncoder(FACTS, 0.1)
    rows = [encoder.encode(view(slow("a", p), seen("b"), waiting=3)).servers[0] for p in (1.0, 2.0)]
    shown = encoder.layout.server["run"]
    ratios = [expm1(TIME_SCALE * b) / expm1(TIME_SCALE * a) for a, b in zip(*(row[shown] for row in rows), strict=True)]
    assert ratios == pytest.approx([2.0] * len(ratios), rel=1e-4)


def test_slackfit_has_less_time_on_a_slow_server():
    router = SlackFit(cluster(server("a", bytes_per_s=1e15)), Table(), slo=10.0)
    assert router.decide(view(slow("a", 1.0), slack=0.1601), RNG).width == 1.0
    assert router.decide(view(slow("a", 2.0), slack=0.3199), RNG).width == 0.5
    assert router.decide(view(slow("a", 2.0), slack=0.3201), RNG).width == 1.0


def test_a_plan_gives_a_slow_server_less():
    """Two servers carry 100 items/s each at width 0.5; one is half as fast as its profile says."""
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
    of_a = []
    for segment, previous in ((0, None), (1, 0.5)):
        now = view(slow("a", 2.0), seen("b"), segment=segment, previous=previous, waiting=0, now=1.0, completed=150)
        shares = ledger.shares(now)
        of_a.append(sum(share for (name, _), share in shares.items() if name == "a"))
    assert ledger.load == 1.0, "three quarters of what they would carry is all that they do"
    assert sum(of_a) / 2 == pytest.approx(1 / 3, abs=0.02)


def test_the_load_that_is_planned_for_is_of_what_servers_carry_now():
    loads = []
    for p in (1.0, 2.0):
        ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
        ledger.shares(view(slow("a", p), slow("b", p), waiting=0, now=1.0, completed=60))
        loads.append(ledger.load)
    assert loads[1] == pytest.approx(2 * loads[0], abs=0.021)


def test_a_change_of_pace_is_followed_at_once():
    router = PlanFollower(Plans(FACTS, Table(), rho=1.0))
    widths = []
    for p in (1.0, 3.0, 1.0):
        now = 1.0 + 0.001 * len(widths)
        decision = router.decide(view(slow("a", p), slow("b", p), waiting=1, now=now, completed=60), RNG)
        widths.append(decision.width)
    assert widths == [1.0, 0.5, 1.0]


def test_paces_that_all_have_need_no_other_plan():
    plans = Plans(FACTS, Table(), rho=1.0)
    ledger = PlanLedger(plans)
    for p in (1.0, 1.5, 3.0, 0.7):
        ledger.shares(view(slow("a", p), slow("b", 1.1 * p), waiting=0, now=p, completed=60))
    assert set(plans._fleets) == {plans.whole}


@pytest.mark.parametrize("slowed", [1.0, 2.0])
def test_a_load_at_the_edge_of_a_step_changes_no_plan_over_and_over(slowed):
    plans = Plans(FACTS, Table(), rho=1.0, steps=100)
    ledger = PlanLedger(plans)
    most = plans.most((("a", slowed), ("b", 1.0)))
    loads, received = [], 0
    for second in range(1, 40):
        received += round(1000 * most * (0.449 if second % 2 else 0.4505)) / 1000
        now = view(slow("a", slowed), seen("b"), waiting=0, now=float(second))
        ledger.shares(msgspec.structs.replace(now, received=received, squares=received))
        loads.append(ledger.load)
    assert sum(a != b for a, b in pairwise(loads[5:])) <= 1


SLOW_A = (("a", 2.0), ("b", 1.0))  # another fleet than the whole one


def test_plans_that_are_mixed_are_near_the_best_and_keep_all_limits():
    plans = Plans(FACTS, Table(), rho=0.9, steps=100)
    facts, program, _ = plans._fleet(SLOW_A)
    for step in (5, 11, 20, 38, 66, 95, 96, 100):
        mixed = plans.shares((SLOW_A, step)).plan
        best = program.most_even(plans.load((SLOW_A, step)))
        assert best.accuracy - 0.01 <= mixed.accuracy <= best.accuracy + 1e-6
        if step > 10:  # below, the plan of ten steps is followed
            assert mixed.load == pytest.approx(best.load)
        for name, of_server in facts.servers.items():
            busy = sum(
                rate * seconds_per_item(of_server, s.segment, s.previous_width, s.width)
                for (at, s), rate in mixed.steps.items()
                if at == name
            )
            assert busy <= 0.9 + 1e-6
        for segment in range(FACTS.shape.segments):
            rates = [rate for (_, s), rate in mixed.steps.items() if s.segment == segment]
            assert sum(rates) == pytest.approx(mixed.load, rel=10 * NOTHING)


def test_no_look_waits_for_two_plans(monkeypatch):
    plans = Plans(FACTS, Table(), rho=1.0, steps=100)
    ledger, made = PlanLedger(plans), []
    monkeypatch.setattr(PlanProgram, "most_even", counted(PlanProgram.most_even, made))
    most, now, received, planned = plans.most(SLOW_A), 1.0, 0.0, []
    for load in (0.42, 0.42, 0.42, 0.87, 0.87, 0.87, 0.23, 0.23, 0.23):
        for _ in range(10):
            before = len(made)
            now, received = now + 0.1, received + 0.1 * load * most
            state = view(slow("a", 2.0), seen("b"), waiting=0, now=now)
            ledger.shares(msgspec.structs.replace(state, received=round(received), squares=round(received)))
            planned.append(ledger.load)
            assert len(made) <= before + 1
    assert 0 < len(made) <= 10
    assert planned[29] == pytest.approx(0.44, abs=0.02), "not 0.5"
    assert planned[59] == pytest.approx(0.87, abs=0.025), "not 0.9"


@pytest.mark.parametrize("waiting", [0, 40])
def test_a_fleet_whose_plans_were_forgotten_is_planned_for_as_a_new_one(monkeypatch, waiting):
    plans = Plans(FACTS, Table(), rho=1.0, steps=100)
    ledger, made = PlanLedger(plans), []
    monkeypatch.setattr(PlanProgram, "most_even", counted(PlanProgram.most_even, made))
    most = plans.most(SLOW_A)
    paces = [2.0, 2.0, *2.0 ** np.arange(2, MOST_FLEETS + 1), 2.0, 2.0, 2.0, 2.0 ** (MOST_FLEETS + 2)]
    for second, pace in enumerate(paces, 1):
        before, received = len(made), round(0.34 * most * second)
        state = view(slow("a", pace), seen("b"), waiting=waiting, now=float(second))
        ledger.shares(msgspec.structs.replace(state, received=received, squares=received))
        assert len(made) <= before + 1
    assert len(ledger._asked) <= MOST_FLEETS


def test_a_run_is_the_same_whatever_others_on_its_plans_asked_for():
    def loads(plans):
        ledger, received = PlanLedger(plans), 0
        planned = []
        for second in range(1, 12):
            received += round((0.3 + 0.05 * second) * plans.most(SLOW_A))
            now = view(slow("a", 2.0), seen("b"), waiting=0, now=float(second))
            ledger.shares(msgspec.structs.replace(now, received=received, squares=received))
            planned.append(ledger.load)
        return planned

    plans = Plans(FACTS, Table(), rho=1.0, steps=100)
    assert loads(plans) == loads(plans)


def counted(method, made):
    def counting(self, load):
        made.append(load)
        return method(self, load)

    return counting


def test_the_load_is_told_in_items_that_come_whatever_the_pace():
    for p in (1.0, 2.0):
        now = view(slow("a", p), slow("b", p), waiting=0, now=1.0, completed=60)
        assert PlanLedger(Plans(FACTS, Table(), rho=1.0)).rate(now) == pytest.approx(60, abs=4)


def test_a_fleet_is_the_same_in_whatever_order_its_servers_joined():
    plans = Plans(FACTS, Table(), rho=1.0)
    PlanLedger(plans).shares(view(seen("b"), seen("a"), waiting=0, now=1.0, completed=60))
    assert set(plans._fleets) == {plans.whole}


def test_plans_of_old_paces_are_forgotten(monkeypatch):
    monkeypatch.setattr(plans_module, "MOST_FLEETS", 4)
    plans = Plans(FACTS, Table(), rho=1.0, steps=5)
    for steps in range(20):
        key = ((("a", STEP**steps), ("b", 1.0)), 3)
        plans.shares(key), plans.prices(key), plans.worth(key), plans.usual_time(key)
    kept = [plans._shares, plans._prices, plans._worth, plans._passes]
    assert len(plans._fleets) <= 5
    assert all({key[0] for key in keys} <= set(plans._fleets) for keys in kept)
    assert plans.whole in plans._fleets
