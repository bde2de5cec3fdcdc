"""Messages are read a few at a time; who sends slowly keeps nobody waiting, and is not many."""

import asyncio
from typing import Any

import pytest

from slim_scheduler.serve.grpc import reading
from slim_scheduler.serve.grpc.reading import AT_ONCE, SLOW, STREAMS, Reader
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.refusal import Kind, Refusal


class Sender:
    """A call whose message comes when the test says so."""

    def __init__(self) -> None:
        self.being_read = False
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        self.being_read = True
        return await self.message


@pytest.fixture
def brief(monkeypatch) -> float:
    monkeypatch.setattr(reading, "BRIEF", 0.05)
    return 0.05


def start(reader: Reader, count: int) -> tuple[list[Sender], list[asyncio.Task[Any]]]:
    senders = [Sender() for _ in range(count)]
    return senders, [asyncio.create_task(reader.read(sender)) for sender in senders]


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_few_read_at_a_time_in_the_order_in_which_they_came():
    senders, reads = start(Reader(Limits()), AT_ONCE + 2)
    await turn()
    assert [sender.being_read for sender in senders] == [True] * AT_ONCE + [False] * 2
    senders[1].message.set_result(b"x")
    await turn()
    assert [sender.being_read for sender in senders] == [True] * (AT_ONCE + 1) + [False]
    for sender in senders:
        if not sender.message.done():
            sender.message.set_result(b"x")
    assert await asyncio.gather(*reads) == [b"x"] * len(senders)


async def test_slow_ones_read_on_beside_the_others_and_more_of_them_are_ended(brief):
    senders, reads = start(Reader(Limits()), AT_ONCE + 1)
    ended, _ = await asyncio.wait(reads[:AT_ONCE], return_when=asyncio.FIRST_COMPLETED)
    while len(ended) < AT_ONCE - SLOW:
        ended, _ = await asyncio.wait(reads[:AT_ONCE], return_when=asyncio.FIRST_COMPLETED, timeout=0.01)
    refused = [task.exception() for task in ended]
    assert {error.kind for error in refused if isinstance(error, Refusal)} == {Kind.UNAVAILABLE}
    assert senders[-1].being_read, "it has a place"
    for sender in senders:
        if not sender.message.done():
            sender.message.set_result(b"x")
    assert await reads[-1] == b"x"
    assert [await read for read in reads[:AT_ONCE] if read not in ended] == [b"x"] * SLOW


async def test_a_message_that_never_comes_is_given_up(brief):
    _, (read,) = start(Reader(Limits(body_timeout_s=0.2)), 1)
    with pytest.raises(Refusal, match=r"within 0\.2 s") as caught:
        await read
    assert caught.value.kind is Kind.TOO_SLOW


async def test_who_waits_for_a_place_too_long_is_told_so():
    reader = Reader(Limits(head_timeout_s=0.05))
    _, reads = start(reader, AT_ONCE + 1)
    with pytest.raises(Refusal, match="being read and more wait"):
        await reads[-1]
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    senders, reads = start(reader, AT_ONCE)
    await turn()
    assert all(sender.being_read for sender in senders), "who is cancelled leaves its place"


async def test_streams_are_few_and_an_idle_one_ends():
    reader = Reader(Limits(idle_timeout_s=0.05))
    opened = [reader.stream() for _ in range(STREAMS)]
    for stream in opened:
        stream.__enter__()
    with pytest.raises(Refusal, match="8 streams are open"), reader.stream():
        pass
    with pytest.raises(Refusal, match=r"no message came within 0\.05 s"):
        await reader.read_stream(Sender())
    for stream in opened:
        stream.__exit__(None, None, None)
    with reader.stream():
        pass
