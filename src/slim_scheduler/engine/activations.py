"""Where each item's input and activations are, and how a batch's inputs are put together without waste.

A batch's output stays one tensor; every item remembers its row in it. Rows that lie side by side are gathered as one
view, so a batch that continues unbroken costs no copy. The event loop owns `Ledger`; `gather` runs on an execution
thread.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from slim_scheduler.core.types import ItemId, RequestId, Task, TaskId

INPUT = -1  # the "segment" whose output is the item's input


class ItemState:
    """What the host keeps of one item on its way: the rows it may still need, and its newest attempt."""

    __slots__ = ("position", "request", "rows", "task")

    def __init__(self, request: RequestId, position: int, batch: Tensor) -> None:
        self.request = request
        self.position = position
        self.rows: dict[int, tuple[Tensor, int]] = {INPUT: (batch, position)}
        self.task: TaskId | None = None


class Ledger:
    """Rows of all items in flight. Only the newest attempt of an item may read or write."""

    def __init__(self) -> None:
        self._items: dict[ItemId, ItemState] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: RequestId, items: Sequence[ItemId], batch: Tensor) -> None:
        for position, item in enumerate(items):
            self._items[item] = ItemState(request, position, batch)

    def sent(self, tasks: Iterable[Task]) -> None:
        """The dispatcher sends these attempts: the previous segment's rows are their inputs, older rows are done with.

        The input stays until the item ends, because an item whose activation is lost begins again.
        """
        for task in tasks:
            state = self._items.get(task.item)
            if state is not None:
                state.task = task.task_id
                needed = task.segment - 1
                for segment in [s for s in state.rows if s not in (needed, INPUT)]:
                    del state.rows[segment]

    def inputs(self, tasks: Iterable[Task]) -> tuple[list[Task], list[tuple[Tensor, int]]]:
        """The tasks whose answer somebody still waits for, with their input rows."""
        wanted: list[Task] = []
        rows: list[tuple[Tensor, int]] = []
        for task in tasks:
            state = self._items.get(task.item)
            if state is not None and state.task == task.task_id and task.segment - 1 in state.rows:
                wanted.append(task)
                rows.append(state.rows[task.segment - 1])
        return wanted, rows

    def store(self, tasks: Sequence[Task], output: Tensor) -> None:
        """Row i of `output` is the result of tasks[i]. Late results of given-up attempts are dropped."""
        for row, task in enumerate(tasks):
            state = self._items.get(task.item)
            if state is not None and state.task == task.task_id:
                state.rows[task.segment] = (output, row)

    def result(self, item: ItemId, segment: int) -> Tensor | None:
        """The item's output of a segment, without the batch dimension."""
        state = self._items.get(item)
        if state is None or segment not in state.rows:
            return None
        batch, row = state.rows[segment]
        return batch[row]

    def forget(self, items: Iterable[ItemId]) -> None:
        for item in items:
            self._items.pop(item, None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct tensors that rows point into."""
        seen = {id(t): t.nbytes for state in self._items.values() for t, _ in state.rows.values()}
        return sum(seen.values())


def runs(rows: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
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


def gather(rows: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The rows as one batch on the device they are on: a view where they lie together, else one copy."""
    views = runs(rows)
    return views[0] if len(views) == 1 else torch.cat(views)
