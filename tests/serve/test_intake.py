"""Requests wait for a process that has no time, and are taken at once by one that has."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from slim_scheduler.client.client import Constraints, infer_body
from slim_scheduler.core.dispatch.admission import DEADLINE_SHARE
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.serve.decode import InferenceCall
from slim_scheduler.serve.http import intake
from slim_scheduler.serve.http.front import INFER, HttpFront
from slim_scheduler.serve.http.intake import AT_ONCE, IN_HAND, PAUSE, WINDOW, Intake, WaitingRequest
from slim_scheduler.serve.http.request import HttpRequest
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.parameters import Asked
from slim_scheduler.serve.refusal import Refusal
from slim_scheduler.serve.repository import Repository
from slim_scheduler.serve.service import Service
from slim_scheduler.setup.config import config_from
from tests.cli.conftest import ROOT


class Taken:
    """What an intake gave away; nothing of it ends before `answer` says so."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.ends: list[asyncio.Future[None]] = []
        self.intake = Intake(self.take, lambda: IN_HAND)

    def take(self, waiting: WaitingRequest) -> asyncio.Future[None]:
        self.numbers.append(int(waiting.call.request_id))
        self.ends.append(asyncio.get_running_loop().create_future())
        return self.ends[-1]

    def answer(self, first: int, end: int) -> None:
        for future in self.ends[first:end]:
            future.set_result(None)

    def put(self, count: int) -> None:
        for number in range(count):
            call = InferenceCall(np.zeros((2, 1, 8, 8), np.float32), str(number))
            nothing: Any = None
            request = HttpRequest(read=intake.time.monotonic())
            self.intake.put(WaitingRequest(nothing, request, nothing, call))


class Clocks:
    """The clocks that an intake reads: real time, and the work of the loop's thread."""

    def __init__(self) -> None:
        self.real = self.work = 0.0

    def monotonic(self) -> float:
        return self.real

    def thread_time(self) -> float:
        return self.work

    def pass_by(self, seconds: float, share: float) -> None:
        self.real += seconds
        self.work += share * seconds


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(intake, "time", made)
    return made


async def turns(clocks: Clocks, share: float) -> None:
    """Turns of the loop, in which its thread works for a share of the time; real time enough for what is due later."""
    for _ in range(10):
        clocks.pass_by(1.5 * WINDOW, share)
        await asyncio.sleep(2 * PAUSE)


async def test_requests_are_taken_in_order_a_batch_at_a_time():
    taken = Taken()
    taken.put(100)
    assert taken.numbers == []
    await asyncio.sleep(0)
    assert taken.numbers == list(range(AT_ONCE))
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken.numbers == list(range(100))
    assert taken.intake.wait() == 0.0


async def test_a_loop_that_never_idles_holds_back_until_answers_are_out(clocks):
    taken = Taken()
    taken.put(200)
    await turns(clocks, share=0.95)
    assert taken.numbers == list(range(IN_HAND))
    assert taken.intake.wait() > WINDOW
    assert taken.intake.items == 2 * (200 - IN_HAND)
    taken.answer(0, AT_ONCE)
    await turns(clocks, share=0.95)
    assert taken.numbers == list(range(IN_HAND + AT_ONCE))
    await turns(clocks, share=0.3)
    assert taken.numbers == list(range(200))
    assert taken.intake.items == 0


async def test_who_holds_back_goes_on_in_full_batches_when_one_ends(clocks):
    taken = Taken()
    clocks.pass_by(1.5 * WINDOW, 0.95)
    taken.put(200)
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken.numbers == list(range(IN_HAND))
    for end in (AT_ONCE - 1, AT_ONCE):  # turns of the loop are far shorter than PAUSE
        taken.answer(0 if end < AT_ONCE else end - 1, end)
        for _ in range(3):
            await asyncio.sleep(0)
        assert taken.numbers == list(range(IN_HAND + (AT_ONCE if end == AT_ONCE else 0)))


async def busy(taken: Taken, clocks: Clocks, seconds: float, batches: int) -> None:
    """A loop that is never idle and answers so many batches, one in so many seconds; as much comes as is answered."""
    for _ in range(batches):
        clocks.pass_by(seconds, 0.95)
        first = sum(end.done() for end in taken.ends)
        taken.answer(first, first + AT_ONCE)
        taken.put(AT_ONCE)
        for _ in range(4):
            await asyncio.sleep(0)


