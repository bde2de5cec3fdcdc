"""Known requests wait for a process that has no time, and are taken at once by one that has."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from slim_scheduler.frontend.asked import Asked
from slim_scheduler.frontend.http import HttpFront
from slim_scheduler.frontend.intake import AT_ONCE, IN_HAND, SHARE, WINDOW, Intake
from slim_scheduler.frontend.known import InferHead, Template, Templates
from slim_scheduler.frontend.limits import Limits

HEAD = InferHead("digits", "", 1, None, {})


class Taken:
    """What an intake gave away; nothing of it ends before `done` says so."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.done = 0
        self.intake = Intake(lambda connection, head, body: self.numbers.append(body[0]), self.in_hand)

    def in_hand(self) -> int:
        return len(self.numbers) - self.done

    def put(self, count: int) -> None:
        for number in range(count):
            self.intake.put((None, HEAD, memoryview(bytes((number,)))))


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_known_requests_are_taken_in_order_a_batch_at_a_time():
    taken = Taken()
    taken.put(100)
    assert taken.numbers == []
    await asyncio.sleep(0)
    assert taken.numbers == list(range(AT_ONCE))
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken.numbers == list(range(100))
    assert taken.intake.wait() == 0.0


async def test_a_loop_that_never_idles_holds_back_until_answers_are_out():
    taken = Taken()
    taken.put(200)
    for _ in range(10):
        work(0.6 * WINDOW)
        await asyncio.sleep(0)
    assert taken.numbers == list(range(IN_HAND))
    assert taken.intake.wait() > WINDOW
    taken.done = 10
    work(2 * WINDOW)
    await asyncio.sleep(0)
    assert taken.numbers == list(range(IN_HAND + 10))


async def test_a_loop_with_time_takes_all_however_long_servers_take():
    taken = Taken()
    taken.put(200)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert taken.numbers == list(range(200))


class Client:
    """A connection that notes what is written to it."""

    gone = False

    def __init__(self) -> None:
        self.answer: tuple[int, dict[bytes, bytes]] | None = None

    def answer_known(self, status: int, fields: Any, body: bytes) -> None:
        self.answer = status, dict(fields)

    def serve(self, inference: Any) -> None:
        inference.close()


async def test_who_would_be_late_behind_those_who_wait_is_refused_at_once():
    templates = Templates()
    asked = {
        b"near": Asked(deadline=0.1),
        b"far_": Asked(deadline=60.0),
        b"none": Asked(),
        b"high": Asked(0.1, priority=1),
    }
    for text, what in asked.items():
        templates.learn(text, Template("FP32", [1], what, ()))
    repository = SimpleNamespace(served={"digits": SimpleNamespace(templates=templates)})
    service: Any = SimpleNamespace(repository=repository, in_flight=0)
    nothing: Any = None
    front = HttpFront(service, nothing, Limits(), nothing)

    def ask(text: bytes) -> tuple[int, dict[bytes, bytes]] | None:
        client: Any = Client()
        front.take_known(client, InferHead("digits", "", 8, 4, {}), memoryview(text + b"data"))
        return client.answer

    assert ask(b"near") is None, "nobody waits yet"
    time.sleep(1.5 * SHARE * 0.1)
    refusal = ask(b"near")
    assert refusal is not None
    assert refusal[0] == 503
    assert float(refusal[1][b"retry-after"]) >= 1
    assert front.responses == {503: 1}
    assert [ask(text) for text in (b"far_", b"none", b"high")] == [None, None, None]
    await asyncio.sleep(0)
    assert ask(b"near") is None, "the others were taken"
