"""Where each item's input and activations are, and how a batch's inputs are put together without waste.

A batch's output stays one tensor until few of its rows are wanted; every item remembers its row in it. Rows that lie
side by side are gathered as one view, so a batch that continues unbroken costs no copy. The event loop owns
`Activations`; `gather` runs on an execution thread.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.types import ItemId, ItemOutcome, Task, TaskId

Row = tuple[Tensor, int]  # a tensor with a batch dimension, and the item's place in it
Key = TypeVar("Key", bound=Hashable)
FEW = 4  # an output of which at most one row in so many is still wanted is not kept whole


class KeptRows(Generic[Key]):
    """Rows of batches' outputs that are wanted for longer than the batch. Once few of an output's rows are left, they
    move into a tensor of their own, so that one row does not hold the memory of a batch; on a CPU alone, since a device
    counts whole outputs. Every copy follows three times as many rows that went."""

    def __init__(self) -> None:
        self._rows: dict[Key, Row] = {}
        self._of: dict[int, dict[Key, None]] = {}  # by id() of an output, which a row keeps alive

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __getitem__(self, key: Key) -> Row:
        return self._rows[key]

    def get(self, key: Key) -> Row | None:
        return self._rows.get(key)

    def put(self, key: Key, row: Row) -> None:
        self.drop(key)
        self._rows[key] = row
        self._of.setdefault(id(row[0]), {})[key] = None

    def drop(self, key: Key) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        output = row[0]
        left = self._of[id(output)]
        del left[key]
        if not left:
            del self._of[id(output)]
        elif FEW * len(left) <= len(output) and output.device.type == "cpu":
            del self._of[id(output)]
            rows = gather([self._rows[other] for other in left]).clone()
            self._of[id(rows)] = left
            for at, other in enumerate(left):
                self._rows[other] = rows, at


class ItemState:
    """What the host keeps of one item on its way: its input, its newest output, and its newest attempt.

    `done` is the segment that made `output`, -1 before the first. The input stays until the item ends, because an item
    whose activation is lost begins again, and so may one that runs a second time. `kept` are the segments whose outputs
    are kept for a second pass. `answer` is the first pass's, once the second has begun.
    """

    __slots__ = ("answer", "done", "input", "kept", "output", "task")

    def __init__(self, source: Row) -> None:
        self.input = source
        self.output: Row | None = None
        self.answer: Row | None = None
        self.kept: list[int] = []
        self.done = -1
        self.task: TaskId | None = None

    def source(self, segment: int) -> Row | None:
        """What a segment reads, None where it is not here."""
        if segment == 0:
            return self.input
        return self.output if self.done == segment - 1 else None


class ActivationStore(Protocol):
    """Keeps what the batches of a server read and write."""

    def inputs(self, tasks: Iterable[Task]) -> tuple[list[Task], list[Row]]:
        """The tasks whose answer somebody still waits for, with their input rows."""

    def store(self, tasks: Sequence[Task], output: Tensor) -> None:
        """Row i of `output` is the result of tasks[i]."""


class Activations:
    """Rows of all items in flight, in one process. Only the newest attempt of an item may read or write."""

    def __init__(self) -> None:
        self._items: dict[ItemId, ItemState] = {}
        self._kept: KeptRows[tuple[ItemId, int]] = KeptRows()  # by item and segment
        self._answers: tuple[Tensor | None, npt.NDArray[np.float32]] = None, np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Iterable[ItemId], batch: Tensor) -> None:
        """Row i of `batch` is the input of the i-th item."""
        for row, item in enumerate(items):
            self._items[item] = ItemState((batch, row))

    def sent(self, tasks: Iterable[Task]) -> None:
        """The dispatcher sends these attempts. An output that they do not continue is done with."""
        for task in tasks:
            state = self._items.get(task.item)
            if state is not None:
                state.task = task.task_id
                if state.done != task.segment - 1:
                    if task.again and state.answer is None:
                        state.answer = state.output
                    state.output = self._kept.get((task.item, task.segment - 1)) if task.again else None
                    state.done = -1 if state.output is None else task.segment - 1
                    self._drop_kept(task.item, state)

    def is_newest(self, task: Task) -> bool:
        """Whether an attempt is the newest of an item in flight."""
        state = self._items.get(task.item)
        return state is not None and state.task == task.task_id

    def inputs(self, tasks: Iterable[Task]) -> tuple[list[Task], list[Row]]:
        """The tasks whose answer somebody still waits for, with their input rows."""
        wanted: list[Task] = []
        rows: list[Row] = []
        for task in tasks:
            state = self._items.get(task.item)
            if state is not None and state.task == task.task_id:
                source = state.source(task.segment)
                if source is not None:
                    wanted.append(task)
                    rows.append(source)
        return wanted, rows

    def store(self, tasks: Sequence[Task], output: Tensor) -> None:
        """Row i of `output` is the result of tasks[i]. Late results of given-up attempts are dropped."""
        for row, task in enumerate(tasks):
            state = self._items.get(task.item)
            if state is not None and state.task == task.task_id:
                if task.keep and state.output is not None:
                    state.kept.append(state.done)
                    self._kept.put((task.item, state.done), state.output)
                state.output, state.done = (output, row), task.segment

    def results(self, ended: Sequence[ItemOutcome]) -> npt.NDArray[np.float32]:
        """A copy of the answers of items that have one, (items, ...): the newest output, or that of the first pass
        where the second did not come to its end."""
        rows = [row for item in ended if (row := self._answer_of(item)) is not None]
        if len(rows) > 1:
            return gather(rows).numpy().copy()
        batch, at = rows[0]
        if batch is not self._answers[0]:  # one conversion for all requests of a batch
            self._answers = batch, batch.numpy()
        return self._answers[1][at : at + 1].copy()

    def _answer_of(self, ended: ItemOutcome) -> Row | None:
        state = self._items[ended.item]
        return state.answer if ended.passes == 1 and state.answer is not None else state.output

    def forget(self, items: Iterable[ItemId]) -> None:
        for item in items:
            state = self._items.pop(item, None)
            if state is not None:
                self._drop_kept(item, state)

    def _drop_kept(self, item: ItemId, state: ItemState) -> None:
        for segment in state.kept:
            self._kept.drop((item, segment))
        state.kept.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct tensors that rows point into."""
        rows = [
            row
            for item, state in self._items.items()
            for row in (state.input, state.output, state.answer, *[self._kept[item, at] for at in state.kept])
            if row is not None
        ]
        seen = {id(tensor): tensor.nbytes for tensor, _ in rows}
        return sum(seen.values())


def runs(rows: Sequence[Row]) -> list[Tensor]:
    """Views that together hold the rows in order; neighbours in one tensor become one view."""
    views: list[Tensor] = []
    tensor, first = rows[0]
    last = first
    for other, row in rows[1:]:
        if other is tensor and row == last + 1:
            last = row
            continue
        views.append(tensor[first : last + 1])
        tensor, first, last = other, row, row
    views.append(tensor[first : last + 1])
    return views


def gather(rows: Sequence[Row], onto: str | None = None) -> Tensor:
    """The rows as one batch on the device they are on, or `onto` another: a view where they lie together, else one
    copy."""
    views = runs(rows) if onto is None else [view.to(onto) for view in runs(rows)]
    return views[0] if len(views) == 1 else torch.cat(views)
