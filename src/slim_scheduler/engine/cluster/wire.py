"""What crosses a Ray call between the router and a server, as MessagePack: blocks one way, a server's steps the other.

Nothing here decides or keeps anything. Arrays travel as pieces that are small enough for Ray to put them into the call
or its answer.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.core.messages import CancelTasks, ServerCommand, ServerEvent
from slim_scheduler.core.types import Block, Bytes, ItemId, Seconds, TaskId

# Ray copies an argument or a result of up to 100 kB into the call or its answer, up to 10 MB in one; a larger one goes
# through its object store, which costs two to three times the CPU of its pieces (docs/cluster.md).
PIECE = 96_000
MOST_PIECES = 64


class BlockMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block with where each of its tasks finds its input, None where nobody waits for the task any more.

    In segment 0 that is a row of the items that travel along, later the task whose output it is, at the task's home.
    """

    block: Block
    sources: tuple[int | None, ...]


class Forget(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What nobody will ask for again: single outputs, and everything of items that have ended."""

    outputs: tuple[TaskId, ...] = ()
    items: tuple[ItemId, ...] = ()


class Poll(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The router asks what a server did, and may send a block along: an answer per block needs no call of its own.

    `offset` leads from the server's own clock to the dispatcher's.
    """

    offset: Seconds
    forget: Forget
    message: BlockMessage | None = None


class ServerStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One `handle` call of the server's scheduler; `event` is None where only what the dispatcher must hear matters."""

    at: Seconds
    event: ServerEvent | None
    commands: tuple[ServerCommand, ...]


class PollReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The server's answer: its steps since the last one, and the answers to items.

    `number` counts a session's answers from 0: polls that are open together may be answered the other way round.
    `polled_at` and `replied_at` are on the server's own clock: with the router's two times they give its offset.
    """

    number: int
    polled_at: Seconds
    replied_at: Seconds
    memory_used: Bytes
    steps: tuple[ServerStep, ...]
    answers: "tuple[TaskOutputs, ...]"


class TaskOutputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Outputs of tasks: row i of an array is tasks[i]'s."""

    tasks: tuple[TaskId, ...]
    shape: tuple[int, ...]
    dtype: str
    data: memoryview

    @classmethod
    def of(cls, tasks: tuple[TaskId, ...], output: npt.NDArray[Any]) -> "TaskOutputs":
        return cls(tasks, output.shape, output.dtype.str, np.ascontiguousarray(output).reshape(-1).view(np.uint8).data)

    @property
    def array(self) -> npt.NDArray[Any]:
        """May not be written to."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


encode = msgspec.msgpack.Encoder().encode
decode_block = msgspec.msgpack.Decoder(BlockMessage).decode
decode_cancel = msgspec.msgpack.Decoder(CancelTasks).decode
decode_poll = msgspec.msgpack.Decoder(Poll).decode
decode_reply = msgspec.msgpack.Decoder(PollReply).decode


def pieces_of(size: Bytes) -> int:
    """How many values an array of so many bytes travels in: 1 where it is too large to be cut."""
    pieces = -(-size // PIECE)
    return pieces if pieces <= MOST_PIECES else 1


def cut(array: npt.NDArray[np.float32], most: int = MOST_PIECES) -> list[Any]:
    """An array as pieces that travel in a call, or the array itself where it would be more than `most`."""
    if array.nbytes > PIECE * most:
        return [array]
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return [bytes(data[i : i + PIECE]) for i in range(0, len(data), PIECE)]


def join(pieces: Sequence[Any], item_shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The array that was cut, (rows, *item_shape); may not be written to."""
    if isinstance(pieces[0], np.ndarray):
        return pieces[0]
    return np.frombuffer(b"".join(pieces), np.float32).reshape(-1, *item_shape)
