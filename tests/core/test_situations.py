"""A situation that comes again gets the decision it had; whatever the policy could act on makes it another one."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from numpy.random import default_rng

from slim_scheduler.core.router.learned.situations import KEPT, MOST_KEPT, Situations
from slim_scheduler.core.types import Decision
from slim_scheduler.setup.accuracy_files import read_accuracy
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import load_profiles, load_shape, router_facts
from slim_scheduler.setup.policy_files import load_router
from slim_scheduler.sim.host import Simulation
from tests.core.facts import cluster, seen, server, view

UNIT = 0.01
FACTS = cluster(server("a"), server("b"))
CHOSEN = Decision("a", 1.0, 4)


def known(situations, first, second):
    situations.keep(situations.key(first), CHOSEN)
    return situations.decided(situations.key(second)) == CHOSEN


def servers(**changes):
    return seen("a", **changes), seen("b")


def down(server):
    server.up = False
    return server


def reported(server, **changes):
    server.report = msgspec.structs.replace(server.report, made_at=0.05, **changes)
    return server


def test_the_same_situation_is_known():
    assert known(Situations(FACTS, UNIT), view(*servers(), age=0.001), view(*servers(), age=0.001, now=KEPT / 2))


def test_a_report_that_says_nothing_new_changes_nothing():
    assert known(Situations(FACTS, UNIT), view(*servers()), view(reported(seen("a"), utilization=0.51), seen("b")))


def test_ages_within_a_step_are_the_same():
    assert known(Situations(FACTS, UNIT), view(*servers(), age=0.0001), view(*servers(), age=0.0002))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(view(*servers(), segment=1, previous=0.5), id="segment"),
        pytest.param(view(*servers(), waiting=7), id="waiting"),
        pytest.param(view(*servers(pending={(0, 1.0): 8})), id="pending elsewhere"),
        pytest.param(view(*servers(), home="a"), id="home"),
        pytest.param(view(*servers(), widths=(0.5,)), id="widths"),
        pytest.param(view(*servers(), slack=0.05), id="slack"),
        pytest.param(view(*servers(), age=0.05), id="age"),
        pytest.param(view(*servers(credit=63)), id="credit"),
        pytest.param(view(*servers(pending={(0, 0.5): 1})), id="pending"),
        pytest.param(view(down(seen("a")), seen("b")), id="down"),
        pytest.param(view(seen("a")), id="left"),
        pytest.param(view(reported(seen("a"), utilization=0.9), seen("b")), id="busier"),
        pytest.param(view(reported(seen("a"), utilization=None), seen("b")), id="unknown"),
        pytest.param(view(reported(seen("a"), power_w=150.0), seen("b")), id="power"),
        pytest.param(view(reported(seen("a"), pace=1.1), seen("b")), id="pace"),
        pytest.param(view(reported(seen("a"), memory_used=1 << 29), seen("b")), id="memory"),
        pytest.param(view(reported(seen("a"), queue_per_segment=(1, 0)), seen("b")), id="queued"),
        pytest.param(view(seen("a", loaded=((0, 0.5),)), seen("b")), id="loaded"),
        pytest.param(view(*servers(), now=KEPT), id="time"),
    ],
)
def test_another_situation_is_not(other):
    assert not known(Situations(FACTS, UNIT), view(*servers()), other)


def asked(situations, seen_views):
    """Asks about each view, keeps what is not known, and says how many had a key."""
    keys = 0
    for each in seen_views:
        key = situations.key(each)
        if key is None:
            continue
        keys += 1
        if situations.decided(key) is None:
            situations.keep(key, CHOSEN)
        assert len(situations._decided) <= MOST_KEPT
        assert len(situations._classes) <= MOST_KEPT
    return keys


def ever_new(now=0.0):
    return [view(*servers(), waiting=waiting, now=now) for waiting in range(1, 3 * MOST_KEPT)]


def test_where_nothing_comes_again_none_is_kept_until_the_time_is_over():
    situations = Situations(FACTS, UNIT)
    assert asked(situations, ever_new()) == MOST_KEPT
    assert asked(situations, ever_new(now=KEPT)) == MOST_KEPT
    changing = [view(reported(seen("a"), queue_per_segment=(n, 0)), seen("b")) for n in range(3 * MOST_KEPT)]
    assert asked(Situations(FACTS, UNIT), changing) <= MOST_KEPT


def test_where_most_come_again_they_are_kept_on():
    twice = [each for pair in zip(ever_new(), ever_new(), strict=True) for each in pair]
    assert asked(Situations(FACTS, UNIT), twice) == len(twice)


def test_a_server_that_joined_later_is_of_no_situation():
    assert known(Situations(FACTS, UNIT), view(*servers()), view(*servers(), seen("new")))


def test_a_quiet_cluster_is_looked_at_a_few_times_only_and_decided_the_same():
    config = load_config(Path("examples/demo/cluster.toml"), ("workload.duration_s=3",))
    shape = load_shape(config)
    facts = router_facts(config, shape, load_profiles(config, shape))
    router = load_router(Path("examples/demo/policies/balanced"), facts, lambda: read_accuracy(config.model.path))
    each_time = load_router(Path("examples/demo/policies/balanced"), facts, lambda: read_accuracy(config.model.path))
    each_time._situations = None
    looked = Counter()
    look = router._look

    def counted(view, rng):
        looked["times"] += 1
        return look(view, rng)

    router._look = counted
    simulation = Simulation(config, "ppo", 0, recorder=Nobody(), router=router)
    rng = default_rng(0)
    decisions = 0
    while (seen := simulation.run_until_decision()) is not None:
        decisions += 1
        assert router.decide(seen, rng) == each_time.decide(seen, rng)
        simulation.decide()
    assert decisions > 2000
    assert looked["times"] < decisions / 4


class Nobody:
    def step(self, machine, now, event, commands):
        pass
