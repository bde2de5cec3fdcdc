"""A process that is behind refuses what would be late, and only then."""

import asyncio
import time

import pytest

from slim_scheduler.frontend.pace import Pace
from slim_scheduler.frontend.refusal import Kind


async def busy(pace: Pace, requests: int, seconds: float) -> None:
    """So many requests end one after the other, and the loop does nothing else meanwhile."""
    for _ in range(requests):
        pace.came()
    begin = time.monotonic()
    for done in range(requests):
        while time.monotonic() < begin + seconds * (done + 1) / requests:
            pass
        pace.went()
    await asyncio.sleep(0.03)  # the tick that was due long ago


async def test_a_process_that_is_behind_refuses_near_deadlines():
    pace = Pace()
    assert pace.too_late(0.001) is None, "never been busy"
    await busy(pace, 400, 0.6)
    for _ in range(200):
        pace.came()
    time.sleep(0.1)  # the loop stands still
    await asyncio.sleep(0.001)  # the tick comes, late
    refusal = pace.too_late(0.1)
    assert refusal is not None
    assert refusal.kind is Kind.UNAVAILABLE
    assert refusal.retry_after is not None
    assert pace.too_late(60.0) is None


@pytest.mark.parametrize("waiting", [0, 200])
async def test_a_loop_in_time_refuses_nothing_however_many_wait_for_servers(waiting):
    pace = Pace()
    await busy(pace, 400, 0.6)
    for _ in range(waiting):
        pace.came()
    for _ in range(10):
        await asyncio.sleep(0.01)
    assert pace.too_late(10.0) is None
    assert pace.too_late(2.0) is None
