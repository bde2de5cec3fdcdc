"""What crosses a call arrives as it left, and every server tells the dispatcher's time."""

import numpy as np
import pytest

from slim_scheduler.core.messages import BatchReported, BlockArrived, TasksReturned
from slim_scheduler.core.types import Block, Task
from slim_scheduler.engine.cluster.clock import OffsetEstimate, SharedClock
from slim_scheduler.engine.cluster.wire import (
    PIECE,
    BlockMessage,
    Forget,
    Poll,
    PollReply,
    ServerStep,
    TaskOutputs,
    cut,
    decode_block,
    decode_poll,
    decode_reply,
    encode,
    join,
    pieces_of,
)

TASK = Task(5, 3, 1, 0.5, "a", 1.25, None, 0)
BLOCK = Block(9, "b", 1, 0.75, 0.5, False, (TASK,), 2.0)


def test_messages_arrive_as_they_left():
    message = BlockMessage(BLOCK, (4,))
    steps = (
        ServerStep(2.5, BlockArrived(BLOCK), (BatchReported("b", 1, 2, 1, 0.75, (5,), 2.0, 2.5, None),)),
        ServerStep(2.6, None, (TasksReturned("b", 1, (6,), "its activation is lost", activation_lost=True),)),
    )
    reply = PollReply(0, 1.0, 2.0, 100, steps, ())
    poll = Poll(0.5, Forget((1,), (2,)), message)
    assert decode_block(encode(message)) == message
    assert decode_poll(encode(poll)) == poll
    assert decode_reply(encode(reply)) == reply


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 500])
def test_items_survive_being_cut_into_pieces(rows):
    items = np.random.default_rng(0).standard_normal((rows, 3, 32, 32), dtype=np.float32)
    pieces = tuple(cut(items))
    assert all(isinstance(p, np.ndarray) or len(p) <= 100_000 for p in pieces), "Ray would store a larger one apart"
    np.testing.assert_array_equal(join(pieces, (3, 32, 32)), items)


def test_offset_is_taken_from_the_exchange_that_lost_least_time():
    estimate = OffsetEstimate()
    estimate.add(10.0, 110.2, 110.2, 10.4)  # 0.4 s on the way, evenly: off by 100
    estimate.add(11.0, 111.9, 111.9, 12.0)  # 1 s on the way, nearly all of it there
    assert estimate.offset == pytest.approx(-100.0)


def test_time_that_an_answer_waited_at_the_server_does_not_count():
    estimate = OffsetEstimate()
    estimate.add(10.0, 110.001, 110.101, 10.102)
    assert estimate.offset == pytest.approx(-100.0, abs=1e-3)


def test_a_corrected_offset_never_turns_time_back():
    clock = SharedClock(0.0)
    before = clock.now()
    clock.offset = -5.0
    assert clock.now() >= before


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_an_array_travels_in_the_pieces_that_were_announced_or_whole(rows):
    array = np.arange(rows * 2 * 30_000, dtype=np.float32).reshape(rows, 30_000, 2)[:, :, ::-1]
    pieces = pieces_of(array.nbytes)
    sent = cut(array, pieces)
    assert len(sent) == pieces
    assert (sent[0] is array) == (rows == 40), "too many pieces for one call"
    np.testing.assert_array_equal(join([*sent, b"", b""], array.shape[1:]), array)


def test_an_array_that_is_larger_than_announced_is_not_cut():
    array = np.zeros((3, PIECE), np.float32)
    assert cut(array, 2)[0] is array


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_answers_arrive_as_they_were(dtype):
    output = np.arange(24, dtype=dtype).reshape(3, 8)[:, ::2]  # columns of a larger array do not lie together
    reply = PollReply(0, 1.0, 2.0, 100, (), (TaskOutputs.of((7, 8, 9), output),))
    (answers,) = decode_reply(encode(reply)).answers
    assert answers.tasks == (7, 8, 9)
    assert answers.array.dtype == output.dtype
    np.testing.assert_array_equal(answers.array, output)
