"""`slim load`: callers where nothing answers, and what it says of refusals."""

import asyncio

import pytest

from slim_scheduler.client import load
from slim_scheduler.client.client import Constraints
from slim_scheduler.client.load import Tally, closed_loop
from slim_scheduler.client.senders import LOST, Status
from slim_scheduler.core.errors import InputError


def test_a_caller_whose_connection_is_lost_pauses_before_it_tries_again(monkeypatch):
    monkeypatch.setattr(load, "LOST_PAUSE_S", 0.01)
    tally = Tally()

    async def lost(number: int) -> Status:
        return LOST

    asyncio.run(closed_loop(lost, 2, 0.1, tally))
    assert 0 < len(tally.ended) <= 20
    assert {status for _, _, status in tally.ended} == {LOST}


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_model_that_is_not_there_is_refused_in_one_line(server, scheme):
    url = f"{scheme}://127.0.0.1:{server.http if scheme == 'http' else server.grpc}"
    with pytest.raises(InputError, match=f"{url} refuses: .*model nope does not exist; loaded: digits"):
        load.load(url, rate=5.0, duration=0.2, model="nope", warmup=0.0)


@pytest.mark.parametrize(("scheme", "status"), [("http", "400"), ("grpc", "INVALID_ARGUMENT")])
def test_the_result_says_why_requests_failed(server, scheme, status):
    url = f"{scheme}://127.0.0.1:{server.http if scheme == 'http' else server.grpc}"
    result = load.load(url, rate=50.0, duration=0.2, constraints=Constraints(width=0.3), warmup=0.0)
    assert result.answered == 0
    assert result.errors == result.sent > 0
    assert "0.3" in result.reasons[status]
    assert list(result.reasons) == [status]
