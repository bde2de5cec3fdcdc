"""`slim load`'s callers where nothing answers."""

import asyncio

from slim_scheduler.client import load
from slim_scheduler.client.load import Tally, closed_loop
from slim_scheduler.client.senders import LOST, Status


def test_a_caller_whose_connection_is_lost_pauses_before_it_tries_again(monkeypatch):
    monkeypatch.setattr(load, "LOST_PAUSE_S", 0.01)
    tally = Tally()

    async def lost(number: int) -> Status:
        return LOST

    asyncio.run(closed_loop(lost, 2, 0.1, tally))
    assert 0 < len(tally.ended) <= 20
    assert {status for _, _, status in tally.ended} == {LOST}
