"""Who would be late, or finds the queue full, is refused when it was read; the others come in."""

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from slim_scheduler.client.client import Constraints, infer_body
from slim_scheduler.core.dispatch.admission import DEADLINE_SHARE
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.engine import SlimEngine, Ticket
from slim_scheduler.serve.decode import InferenceCall
from slim_scheduler.serve.http import front as fronts
from slim_scheduler.serve.http.front import INFER, INFLATED_AT_ONCE, HttpFront
from slim_scheduler.serve.http.request import HttpRequest
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.parameters import Asked
from slim_scheduler.serve.refusal import Refusal
from slim_scheduler.serve.repository import Repository
from slim_scheduler.serve.service import Service
from slim_scheduler.setup.config import config_from
from tests.cli.conftest import ROOT


class Client:
    """A connection that notes what is written to it."""

    gone = False

    def __init__(self) -> None:
        self.answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def answer(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> int:
        self.answered.set_result(status)
        return status

    def when_lost(self, tell: Callable[[], None]) -> None:
        pass

    def serve(self, answering: Coroutine[Any, Any, None]) -> None:
        self.answering = asyncio.create_task(answering)

    def hold(self, request: HttpRequest, body: bytes) -> None:
        request.body = body


def ask(
    front: HttpFront,
    images: np.ndarray,
    constraints: Constraints,
    compressed: bool = False,
    json_less: int = 0,
    model: str = "digits",
) -> "asyncio.Future[int]":
    """The status of the answer to a binary request that has just been read."""
    body, length = infer_body(images, constraints)
    client: Any = Client()
    path, headers = f"/v2/models/{model}/infer", {b"inference-header-content-length": b"%d" % (length - json_less)}
    if compressed:
        body, headers[b"content-encoding"] = gzip.compress(body, 1), b"gzip"
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


async def test_a_request_that_could_never_wait_is_not_to_come_again(images):
    nothing: Any = None
    async with serving(1.0, waiting=4) as service:
        front = HttpFront(service, nothing, Limits(), nothing)
        assert await ask(front, images[:4], Constraints()) == 200
        assert await ask(front, np.concatenate([images[:4]] * 2), Constraints()) == 400


async def test_few_bodies_are_inflated_at_once_whatever_comes(service, images, monkeypatch):
    nothing: Any = None
    front = HttpFront(service, nothing, Limits(), nothing)
    inflate, now, most = fronts.inflate, 0, 0

    async def counted(*arguments: Any) -> bytes:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            return await inflate(*arguments)
        finally:
            now -= 1

    monkeypatch.setattr(fronts, "inflate", counted)
    many = np.concatenate([images[:1]] * 1500)  # more than is inflated at once on the loop
    asked = [ask(front, many, Constraints(), compressed=True) for _ in range(5 * INFLATED_AT_ONCE)]
    assert set(await asyncio.gather(*asked)) <= {200, 503}
    assert (now, most) == (0, INFLATED_AT_ONCE)


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


async def test_the_like_of_a_refused_request_is_refused_and_counted_until_something_happens(
    service, images, monkeypatch
):
    monkeypatch.setattr("slim_scheduler.serve.http.front.JUST_READ", 60.0)  # however slow this machine is
    nothing: Any = None
    front = HttpFront(service, nothing, Limits(), nothing)
    served = service.repository.served["digits"]
    again: list[bool] = []
    offer_again = served.engine.offer_again

    def noted(offer: Ticket) -> bool:
        again.append(offer_again(offer))
        return again[-1]

    served.engine.offer_again = noted

    def asking(deadline_ms: float | None, items: int = 2) -> asyncio.Future[int]:
        return ask(front, images[:items], Constraints(deadline_ms=deadline_ms))

    first = asking(None)
    time.sleep(1.2 * DEADLINE_SHARE * 2.0)
    late = [asking(2000.0) for _ in range(4)]
    assert again == [True] * 3, "the first was offered"
    assert ask(front, images[:2], Constraints(deadline_ms=2000.0), json_less=1).result() == 400, "another head"
    assert asking(2000.0, items=1).result() == 503, "another size"
    assert asking(60_000.0).done() is False, "another deadline"
    assert [answer.result() for answer in [*late, asking(2000.0)]] == [503] * 5
    assert await first == 200
    assert await asking(2000.0) == 200, "what waited was answered"
    assert again == [True] * 3 + [False], "the last was offered"
    assert sum(served.observer.request_seconds[Outcome.REJECTED].buckets) == 6
    found = {outcome: count for outcome, count in served.engine.counts["requests"].items() if count}
    assert found == {"received": 9, "answered": 3, "rejected": 6}


async def test_a_model_s_refusal_is_known_again_after_another_s(images):
    nothing: Any = None
    async with serving(1.0, waiting=1) as service:
        await service.repository.load("digits-small")
        front = HttpFront(service, nothing, Limits(), nothing)
        models = {"digits": images[:1], "digits-small": np.zeros((1, 1, 32, 32), np.float32)}
        again = dict.fromkeys(models, 0)

        def count(model: str) -> None:
            engine = service.repository.served[model].engine
            offer_again = engine.offer_again

            def counted(offer: Ticket) -> bool:
                again[model] += 1
                return offer_again(offer)

            engine.offer_again = counted

        for model in models:
            count(model)
        waiting = [ask(front, image, Constraints(), model=model) for model, image in models.items()]
        refused = [ask(front, image, Constraints(), model=model) for model, image in list(models.items()) * 3]
        assert [answer.result() for answer in refused] == [503] * 6
        assert again == dict.fromkeys(models, 2), "the first of each was offered"
        assert await asyncio.gather(*waiting) == [200, 200]


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
        probes: list[asyncio.Future[int]] = []
        while not any(probe.done() and probe.result() == 503 for probe in probes):  # until the engine knows how long
            running += [asking(None) for _ in range(32 if engine.fifo_length < 256 else 0)]
            await asyncio.sleep(0.05)
            probes.append(asking(1000.0))
        before = engine.counts["requests"]
        answers = [*map(asking, wishes), asking(1000.0, floor=0.9999), asking(999.0)]
        assert [answer.done() for answer in answers] == [True, False, False, True, True]
        counted = engine.counts["requests"]
        assert counted["received"] - before["received"] == counted["rejected"] - before["rejected"] == 3
        served = slow.repository.served["digits"]
        assert served.observer.request_seconds[Outcome.REJECTED].total > 0.0
        assert await asyncio.gather(*running, *answers) == [200] * len(running) + [503, 200, 200, 400, 503]


async def test_who_would_find_the_queue_full_is_refused_at_once_and_nobody_later(images):
    nothing: Any = None
    async with serving(1.0, waiting=10) as service:
        front = HttpFront(service, nothing, Limits(), nothing)
        engine = service.repository.served["digits"].engine

        def asking(deadline_ms: float) -> asyncio.Future[int]:
            return ask(front, images[:2], Constraints(deadline_ms=deadline_ms))

        assert await asking(60_000.0) == 200
        first = [asking(60_000.0 + number % 2) for number in range(8)]
        assert [answer.done() for answer in first] == [False] * 5 + [True] * 3
        late = []
        for _ in range(5):  # while those move from the intake to the engine, and on
            late.append(asking(60_000.0))
            await asyncio.sleep(0)
        assert late[0].done(), "on the way is not gone"
        assert set(await asyncio.gather(*late)) <= {200, 503}
        assert (await asyncio.gather(*first)) == [200] * 5 + [503] * 3
        refused = 3 + sum(answer.result() == 503 for answer in late)
        assert engine.counts["requests"]["rejected"] == refused, "once each"


async def test_who_prefers_an_answer_gets_it_although_another_engine_takes_the_place(images):
    nothing: Any = None
    async with serving(1.0) as service:
        front = HttpFront(service, nothing, Limits(), nothing)
        served = service.repository.served["digits"]
        old, wish = served.engine, Constraints(accuracy_floor=0.9999, unmet="answer")
        answers = [ask(front, images[:1], wish) for _ in range(40)]
        await service.repository.set_router("digits", "jsq:0.5")
        answers += [ask(front, images[:1], wish) for _ in range(40)]
        assert served.engine is not old
        assert await asyncio.gather(*answers) == [200] * 80
        assert service.in_flight == service.memory.used == 0


async def test_time_in_this_process_counts_towards_the_deadline(service, images):
    served = service.repository.served["digits"]
    call = InferenceCall(images[:1], asked=Asked(deadline=0.5))
    await service.infer(served, call, arrived=time.monotonic())
    with pytest.raises(Refusal, match="not done by its deadline"):
        await service.infer(served, call, arrived=time.monotonic() - 0.6)
