"""The stall meter counts what kept the event loop, and nothing else."""

import asyncio
import time

from tests.stalls import LOOK, Stalls


async def test_a_blocked_loop_is_a_stall_as_long_as_it_was_blocked():
    stalls, loop = Stalls(), asyncio.get_running_loop()
    await stalls.settled()
    begin = loop.time()
    time.sleep(0.2)
    blocked = loop.time() - begin
    await stalls.settled()
    end = loop.time()
    assert stalls.between(begin, end) >= blocked - 2 * LOOK
    assert stalls.between(begin, end) <= end - begin
    assert stalls.longest(end - begin) >= blocked - 2 * LOOK


async def test_what_was_before_or_after_does_not_count():
    stalls, loop = Stalls(), asyncio.get_running_loop()
    await stalls.settled()
    time.sleep(0.1)
    await stalls.settled()
    begin = loop.time()
    await stalls.settled()
    assert stalls.between(begin, begin) == 0.0
    assert stalls.between(begin - 1000.0, begin - 900.0) == 0.0
