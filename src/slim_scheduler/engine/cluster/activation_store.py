"""A server's tensors: the inputs of tasks it was sent, and its outputs until they are fetched or forgotten.

Outputs stay where they were made, on the device; a server that continues an item fetches them from here, not from the
router. Outputs are kept per attempt (task), so a late attempt can never pass for a newer one.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from slim_scheduler.core.types import ItemId, Task, TaskId
from slim_scheduler.engine.activations import KeptRows, Row, gather

REMEMBERED = 4096  # forgotten items: a block of theirs that comes late must leave nothing behind


class ServerActivations:
    """Outputs by task. `answers` collects the last segment's outputs until they are taken to the router."""

    def __init__(self, last_segment: int) -> None:
        self.answers: list[tuple[tuple[TaskId, ...], Tensor]] = []
        self._last_segment = last_segment
        self._inputs: dict[TaskId, Row] = {}
        self._outputs: KeptRows[TaskId] = KeptRows()
        self._tasks: dict[ItemId, list[TaskId]] = {}
        self._forgotten: dict[ItemId, None] = {}

    def __len__(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def output(self, task: TaskId) -> Row | None:
        return self._outputs.get(task)

    def put_input(self, task: Task, row: Row) -> None:
        if task.item not in self._forgotten:
            self._inputs[task.task_id] = row
            self._tasks.setdefault(task.item, []).append(task.task_id)

    # ---- what a batch needs

    def inputs(self, tasks: Iterable[Task]) -> tuple[list[Task], list[Row]]:
        """The tasks whose answer somebody still waits for, with their input rows."""
        wanted = [task for task in tasks if task.task_id in self._inputs]
        return wanted, [self._inputs[task.task_id] for task in wanted]

    def store(self, tasks: Sequence[Task], output: Tensor) -> None:
        """Row i of `output` is the result of tasks[i]."""
        for row, task in enumerate(tasks):
            if self._inputs.pop(task.task_id, None) is not None and task.segment < self._last_segment:
                self._outputs.put(task.task_id, (output, row))
        if tasks and tasks[0].segment == self._last_segment:
            self.answers.append((tuple([task.task_id for task in tasks]), output))

    # ---- what others need

    def rows(self, tasks: Sequence[TaskId]) -> tuple[tuple[TaskId, ...], Tensor | None]:
        """The outputs that are here, of those asked for: whose they are, and one tensor (rows, ...) of them."""
        found = tuple([task for task in tasks if task in self._outputs])
        return found, gather([self._outputs[task] for task in found]) if found else None

    def forget(self, outputs: Iterable[TaskId], items: Iterable[ItemId]) -> None:
        for task in outputs:
            self._outputs.drop(task)
        for item in items:
            for task in self._tasks.pop(item, ()):
                self._inputs.pop(task, None)
                self._outputs.drop(task)
            self._forgotten[item] = None
        while len(self._forgotten) > REMEMBERED:
            del self._forgotten[next(iter(self._forgotten))]