async def test_an_answer_takes_as_long_as_the_rate_of_late_says(clocks):
    taken = Taken()
    clocks.pass_by(WINDOW, 0.95)
    taken.put(5 * AT_ONCE)
    assert taken.intake.wait() == 0.0
    clocks.pass_by(0.01, 0.95)
    assert taken.intake.wait() == pytest.approx(0.01), "no rate is known, but how long the first has waited"
    await asyncio.sleep(0)
    for seconds in (0.02, 0.05, 0.01):
        await busy(taken, clocks, seconds, 100)
        assert taken.intake.items < taken.intake._unanswered == 2 * 5 * AT_ONCE, "those in hand are not answered either"
        assert taken.intake.wait() == pytest.approx(5 * seconds, rel=0.1)


async def test_a_loop_with_time_says_nothing_of_what_can_be_done(clocks):
    taken, seconds = Taken(), 0.02
    clocks.pass_by(WINDOW, 0.95)
    taken.put(5 * AT_ONCE)
    await asyncio.sleep(0)
    await busy(taken, clocks, seconds, 100)
    for end in taken.ends:
        if not end.done():
            end.set_result(None)
    await turns(clocks, share=0.3)
    for _ in range(3):
        taken.answer(sum(end.done() for end in taken.ends), len(taken.ends))
        clocks.pass_by(10.0, 0.0)  # hardly anybody comes
        await asyncio.sleep(0)
        taken.put(AT_ONCE)
        await asyncio.sleep(0)
    taken.answer(sum(end.done() for end in taken.ends), len(taken.ends))
    await asyncio.sleep(0)
    assert taken.intake.wait() == 0.0
    taken.put(5 * AT_ONCE)
    assert taken.intake.wait() == pytest.approx(5 * seconds, rel=0.1), "what was measured while it was busy"


