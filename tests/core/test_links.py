"""What tasks move over the links, and how long it takes, counted by hand."""

import pytest

from slim_scheduler.core.router.costs import moved_bytes, transfer_time
from tests.core.facts import cluster, seen, server, view

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
    assert transfer_time(known, what, known.servers[to], 8) == pytest.approx(0.002 + 8 * size / BYTES_PER_S)
