"""The router `lp`: the shares it sends are the plan's, and the plan is the load's."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng

from slim_scheduler.core.errors import InputError, RouterError
from slim_scheduler.core.router.plan.follower import PlanFollower, PlanLedger
from slim_scheduler.core.router.plan.load import PromptLoad
from slim_scheduler.core.router.plan.plans import LOAD_STEPS, HeadKind, Plans
from slim_scheduler.core.router.plan.program import PlanProgram
from slim_scheduler.core.router.plan.waiting import Waiting
from tests.core.facts import Table, cluster, seen, server, ten_ms_per_item, view

RNG = default_rng(0)
FACTS = cluster(server("a"), server("b", lambda *kind: 3 * ten_ms_per_item(*kind)))


def after_a_second_at(load: int, facts=FACTS, now: float = 1.0, rho: float = 1.0) -> PlanFollower:
    """A router that has seen `load` items arrive and be answered in the first second."""
    router = PlanFollower(Plans(facts, Table(), rho=rho))
    router.decide(view(*[seen(name) for name in facts.servers], waiting=0, now=now, completed=load), RNG)
    return router


@pytest.mark.parametrize("load", [39, 86, 126])
def test_what_it_sends_has_the_plans_shares(load):
    router = after_a_second_at(load)
    # The load in steps of the highest (400/3 items/s), rounded up.
    most = PlanProgram(FACTS, Table()).max_load()
    step = -(-load * LOAD_STEPS // most) / LOAD_STEPS
    plan = PlanProgram(FACTS, Table()).most_even(step * most * (1 - 1e-6))
    for segment, shares in plan.shares().items():
        kinds = {key[1][1] for key in plan.steps if key[1][0] == segment}
        tasks = Counter()
        for previous in kinds:
            of_kind = sum(rate for (_, s), rate in plan.steps.items() if s[:2] == (segment, previous))
            sent = Counter()
            for _ in range(2000):
                now = view(
                    seen("a"), seen("b"), segment=segment, previous=previous, waiting=1, now=1.05, completed=load
                )
                decision = router.decide(now, RNG)
                sent[decision.server, decision.width] += decision.group
            for target, count in sent.items():
                tasks[target] += count / 2000 * of_kind / plan.load
        assert dict(tasks) == pytest.approx(shares, abs=0.01)


def test_before_anything_is_measured_it_plans_for_the_highest_load():
    router = PlanFollower(Plans(FACTS, Table(), rho=1.0))
    decisions = [router.decide(view(seen("a"), seen("b"), now=0.5), RNG) for _ in range(50)]
    assert {decision.width for decision in decisions} == {0.5}


def test_a_low_load_gets_the_widest_tuple():
    router = after_a_second_at(20)
    decision = router.decide(view(seen("a"), seen("b"), now=1.5, completed=20), RNG)
    assert decision.width == 1.0


def test_the_plan_is_looked_at_again_every_second():
    router = after_a_second_at(20)
    for second in range(2, 8):  # the load rises to more than the cluster carries
        decision = router.decide(view(seen("a"), seen("b"), now=float(second), completed=20 + 300 * (second - 1)), RNG)
    assert decision.width == 0.5


def test_what_waits_counts_as_load():
    router = PlanFollower(Plans(FACTS, Table(), rho=1.0))
    busy = view(seen("a"), seen("b"), waiting=500, now=1.0)
    assert router.decide(busy, RNG).width == 0.5


def test_a_server_that_is_out_of_service_is_planned_without():
    router = after_a_second_at(20)
    down = seen("a")
    down.up = False
    for _ in range(5):
        assert router.decide(view(down, seen("b"), now=1.5, completed=20), RNG).server == "b"


def test_a_server_that_drains_is_planned_without():
    """Else what goes beyond its share finds the other one full, though the plan says that there is room."""
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
    most = PlanProgram(cluster(server("b", lambda *kind: 3 * ten_ms_per_item(*kind))), Table()).max_load()
    a = seen("a")
    ledger.shares(view(a, seen("b"), waiting=0, now=1.0, completed=30))
    a.draining, a.limit = True, 0
    shares = ledger.shares(view(a, seen("b"), waiting=0, now=1.01, completed=30))
    assert {name for name, _ in shares} == {"b"}
    assert ledger.load == pytest.approx(30 / most, abs=0.021)


def test_where_no_server_in_service_has_a_profile_it_says_so():
    with pytest.raises(RouterError, match="no server in service has a profile"):
        PlanLedger(Plans(FACTS, Table(), rho=1.0)).shares(view(seen("new"), now=1.0))


def test_a_full_server_is_passed_over():
    router = after_a_second_at(120)
    for _ in range(20):
        assert router.decide(view(seen("a", credit=0), seen("b"), now=1.5, completed=120), RNG).server == "b"


def test_what_lies_at_its_home_stays_there_where_links_are_narrow():
    facts = cluster(
        server("a", bytes_per_s=5000.0), server("b", bytes_per_s=5000.0), move_activations=True
    )  # 25 items/s of 200 bytes would fill a link
    router = after_a_second_at(90, facts)
    for home in ("a", "b"):
        now = view(seen("a"), seen("b"), segment=1, previous=0.5, home=home, now=1.5, completed=90)
        stays = sum(router.decide(now, RNG).server == home for _ in range(100))
        assert stays >= 70


@pytest.mark.parametrize("rho", [0.0, 2.5])
def test_how_busy_devices_may_be_has_bounds(rho):
    with pytest.raises(InputError, match=f"rho is {rho:g}; it must be above 0 and at most 2"):
        Plans(FACTS, Table(), rho)


def test_a_queue_stands_or_grows():
    with pytest.raises(InputError, match=r"rho is 1.5 and a queue of 0.1 s may stand"):
        Plans(FACTS, Table(), rho=1.5, waiting=Waiting(0.1, alpha=1.0, beta=0.01, gamma=0.0))


def test_above_one_a_plan_is_that_of_a_lower_load():
    carried, more = Plans(FACTS, Table(), rho=1.0), Plans(FACTS, Table(), rho=1.5)
    assert more.most(more.whole) == pytest.approx(1.5 * carried.most(carried.whole))
    for step in (30, 50):  # of a highest load that is half as much again: the same share of it
        assert more.shares((more.whole, step)).of(HeadKind(0, None, None)) == pytest.approx(
            carried.shares((carried.whole, step)).of(HeadKind(0, None, None))
        )


@pytest.mark.parametrize(("rho", "load"), [(1.0, 1.0), (1.5, 80 / 200)])
def test_what_waits_is_load_only_where_it_is_to_be_worked_off(rho, load):
    ledger = PlanLedger(Plans(FACTS, Table(), rho=rho))
    ledger.shares(view(seen("a"), seen("b"), waiting=70, now=1.0, completed=10))  # 80 came, and 70 are too many
    assert ledger.load == pytest.approx(load, abs=0.021)


def test_a_queue_that_may_stand_is_no_load():
    plans, ledger = patient()
    planned = [waits(ledger, round(30 * at), at, left=40) for at in np.arange(0.1, 30.0, 0.1)]
    assert planned[-1] == pytest.approx(30 / plans.most(plans.whole), abs=0.041), (
        "40 are less than two seconds' arrivals"
    )
    assert plans.usual_time((plans.whole, plans.steps)) >= 2.0


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("left", "planned"), [(2.0, 0.25), (3.0, 0.4)])
def test_so_long_a_queue_may_stand_whatever_the_pace(left, planned, pace):
    """`left`: seconds of arrivals; two may stand. Servers half as fast work off half the queue as they would it all."""
    _, ledger = patient()
    servers = seen("a"), seen("b")
    for one in servers:
        one.report = msgspec.structs.replace(one.report, pace=pace)
    load = 30 / pace
    for at in np.arange(0.1, 30.0, 0.1):
        waits = round(left * load)
        ledger.shares(view(*servers, waiting=waits, now=at, completed=round(load * at) - waits))
    assert ledger.load == pytest.approx(planned, abs=0.021)


@pytest.mark.parametrize(("beta", "planned"), [(0.0, 0.25), (0.01, 0.4), (0.1, 0.44), (10.0, 1.0)])
def test_the_dearer_waiting_is_the_faster_a_longer_queue_is_worked_off(beta, planned):
    _, ledger = patient(beta)
    seen_so_far = [waits(ledger, round(30 * at), at, left=90) for at in np.arange(0.1, 30.0, 0.1)]
    assert seen_so_far[-1] == pytest.approx(planned, abs=0.021), "90 are 30 too many"


def test_who_lets_a_queue_stand_takes_no_burst_for_the_load():
    plans, ledger = patient()
    for at in np.arange(0.1, 30.0, 0.1):
        before = waits(ledger, round(30 * at), at, left=0)
    most = plans.most(plans.whole)
    assert before == pytest.approx(30 / most, abs=0.041)
    assert waits(ledger, 900 + 60, 30.1, left=50) < 50 / most, "600 a second in the last tenth"
    assert waits(ledger, 900 + 60, 31.5, left=0) == 0.02, "nothing comes now, nor is anything left"


def test_where_a_queue_may_stand_a_lull_makes_no_task_stay_longer():
    """Tasks there over the rate are how long they stay: what training charges."""
    _, ledger = patient()
    for at in np.arange(0.1, 30.0, 0.1):
        waits(ledger, round(60 * at), at, left=4)
    steady = ledger.rate(view(seen("a"), seen("b"), waiting=4, now=30.0, completed=1790))
    waits(ledger, 1794, 30.5, left=4)
    assert ledger.load < 0.1, "hardly anything comes now"
    lull = ledger.rate(view(seen("a"), seen("b"), waiting=4, now=30.5, completed=1790))
    assert steady == pytest.approx(60, rel=0.1)
    assert lull > 0.8 * steady


def patient(beta: float = 0.01) -> tuple[Plans, PlanLedger]:
    plans = Plans(FACTS, Table(), rho=1.0, waiting=Waiting(2.0, alpha=1.0, beta=beta, gamma=0.0))
    return plans, PlanLedger(plans)


def waits(ledger: PlanLedger, received: int, now: float, left: int) -> float:
    """The load that is planned for, when so many have come, and some are left."""
    ledger.shares(view(seen("a"), seen("b"), waiting=left, now=now, completed=received - left))
    return ledger.load


def came(ledger: PlanLedger, received: int, now: float) -> float:
    """The load that is planned for, when so many have come, of which most were refused or expired."""
    idle = view(seen("a"), seen("b"), waiting=0, now=now)
    ledger.shares(msgspec.structs.replace(idle, received=received, squares=received))
    return ledger.load


def test_what_was_refused_is_load_too():
    """Else a surge that is refused keeps the wide plan, at which it has to be refused."""
    assert came(PlanLedger(Plans(FACTS, Table(), rho=1.0)), 120, 1.0) == pytest.approx(0.9, abs=0.021)


@pytest.mark.parametrize("after", [0.15, 0.3, 0.5, 1.0])
def test_a_rise_beyond_chance_counts_at_once(after):
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
    most = PlanProgram(FACTS, Table()).max_load()
    came(ledger, 30, 1.0)
    assert came(ledger, 30 + 34, 2.0) * most == pytest.approx(32, abs=2.8), "so much more is chance"
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
    came(ledger, 30, 1.0)
    assert came(ledger, 30 + round(120 * after), 1.0 + after) * most == pytest.approx(120, abs=2.8)


@pytest.mark.parametrize("after", [0.2, 0.5, 0.8])
def test_a_fall_beyond_chance_counts_at_once(after):
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
    most = PlanProgram(FACTS, Table()).max_load()
    came(ledger, 120, 1.0)
    assert came(ledger, 120 + 100, 2.0) * most == pytest.approx(110, abs=2.8), "so much less is chance"
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.0))
    came(ledger, 120, 1.0)
    assert came(ledger, 120 + round(10 * after), 1.0 + after) * most == pytest.approx(10, abs=2.8)


def test_who_lets_the_queue_grow_takes_no_fall_for_the_load():
    """Nothing but the load tells its plans from those of an empty cluster: all that waits would go wide at once."""
    ledger = PlanLedger(Plans(FACTS, Table(), rho=1.5))
    came(ledger, 120, 1.0)
    assert came(ledger, 121, 1.9) == pytest.approx(120 / 200, abs=0.021)
    assert came(ledger, 121, 2.1) == pytest.approx(60 / 200, abs=0.021)


@pytest.mark.parametrize("load", [0.1, 0.4])
@pytest.mark.parametrize(("sizes", "of"), [([1], [1.0]), ([32], [1.0]), ([1, 32], [0.8, 0.2])])
def test_steady_requests_of_many_items_are_no_change(load, sizes, of):
    """Poisson requests, looked at ten times a second: what is taken for the load is what chance makes of its mean."""
    rng, seen_at = default_rng(7), PromptLoad()
    rate = load * 1000
    gaps = rng.exponential(np.dot(sizes, of) / rate, 100_000)
    times, items = np.cumsum(gaps), rng.choice(sizes, len(gaps), p=of)
    received, squares = np.cumsum(items), np.cumsum(items**2)
    found = []
    for now in np.arange(0.1, min(400.0, times[-1]), 0.1):
        n = int(np.searchsorted(times, now))
        so_far = (int(received[n - 1]), int(squares[n - 1])) if n else (0, 0)
        idle = view(seen("a"), waiting=0, now=now)
        seen_at.look(msgspec.structs.replace(idle, received=so_far[0], squares=so_far[1]))
        found.append(seen_at.now)
    loads = np.array(found[20:])
    spread = np.sqrt(np.dot(np.square(sizes), of) / np.dot(sizes, of) / rate)  # of one second's mean
    assert np.mean(loads) == pytest.approx(rate, rel=0.1)
    assert np.std(loads) / rate < spread, "half of the last second's, a quarter of the one before: 0.58 of it"
    assert np.mean(loads < rate * max(0.0, 1 - 3 * spread)) < 0.01


@pytest.mark.parametrize(("rho", "width"), [(1.0, 0.5), (1.5, 1.0)])
def test_what_the_plan_has_no_place_for_goes_narrow_where_a_queue_is_to_be_worked_off(rho, width):
    ledger = PlanLedger(Plans(FACTS, Table(), rho=rho))
    now = view(seen("a", credit=0), seen("b"), waiting=1)
    shares = {("a", 0.5): 0.5, ("a", 1.0): 0.5}
    ledger.sent(now.head, ("a", 0.5), 8)
    assert ledger.other_width(now, shares) == width, "wide is what is behind"
