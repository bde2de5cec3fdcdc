"""The cost model, counted by hand: bytes over the links, and when a block would be back."""

from math import expm1

import msgspec
import pytest

from slim_scheduler.core.router.costs import ServerCost, moved_bytes, tasks_to_stay_busy
from slim_scheduler.core.router.learned.observation import TIME_SCALE, ExtendedEncoder
from slim_scheduler.core.view import InstanceCount
from tests.core.facts import WIDTHS, cluster, seen, server, view

BYTES_PER_S = 10_000.0
NAMES = ("a", "b", "c")


def facts(**changes):
    servers = (server(name, bytes_per_s=BYTES_PER_S, link_latency=0.001) for name in NAMES)
    return cluster(*servers, **{"move_activations": True, **changes})


def head(segment=1, previous=1.0, home="a", now=0.0):
    return view(*map(seen, NAMES), segment=segment, previous=previous, home=home, now=now).head


FIRST = head(0, None, None)


@pytest.mark.parametrize(
    ("what", "to", "moves", "size"),
    [
        (FIRST, "b", True, 100),
        (FIRST, "b", False, 100),
        (head(), "a", True, 0),
        (head(), "b", True, 400),
        (head(previous=0.5), "b", True, 200),
        (head(), "b", False, 0),
    ],
)
def test_inputs_move_always_and_activations_when_they_leave_home(what, to, moves, size):
    known = facts(move_activations=moves)
    assert moved_bytes(known, what, to) == size
    assert ServerCost(known.servers[to], known).transfer(what, 8) == pytest.approx(0.002 + 8 * size / BYTES_PER_S)


def test_tasks_that_keep_a_server_busy_cover_the_way_there_and_back_and_full_batches_to_run():
    near = server("a", bytes_per_s=float("inf"), link_latency=0.0)
    assert tasks_to_stay_busy(near, facts().shape) == 2 * 8, "one that runs and one to follow"
    two = msgspec.structs.replace(near, concurrency=2)
    assert tasks_to_stay_busy(two, facts().shape) == 3 * 8
    # 200 narrow tasks/s, and a message both ways behind the 20 ms of another batch's inputs beside its own
    far = msgspec.structs.replace(near, bytes_per_s=40_000.0, link_latency=0.001)
    assert tasks_to_stay_busy(far, facts().shape) == (2 + 2) * 8
    # over a slow link the device is short of work however much is on its way: 8 inputs take 8 s, and so on
    slow = msgspec.structs.replace(near, bytes_per_s=100.0, link_latency=0.0)
    assert tasks_to_stay_busy(slow, facts().shape) == (2 + 4) * 8
    for odd in ({"bytes_per_s": 1e-320}, {"link_latency": 1e308}):
        assert tasks_to_stay_busy(msgspec.structs.replace(near, **odd), facts().shape) == (2 + 128) * 8


def test_a_block_is_back_after_the_queue_its_link_its_run_and_a_load():
    known = facts()
    a = seen("a", {(0, 0.5): 4, (1, 1.0): 2}, loaded=((1, 0.5),))
    block = view(a, segment=1, previous=1.0, home="b", waiting=3).head
    predicted = ServerCost(known.servers["a"], known).predict(a, block, 3)
    assert predicted.backlog == pytest.approx(4 * 0.005 + 2 * 0.010)
    assert predicted.transfer == pytest.approx(0.002 + 3 * 400 / BYTES_PER_S)
    assert predicted.run == pytest.approx((0.015, 0.030))
    ahead = predicted.backlog + predicted.transfer
    load = 0.05 + known.shape.instance_bytes(1, 1.0, 8) / 1e9  # of the width that is not there
    assert predicted.done == pytest.approx([ahead + 0.015, ahead + 0.030 + load])


def test_an_instance_on_its_way_out_serves_nobody():
    known, a = facts(), seen("a")
    cost = ServerCost(known.servers["a"], known)
    assert cost.loads(a.report, 0) == [0.0, 0.0]
    leaving = (InstanceCount(0, 1.0, 0, 0, 0), InstanceCount(0, 0.5, 0, 0, 1))
    a.report = msgspec.structs.replace(a.report, instances=leaving)
    assert cost.loads(a.report, 0) == [0.0, pytest.approx(0.05, rel=0.1)], "the narrow one is being loaded"


def test_a_policy_sees_what_the_heuristics_reckon_with():
    known, unit = facts(), 0.1
    a = seen("a", {(0, 0.5): 4}, loaded=())
    now = view(a, segment=1, previous=0.5, home="b", waiting=5)
    encoder = ExtendedEncoder(known, unit)
    row = encoder.encode(now).servers[0]
    cost = ServerCost(known.servers["a"], known)
    done = [unit * expm1(TIME_SCALE * figure) for figure in row[encoder.layout.server["done"]].tolist()]
    assert done == pytest.approx([cost.completion(a, now.head, width) for width in WIDTHS], rel=1e-5)
