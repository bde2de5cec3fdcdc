"""A device's rest: what it owes, and how busy it is at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slim_scheduler.core.server.rest import PAID_AHEAD, Rest


def test_a_busy_second_owes_its_share_and_idle_time_pays_it():
    rest = Rest(0.8)
    rest.turn(True, 1.0)
    assert not rest.due(1.0 + PAID_AHEAD)
    assert rest.due(1.2)
    rest.turn(False, 1.2)
    assert rest.until() == pytest.approx(1.2 + (0.2 - PAID_AHEAD) / 4)
    assert rest.due(1.22)
    assert not rest.due(1.225)


def test_nothing_is_due_of_a_device_that_does_most_when_it_is_always_busy():
    rest = Rest(1.0)
    rest.turn(True, 0.0)
    assert not rest.due(1000.0)
    rest.turn(False, 1000.0)
    assert rest.until() is None


@given(
    st.floats(0.05, 1.0),
    st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.001, 0.3), st.booleans()), min_size=1, max_size=30),
)
def test_in_no_stretch_of_time_it_is_busier_than_is_best_for_it(best, history):
    """Whoever starts as soon as nothing is due is busy for the best share of any stretch, and what was paid ahead."""
    rest, now, busy = Rest(best), 0.0, []
    for waits, length, at_once in history:
        now += 0.0 if at_once else waits
        if rest.due(now):
            now = rest.until()
        assert not rest.due(now), "it has rested by then"
        rest.turn(True, now)
        busy.append((now, now + length))
        now += length
        rest.turn(False, now)
    for first, (start, _) in enumerate(busy):
        for last in range(first, len(busy)):
            worked = sum(end - began for began, end in busy[first:last])  # before the last began
            assert worked <= best * (busy[last][0] - start) + PAID_AHEAD * (1 - best) + 1e-5
