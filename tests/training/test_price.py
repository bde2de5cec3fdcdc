"""What device time and links are worth, on clusters small enough to price by hand."""

import pytest

from slim_scheduler.core.profile import Curve
from slim_scheduler.core.router.plan.plans import LOAD_STEPS, Plans
from slim_scheduler.core.types import Batch, Block, Decision
from slim_scheduler.training.episode import Episode
from slim_scheduler.training.price import MOST_DELAYED, CapacityPrice, capacity_price
from slim_scheduler.training.scenario import Scenarios
from tests.core.facts import Table, cluster, seen, server, view
from tests.core.networks import task
from tests.training.clusters import small_table, training_cluster

# One server that carries 100 items/s. 5 ms more make an item's last segment wide, worth 0.2 of accuracy: 40 per second.
# From 67 items/s down all of those fit, and what is left makes first segments wide: 20 per second. Below 50 all is.
PLANS = Plans(cluster(server("a")), Table(), rho=1.0)
TIRED = Curve((0.0, 0.9, 1.0), (1.0, 1.0, 1.5))  # who never rests is slower by half


@pytest.mark.parametrize(("load", "price"), [(40, 0.0), (60, 20.0), (80, 40.0), (98, 40.0)])
def test_device_time_is_worth_what_it_buys_where_it_buys_most(load, price):
    prices = PLANS.prices((PLANS.whole, load * LOAD_STEPS // 100))
    assert prices.device == {"a": pytest.approx(price)}
    assert (prices.into, prices.out_of) == ({"a": 0.0}, {"a": 0.0}), "the link is wide"


def charged(price, view, decision, *batches):
    """For one task of a block of all that waits, as far as the group goes; it ran in batches of these sizes."""
    head, count = view.head, min(decision.group, view.head.waiting)
    tasks = tuple(task(i, segment=head.segment, previous_width=head.previous_width) for i in range(count))
    block = Block(1, decision.server, head.segment, decision.width, head.previous_width, False, tasks, view.now)
    price.decided(1, view, decision)
    for size in batches:
        mates = tuple(task(i, segment=block.segment) for i in range(100, 100 + size - count))
        ran = Batch(1, 1, block.segment, block.width, block.width, block.previous_width, tasks + mates, view.now)
        price.started(block.server, ran)
    return price.charged(1, block)


def charge(width, completed=76, waiting=8, target=8 / (2 * 84), group=8):
    """By default 84 items came in the first second, and 8 of them, no more than usual, are still there."""
    price = CapacityPrice(PLANS, 1.0, target)
    return charged(price, view(seen("a"), waiting=waiting, now=1.0, completed=completed), Decision("a", width, group))


def test_at_the_target_delay_widths_that_the_plan_mixes_are_worth_the_same():
    assert charge(1.0) - charge(0.5) == pytest.approx(0.2, rel=1e-4), "what a wide last segment earns"


def test_widths_are_worth_the_best_that_they_can_become_less_its_cost():
    worth = PLANS.worth((PLANS.whole, 80 * LOAD_STEPS // 100))  # 40 per second: narrow costs 0.2, wide 0.4
    assert [worth[ran] for ran in ((0.5, 0.5), (0.5, 1.0), (0.5,), (1.0,), ())] == pytest.approx(
        [0.6, 0.8, 0.4, 0.5, 0.2]
    )


def test_at_the_plans_prices_what_the_plan_has_adds_what_it_costs_and_all_else_less():
    for load in (60, 80):
        key = (PLANS.whole, load * LOAD_STEPS // 100)
        worth, second = PLANS.worth(key), PLANS.prices(key).device["a"]
        planned = {choice.first for choice in PLANS.shares(key).plan.choices}
        for ran in ((first, last) for first in (0.5, 1.0) for last in (0.5, 1.0)):
            loss = sum(0.010 * ran[i] * second - (worth[ran[: i + 1]] - worth[ran[:i]]) for i in range(2))
            assert (loss == pytest.approx(0.0, abs=1e-6)) == (ran in planned)
            assert loss > -1e-6


def test_a_block_earns_what_its_widths_add_by_the_plan_where_that_is_asked_for():
    now = view(seen("a"), waiting=8, now=1.0, completed=76)  # 84 per second: 40 per second of the device
    adds, not_asked = (CapacityPrice(PLANS, 1.0, 8 / (2 * 84), adds=adds) for adds in (True, False))
    for price in (adds, not_asked):
        price.decided(1, now, Decision("a", 0.5, 8))
    assert adds.worth(1, [(0.5,), (1.0,)]) == pytest.approx((0.2 + 0.3) / 2, rel=1e-4)
    assert adds.worth(1, [(0.5, 1.0)]) == pytest.approx(0.4, rel=1e-4), "what it costs"
    assert [adds.worth(2, [(0.5,)]), adds.worth(1, []), not_asked.worth(1, [(0.5,)])] == [None] * 3


def test_policies_of_one_pass_with_a_target_earn_so(tmp_path):
    said = {"recipe": "planned", "target_delay_s": 0.1}
    for training, adds in ((said, True), ({**said, "recipe": "paper", "plan_rho": 1.08}, False)):
        config = training_cluster(tmp_path / training["recipe"], training=training)
        price = capacity_price(config, lambda: PLANS)
        assert price._adds is adds


def test_a_longer_delay_costs_more_up_to_a_limit_and_idle_devices_nothing():
    assert charge(1.0, target=4 / (2 * 84)) == pytest.approx(2 * charge(1.0))
    assert charge(1.0, target=1e-9) == pytest.approx(MOST_DELAYED * charge(1.0), rel=1e-4)
    assert charge(1.0, completed=20) == 0.0


def test_without_a_target_the_queue_does_not_matter():
    short, long = (charge(1.0, target=None, waiting=waiting, completed=84 - waiting) for waiting in (4, 40))
    assert short == pytest.approx(long, rel=1e-4)
    assert short == pytest.approx(0.010 * 40.0), "10 ms of the device, at what a second is worth"


def test_a_block_that_fills_no_batch_pays_for_its_own():
    def half_launch(segment, previous, width, batch):
        return 0.010 * width * (0.5 + 0.5 * batch / 8) * 8

    facts = cluster(server("a", half_launch))
    price = CapacityPrice(Plans(facts, Table(), rho=1.0), 1.0, 0.1)
    now = view(seen("a"), now=1.0, completed=90)
    one, full = (charged(price, now, Decision("a", 0.5, group)) for group in (1, 8))
    assert one == pytest.approx(4.5 * full)


def test_a_block_that_a_servers_credit_cuts_short_pays_for_what_goes():
    def half_launch(segment, previous, width, batch):
        return 0.010 * width * (0.5 + 0.5 * batch / 8) * 8

    facts = cluster(server("a", half_launch))
    price = CapacityPrice(Plans(facts, Table(), rho=1.0), 1.0, 0.1)
    room, none = (view(seen("a", credit=credit), now=1.0, completed=90) for credit in (64, 2))
    pair = charged(price, room, Decision("a", 0.5, 2))
    assert charged(price, none, Decision("a", 0.5, 8)) == pytest.approx(pair)
    assert pair == pytest.approx(2.5 * charged(price, room, Decision("a", 0.5, 8)))  # (0.5 + 0.125) / 2 and 1 / 8


def test_a_task_that_shares_a_batch_pays_its_share_of_it():
    def half_launch(segment, previous, width, batch):
        return 0.010 * width * (0.5 + 0.5 * batch / 8) * 8

    facts = cluster(server("a", half_launch))
    price = CapacityPrice(Plans(facts, Table(), rho=1.0), 1.0, 0.1, shared=True)
    one, eight = (view(seen("a"), waiting=waiting, now=1.0, completed=98 - waiting) for waiting in (1, 8))
    joined, alone, unfinished = (charged(price, one, Decision("a", 0.5, 8), *ran) for ran in ((8,), (1,), ()))
    assert alone == pytest.approx(4.5 * joined)
    assert unfinished == alone
    assert charged(price, eight, Decision("a", 0.5, 8), 8) == pytest.approx(8 * joined), "eight times the delay"
    split = charged(price, eight, Decision("a", 0.5, 1), 8)
    assert split == pytest.approx(8 * alone), "seven of its kind were left behind"


def test_a_link_that_is_full_has_a_price_as_well():
    # Each device is fast at one segment only, so activations move, over narrow links; narrow ones are half as large.
    def first(segment, previous, width, batch):
        return batch * (0.0025 if segment == 0 else 0.020)

    def second(segment, previous, width, batch):
        return batch * (0.0025 if segment == 1 else 0.020)

    servers = server("a", first, bytes_per_s=20_000.0), server("b", second, bytes_per_s=20_000.0)
    plans = Plans(cluster(*servers, move_activations=True), Table(), rho=1.0)
    prices = plans.prices((plans.whole, LOAD_STEPS))
    link = prices.into["b"] + prices.out_of["a"]
    assert link > 0
    price = CapacityPrice(plans, 1.0, 1.0)
    now = view(seen("a"), seen("b"), segment=1, previous=1.0, home="a", now=1.0, completed=10_000)
    moves, stays = (charged(price, now, Decision(name, 0.5, 8)) for name in ("b", "a"))
    delay = 8 / (2 * plans.load((plans.whole, LOAD_STEPS)))
    expected = 0.0025 * prices.device["b"] + 400 * link
    assert (moves, stays) == (pytest.approx(expected * delay), pytest.approx(0.020 * prices.device["a"] * delay))


def test_a_credit_says_what_its_decision_cost_others(tmp_path):
    config = training_cluster(tmp_path, workload={"rate": 50_000.0})
    price = CapacityPrice(Plans(Scenarios(config).facts, small_table()), 1.0, 0.01)
    episode = Episode(config, small_table(), seed=0, charges=price)
    for _ in range(20):
        episode.decide(Decision("a", 0.5, 1) if episode.view.servers["a"].available else Decision("b", 0.5, 1))
    episode.end()
    credits = episode.take_credits()
    assert all(credit.charged > 0 for credit in credits)
    assert all(credit.net < credit.reward for credit in credits)
