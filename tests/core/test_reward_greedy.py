"""The one-step optimum against a plain reading of its definition, choice by choice."""

from itertools import product

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng

from slim_scheduler.core.profile import Curve
from slim_scheduler.core.router.costs import ServerCost
from slim_scheduler.core.router.reward_greedy import RewardGreedy
from slim_scheduler.setup.config import RewardConfig
from tests.core.facts import WIDTHS, Table, cluster, seen, server, view

RNG = default_rng(0)
FACTS = cluster(
    server("a", link_latency=0.002),
    server("b", lambda s, p, w, n: 0.004 + 0.003 * w * n, power=Curve((0.0, 1.0), (50.0, 250.0)), slowdown=2.0),
    server("c", lambda s, p, w, n: 0.001 + 0.02 * w * n, max_batch=4),
)


def by_hand(now, weights: RewardConfig) -> dict[tuple[str, float, int], float]:
    """Predicted reward of every choice, in the words of the method."""
    table, head = Table(), now.head
    mean = np.mean([table.top1(t) for t in product(WIDTHS, repeat=2)])
    costs = {name: ServerCost(facts, FACTS) for name, facts in FACTS.servers.items()}
    backlog = {name: costs[name].backlog(server) for name, server in now.servers.items()}
    rewards = {}
    for name, width, group in product(now.servers, head.widths, FACTS.groups):
        facts, chosen = FACTS.servers[name], now.servers[name]
        if not chosen.available:
            continue
        count = min(group, head.waiting, chosen.credit, facts.max_batch)
        run = facts.slowdown * facts.latency.seconds(head.segment, head.previous_width, width, count)
        load = costs[name].loads(chosen.report, head.segment)[WIDTHS.index(width)]
        wait = backlog[name] + run + load + costs[name].transfer(head, count)
        latency = head.age + wait
        utilization, power = [], []
        for other, server_view in now.servers.items():
            before = server_view.report.utilization
            queued = backlog[other] + (run if other == name else 0.0)
            in_window = max(0.0, min(queued, wait) - max(0.0, wait - 0.5))
            after = (max(0.0, 0.5 - wait) * before + in_window) / 0.5
            utilization.append(after)
            power.append(FACTS.servers[other].profile.power((before + after) / 2))
        known = [
            table.top1(t)
            for t in product(WIDTHS, repeat=2)
            if t[head.segment] == width and (head.segment == 0 or t[0] == head.previous_width)
        ]
        rewards[name, width, group] = (
            weights.alpha * (np.mean(known) - mean)
            - weights.beta * latency
            - weights.gamma * np.mean(power) * latency
            - weights.delta * np.var(utilization)
        )
    return rewards


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all_choices(seed):
    rng = default_rng(seed)
    weights = RewardConfig(alpha=1.0, beta=rng.uniform(0, 3), gamma=rng.uniform(0, 0.02), delta=rng.uniform(0, 1))
    servers = [
        seen(name, {(0, 0.5): int(rng.integers(1, 20)), (1, 1.0): int(rng.integers(1, 20))}, utilization=rng.random())
        for name in FACTS.servers
    ]
    segment = seed % 2
    now = view(*servers, segment=segment, previous=0.5 if segment else None, waiting=int(rng.integers(1, 12)), age=0.1)
    rewards = by_hand(now, weights)
    decision = RewardGreedy(FACTS, Table(), weights).decide(now, RNG)
    found = rewards[decision.server, decision.width, decision.group]
    assert found == pytest.approx(max(rewards.values()), abs=1e-12)


def test_accuracy_alone_goes_wide_and_latency_alone_goes_narrow():
    now = view(seen("a"), seen("b"), seen("c"))
    assert RewardGreedy(FACTS, Table(), RewardConfig(beta=0, gamma=0, delta=0)).decide(now, RNG).width == 1.0
    assert RewardGreedy(FACTS, Table(), RewardConfig(alpha=0, gamma=0, delta=0)).decide(now, RNG).width == 0.5


def test_a_wider_instance_that_is_loaded_is_what_would_run():
    # Only the wide instance is there, so asking for narrow gains nothing: both choices are predicted alike.
    now = view(seen("a", loaded=((0, 1.0),)), seen("b", credit=0))
    router = RewardGreedy(cluster(server("a"), server("b")), Table(), RewardConfig())
    rewards, _ = router.rewards(now, [now.servers["a"]])
    assert rewards[:, 0, 0] == pytest.approx(rewards[:, 0, 1])


def test_a_width_that_is_just_within_the_upgrade_is_what_would_run():
    # As 0.7 and 0.1, which are just less than 0.8.
    now = view(seen("a", loaded=((0, 1.0),)))
    facts = cluster(msgspec.structs.replace(server("a"), max_upgrade=0.5 - 1e-12))
    rewards, _ = RewardGreedy(facts, Table(), RewardConfig()).rewards(now, [now.servers["a"]])
    assert rewards[:, 0, 0] == pytest.approx(rewards[:, 0, 1])


def test_of_a_full_server_a_block_is_taken_to_have_all_that_wait():
    """A router with `chooses_full` falls back on this one."""
    router = RewardGreedy(FACTS, Table(), RewardConfig())
    full, free = (view(seen("a", credit=credit), waiting=8) for credit in (0, 64))
    a, b = (router.rewards(now, [now.servers["a"]])[0] for now in (full, free))
    assert (np.argmax(a[:, 0, 0]), len(np.unique(a[:, 0, 0]))) == (np.argmax(b[:, 0, 0]), len(np.unique(b[:, 0, 0])))


def test_servers_without_credit_are_not_chosen():
    now = view(seen("a", credit=0), seen("b", credit=0), seen("c", {(0, 1.0): 30}))
    assert RewardGreedy(FACTS, Table(), RewardConfig()).decide(now, RNG).server == "c"
