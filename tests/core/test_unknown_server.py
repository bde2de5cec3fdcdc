"""A server that joined after the run began has no profile: routers that need one do without it."""

import pytest
from numpy.random import default_rng

from slim_scheduler.core.router.heuristics import CostModel
from slim_scheduler.core.router.plan.follower import PlanFollower
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.router.reward_greedy import RewardGreedy
from slim_scheduler.core.router.slackfit import SlackFit
from slim_scheduler.setup.config import RewardConfig
from tests.core.facts import Table, cluster, seen, server, view

NEEDING_PROFILES = [
    lambda facts: CostModel("cost-model:0.5", lambda head, rng: 0.5, facts),
    lambda facts: SlackFit(facts, Table(), slo=1.0),
    lambda facts: RewardGreedy(facts, Table(), RewardConfig()),
    lambda facts: PlanFollower(Plans(facts, Table())),
]


@pytest.mark.parametrize("build", NEEDING_PROFILES)
def test_it_changes_no_decision_of_who_needs_profiles(build):
    facts = cluster(server("a"), server("b"))
    for credit in (64, 0):
        servers = seen("a", credit=credit), seen("b")
        decision = build(facts).decide(view(*servers, now=2.0), default_rng(0))
        assert build(facts).decide(view(*servers, seen("new"), now=2.0), default_rng(0)) == decision


@pytest.mark.parametrize("build", NEEDING_PROFILES)
def test_it_gets_what_nobody_else_has_credit_for(build):
    facts = cluster(server("a"), server("b"))
    full = [seen(name, {(0, 0.5): 64}) for name in facts.servers]
    assert build(facts).decide(view(*full, seen("new"), now=2.0), default_rng(0)).server == "new"
