"""The router's talk with a server: always a question open, a block is one too, answers in order, and how it ends."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from slim_scheduler.core.types import Block, Task
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.channel import MOST_OPEN_POLLS, OPEN_POLLS, Channel, SessionEndedError
from slim_scheduler.engine.cluster.clock import OffsetEstimate
from slim_scheduler.engine.cluster.wire import BlockMessage, Forget, Poll, PollReply, decode_poll, encode

TASK = Task(5, 3, 1, 0.5, "a", 1.25, None, 0)
MESSAGE = BlockMessage(Block(9, "b", 1, 0.75, 0.5, False, (TASK,), 2.0), (4,))


class Actor:
    """Stands where Ray's handle of an actor would: keeps the calls, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Poll, Future[Any]]] = []
        self.delivered = 0
        self.poll = Method(self._poll)
        self.deliver = Method(self._deliver)

    def _poll(self, poll: bytes, *pieces: bytes) -> "Reference":
        answer: Future[Any] = Future()
        self.asked.append((decode_poll(poll), answer))
        return Reference(answer)

    def _deliver(self, message: bytes, *pieces: bytes) -> None:
        self.delivered += 1

    def answer(self, question: int, number: int) -> None:
        self.asked[question][1].set_result(encode(PollReply(number, 1.0, 1.0, 0, (), ())))


class Method:
    def __init__(self, remote: Any) -> None:
        self.remote = remote


class Reference:
    def __init__(self, answer: "Future[Any]") -> None:
        self._answer = answer

    def future(self) -> "Future[Any]":
        return self._answer


class Talk:
    def __init__(self, hung_limit: float = 30.0) -> None:
        self.actor = Actor()
        self.heard: list[int] = []
        offset = OffsetEstimate()
        offset.add(0.0, 0.0, 0.0, 0.0)
        self.talk = Channel(
            self.actor, MonotonicClock(), offset, Forget, lambda reply: self.heard.append(reply.number), hung_limit
        )
        self.over = asyncio.ensure_future(self.talk.until_over())


async def turns(n: int = 4) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_questions_are_kept_open_and_answers_are_heard_in_order():
    story = Talk()
    await turns()
    assert len(story.actor.asked) == OPEN_POLLS
    story.actor.answer(1, number=1)
    await turns()
    assert story.heard == []
    story.actor.answer(0, number=0)
    await turns()
    assert story.heard == [0, 1]
    assert len(story.actor.asked) == 2 * OPEN_POLLS
    story.over.cancel()


async def test_a_block_is_a_question_and_its_answer_needs_no_other():
    story = Talk()
    await turns()
    story.talk.deliver(MESSAGE, None)
    assert story.actor.asked[-1][0].message == MESSAGE
    story.actor.answer(0, number=0)
    await turns()
    assert len(story.actor.asked) == OPEN_POLLS + 1
    story.over.cancel()


async def test_blocks_beyond_the_most_questions_travel_alone():
    story = Talk()
    await turns()
    for _ in range(MOST_OPEN_POLLS):
        story.talk.deliver(MESSAGE, None)
    assert len(story.actor.asked) == MOST_OPEN_POLLS
    assert story.actor.delivered == OPEN_POLLS
    story.over.cancel()


async def test_an_actor_that_has_no_life_ends_the_talk():
    story = Talk()
    await turns()
    story.actor.asked[0][1].set_result(None)
    with pytest.raises(SessionEndedError, match="started again"):
        await story.over
    story.talk.deliver(MESSAGE, None)  # nobody asks any more
    assert len(story.actor.asked) == OPEN_POLLS


async def test_a_silent_server_ends_the_talk():
    story = Talk(hung_limit=0.0)
    with pytest.raises(TimeoutError, match="no answer for 0 s"):
        await story.over
