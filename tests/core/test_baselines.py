from collections import Counter

import pytest
from numpy.random import default_rng

from slim_scheduler.core.errors import ConfigError, InputError
from slim_scheduler.core.profile import Curve, Latency, LatencyTable, Profile
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.router.heuristics import (
    CostModel,
    JoinShortestQueue,
    PowerOfTwo,
    RandomRouter,
    RoundRobin,
    width_rule,
    width_shares,
)
from slim_scheduler.core.view import Head, InstanceCount, ServerReport, ServerView, View
from tests.core.facts import choices
from tests.core.networks import SEGMENTS, SHAPE, WIDTHS

SERVERS = ("a", "b", "c")


def view(outstanding=(0, 0, 0), credit=8, segment=0, home=None, waiting=5, widths=WIDTHS, down=(), full_too=False):
    servers = {}
    for name, count in zip(SERVERS, outstanding, strict=True):
        servers[name] = ServerView(name, credit, 0, 0.0)
        servers[name].outstanding = count
        servers[name].pending = {(0, 1.0): count} if count else {}
        servers[name].up = name not in down
    head = Head(segment, 0.5 if segment else None, home, waiting, 0.1, None, widths)
    return View(1.0, head, 20, [20, 0, 0], 0, servers, choices(servers, full_too))


def profile(seconds_per_item):
    rows = tuple(
        Latency(s, p, w, (seconds_per_item * w, 8 * seconds_per_item * w))
        for s in range(SEGMENTS)
        for p in (WIDTHS if s else (None,))
        for w in WIDTHS
    )
    return Profile(
        device="made up",
        model=SHAPE.name,
        source="made up",
        batches=(1, 8),
        latency_rows=rows,
        load_s=1.0,
        load_bytes_per_s=1e12,
        memory_bytes=1 << 30,
        power=Curve((0.0, 1.0), (10.0, 20.0)),
    )


def facts(seconds=(0.01, 0.02, 0.04), bytes_per_s=1e9, move=True):
    servers = {
        name: ServerFacts(name, profile(s), LatencyTable(profile(s), 8), 1.0, 8, 1, 1 << 30, 0.0, bytes_per_s)
        for name, s in zip(SERVERS, seconds, strict=True)
    }
    return RouterFacts(SHAPE, (1, 8), servers, move)


def with_instances(seen):
    """All servers report every instance as loaded."""
    instances = tuple(InstanceCount(s, w, 1, 0, 0) for s in range(SEGMENTS) for w in WIDTHS)
    for server in seen.servers.values():
        server.report = ServerReport(server.name, 0, 0.0, (0,) * SEGMENTS, 0, 0, 0, 1, instances, ())
    return seen


def test_random_draws_each_part_uniformly_and_ignores_credit():
    rng, router = default_rng(0), RandomRouter((1, 8))
    drawn = [router.decide(view(outstanding=(8, 0, 0), full_too=True), rng) for _ in range(6000)]
    for part, values in (("server", SERVERS), ("width", WIDTHS), ("group", (1, 8))):
        counts = Counter(getattr(d, part) for d in drawn)
        assert set(counts) == set(values)
        expected = 6000 / len(values)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


def test_random_never_draws_a_server_that_is_out_of_service():
    rng, router = default_rng(0), RandomRouter((1,))
    assert {router.decide(view(down=("b",)), rng).server for _ in range(200)} == {"a", "c"}


def test_round_robin_takes_turns_and_skips_full_servers():
    rng, router = default_rng(0), RoundRobin("round-robin:0.5", width_rule("0.5", SHAPE))
    assert [router.decide(view(), rng).server for _ in range(4)] == ["a", "b", "c", "a"]
    assert router.decide(view(outstanding=(0, 8, 0)), rng).server == "c"


def test_jsq_takes_the_shortest_queue_and_as_large_a_group_as_there_is():
    decision = JoinShortestQueue("jsq:0.5", width_rule("0.5", SHAPE)).decide(view((3, 1, 2)), default_rng(0))
    assert (decision.server, decision.width, decision.group) == ("b", 0.5, 5)


def test_jsq_draws_among_ties():
    rng, router = default_rng(0), JoinShortestQueue("jsq:0.5", width_rule("0.5", SHAPE))
    assert {router.decide(view((1, 4, 1)), rng).server for _ in range(50)} == {"a", "c"}


def test_power_of_two_never_takes_the_longest_of_three():
    rng, router = default_rng(0), PowerOfTwo("p2c:1", width_rule("1", SHAPE))
    chosen = Counter(router.decide(view((0, 2, 5)), rng).server for _ in range(600))
    assert chosen["c"] == 0
    assert chosen["a"] > chosen["b"] > 0


def test_cost_model_prefers_the_fast_server_until_its_queue_costs_more():
    router = CostModel("cost-model:1", width_rule("1", SHAPE), facts())
    rng = default_rng(0)
    assert router.decide(with_instances(view((0, 0, 0), waiting=1)), rng).server == "a"
    # a: 4 queued at 0.01 s and its own 0.01 s; b: its own 0.02 s
    assert router.decide(with_instances(view((4, 0, 0), waiting=1)), rng).server == "b"


def test_cost_model_counts_the_load_of_a_missing_instance():
    seen = with_instances(view((0, 0, 0), waiting=1))
    seen.servers["a"].report = None
    assert CostModel("cost-model:1", width_rule("1", SHAPE), facts()).decide(seen, default_rng(0)).server == "b"


def test_cost_model_keeps_an_item_at_home_when_moving_it_is_dear():
    seen = with_instances(view(segment=1, home="c", waiting=1))
    rule = width_rule("1", SHAPE)
    assert CostModel("c", rule, facts(bytes_per_s=1000.0)).decide(seen, default_rng(0)).server == "c"
    assert CostModel("c", rule, facts(bytes_per_s=1000.0, move=False)).decide(seen, default_rng(0)).server == "a"


def test_a_tuple_gives_each_segment_its_width():
    rule = width_rule("0.25/0.5/1", SHAPE)
    assert [rule(view(segment=s).head, default_rng(0)) for s in range(3)] == [0.25, 0.5, 1.0]


def test_a_width_that_a_request_forbids_becomes_the_next_allowed():
    rule = width_rule("0.5", SHAPE)
    assert rule(view(widths=(0.25, 0.75)).head, default_rng(0)) == 0.75
    assert rule(view(widths=(0.25,)).head, default_rng(0)) == 0.25


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("0.6", InputError, "width 0.6 is not served; available: 0.25, 0.5, 0.75, 1"),
        ("0.25/0.5", ConfigError, "has 2 entries; made-up has 3 segments"),
        ("wide", ConfigError, "width 'wide' is neither"),
    ],
)
def test_a_bad_width_rule_is_refused_clearly(text, error, message):
    with pytest.raises(error, match=message):
        width_rule(text, SHAPE)


def test_width_shares_draw_like_the_run_they_came_from():
    rule = width_shares({0: {0.25: 30.0, 1.0: 10.0}})
    rng = default_rng(0)
    drawn = Counter(rule(view().head, rng) for _ in range(4000))
    assert set(drawn) == {0.25, 1.0}
    assert drawn[0.25] / 4000 == pytest.approx(0.75, abs=0.04)