async def test_long_requests_leave_room_for_others(clocks):
    taken = Taken()
    taken.put(IN_HAND // 2 + 1)
    await turns(clocks, share=0.95)
    taken.put(100)  # the first ones stay in hand
    await turns(clocks, share=0.95)
    assert taken.numbers[IN_HAND // 2 + 1 :] == list(range(IN_HAND // 2 - 1))


async def test_a_loop_with_time_takes_all_however_long_servers_take(clocks):
    taken = Taken()
    taken.put(200)
    await turns(clocks, share=0.3)
    assert taken.numbers == list(range(200))


class Client:
    """A connection that notes what is written to it."""

    gone = False

    def __init__(self) -> None:
        self.answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def answer(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> int:
        self.answered.set_result(status)
        return status

    def serve(self, inference: Any) -> asyncio.Task[None]:
        return asyncio.create_task(inference)


def ask(front: HttpFront, images: np.ndarray, constraints: Constraints) -> "asyncio.Future[int]":
    """The status of the answer to a binary request that has just been read."""
    body, length = infer_body(images, constraints)
    client: Any = Client()
    path, headers = "/v2/models/digits/infer", {b"inference-header-content-length": b"%d" % length}
    front.take(
        client,
        HttpRequest("POST", path=path, infer=INFER.fullmatch(path), headers=headers, body=body, read=time.monotonic()),
    )
    return client.answered


@contextlib.asynccontextmanager
async def serving(slowdown: float, waiting: int = 5000) -> AsyncIterator[Service]:
    server = {"name": "a", "device": "cpu", "slowdown": slowdown}
    tree = {"model": {"path": str(ROOT / "models/digits")}, "servers": [server], "router": {"name": "jsq:0.25"}}
    tree["dispatch"] = {"max_waiting_items": waiting}
    config = config_from(tree)
    made = Service(Repository(config, lambda config, observer: SlimEngine.from_config(config, recorder=observer)))
    await made.start()
    try:
        yield made
    finally:
        await made.stop(5.0)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(1.0) as made:
        yield made


async def test_who_would_be_late_behind_those_who_wait_is_refused_at_once(service, images):
    nothing: Any = None
    front = HttpFront(service, nothing, Limits(), nothing)

    def asking(deadline_ms: float | None, priority: int = 0) -> asyncio.Future[int]:
        return ask(front, images[:2], Constraints(deadline_ms=deadline_ms, priority=priority))

    wishes = ((2000.0, 0), (2000.0, 1), (60000.0, 0), (None, 0))
    assert await asyncio.gather(*[asking(*wish) for wish in wishes]) == [200] * 4, "nobody waits yet"
    first = asking(None)
    time.sleep(1.2 * DEADLINE_SHARE * 2.0)
    late = [asking(*wish) for wish in wishes]
    assert [answer.done() for answer in late] == [True, True, False, False]
    assert await asyncio.gather(first, *late) == [200, 503, 503, 200, 200]
    assert await asking(2000.0) == 200, "the others were taken"
    counts = service.repository.served["digits"].counts()
    for unit, size in (("requests", 1), ("items", 2)):
        found = {outcome: count / size for outcome, count in counts[unit].items() if count}
        assert found == {"received": 10, "answered": 8, "rejected": 2}


@pytest.mark.timeout(60)
async def test_who_would_be_late_behind_the_servers_is_refused_before_anything_is_decoded(images):
    nothing: Any = None

    async with serving(50.0) as slow:
        front = HttpFront(slow, nothing, Limits(), nothing)
        engine = slow.repository.served["digits"].engine

        def asking(deadline_ms: float | None, floor: float | None = None) -> asyncio.Future[int]:
            return ask(front, images[:1], Constraints(deadline_ms=deadline_ms, accuracy_floor=floor))

        wishes = (1000.0, 60_000.0, None)
        assert await asking(1000.0, floor=0.9999) == 400
        assert await asking(None) == 200
        running: list[asyncio.Future[int]] = []
        while engine.too_late(1.0) is None:  # until work waits, and the engine knows how long
            running += [asking(None) for _ in range(32 if engine.fifo_length < 256 else 0)]
            await asyncio.sleep(0.05)
        received = engine.counts["requests"]["received"]
        answers = [*map(asking, wishes), asking(1000.0, floor=0.9999), asking(999.0)]
        assert [answer.done() for answer in answers] == [True, False, False, False, True]
        assert engine.counts["requests"]["received"] == received, "the engine has not heard of them"
        served = slow.repository.served["digits"]
        counted = served.counts()["requests"]
        assert (counted["received"], counted["rejected"]) == (received + 2, 3), "and 400"
        assert served.observer.request_seconds[Outcome.REJECTED].total > 0.0
        assert await asyncio.gather(*running, *answers) == [200] * len(running) + [503, 200, 200, 400, 503]
        assert engine.too_late(1.0) is None, "nothing is held up"
        assert engine.too_late(1.0, coming=100_000) is not None, "but so much on its way would be"


async def test_who_would_find_the_queue_full_is_refused_at_once_and_nobody_later(images):
    nothing: Any = None
    async with serving(1.0, waiting=10) as service:
        front = HttpFront(service, nothing, Limits(), nothing)
        engine = service.repository.served["digits"].engine

        def asking(deadline_ms: float) -> asyncio.Future[int]:
            return ask(front, images[:2], Constraints(deadline_ms=deadline_ms))

        assert await asking(60_000.0) == 200
        before = engine.counts["requests"]["rejected"]
        first = [asking(60_000.0 + number % 2) for number in range(8)]
        assert [answer.done() for answer in first] == [False] * 5 + [True] * 3
        late = []
        for _ in range(5):  # while those move from the intake to the engine, and on
            late.append(asking(60_000.0))
            await asyncio.sleep(0)
        assert late[0].done(), "on the way is not gone"
        assert set(await asyncio.gather(*late)) <= {200, 503}
        assert (await asyncio.gather(*first)) == [200] * 5 + [503] * 3
        assert engine.counts["requests"]["rejected"] == before


async def test_time_in_this_process_counts_towards_the_deadline(service, images):
    served = service.repository.served["digits"]
    call = InferenceCall(images[:1], asked=Asked(deadline=0.5))
    await service.infer(served, call, arrived=time.monotonic())
    with pytest.raises(Refusal, match="not done by its deadline"):
        await service.infer(served, call, arrived=time.monotonic() - 0.6)
