"""The router's knowledge of where every item's tensors are: inputs here, activations at the servers that made them.

It extends the in-process ledger by whereabouts: for each task that is sent, whose output it continues, and what each
server may forget. It holds no activation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from slim_scheduler.core.types import Block, ItemId, ServerName, Task, TaskId
from slim_scheduler.engine.activations import Ledger
from slim_scheduler.engine.cluster.wire import Forget


class Whereabouts(NamedTuple):
    """The server that holds an output, and the task that made it."""

    server: ServerName
    task: TaskId


class Trail:
    """One item's way: the outputs that are still needed, by segment, its attempts, and every server it touched."""

    __slots__ = ("attempts", "outputs", "servers")

    def __init__(self) -> None:
        self.outputs: dict[int, Whereabouts] = {}
        self.attempts: list[TaskId] = []
        self.servers: set[ServerName] = set()


class ClusterLedger(Ledger):
    """Inputs and answers as in one process, activations by their whereabouts."""

    def __init__(self) -> None:
        super().__init__()
        self._trails: dict[ItemId, Trail] = {}
        self._attempts: dict[TaskId, tuple[ServerName, Task]] = {}
        self._outputs_to_forget: dict[ServerName, list[TaskId]] = {}
        self._items_to_forget: dict[ServerName, list[ItemId]] = {}

    def sent(self, tasks: Iterable[Task]) -> None:
        """The dispatcher sends these attempts; outputs older than what they continue are done with."""
        tasks = list(tasks)
        super().sent(tasks)
        for task in tasks:
            trail = self._trails.setdefault(task.item, Trail())
            for segment in [s for s in trail.outputs if s != task.segment - 1]:
                server, output = trail.outputs.pop(segment)
                self._outputs_to_forget.setdefault(server, []).append(output)

    def leaves(self, block: Block) -> tuple[tuple[int | None, ...], list[tuple[Tensor, int]]]:
        """Each task's source as `Parcel` has it, and the input rows that travel along."""
        sources: list[int | None] = []
        rows: list[tuple[Tensor, int]] = []
        for task in block.tasks:
            state, trail = self._items.get(task.item), self._trails.get(task.item)
            if state is None or trail is None or state.task != task.task_id:
                sources.append(None)  # ended, or tried again since
                continue
            trail.servers.add(block.server)
            trail.attempts.append(task.task_id)
            self._attempts[task.task_id] = (block.server, task)
            if task.segment == 0:
                _, row = self.inputs([task])
                sources.append(len(rows))
                rows += row
                continue
            output = trail.outputs.get(task.segment - 1)
            # One that is not at the task's home belongs to another attempt: the server will not find it there.
            sources.append(-1 if output is None or output.server != task.home else output.task)
        return tuple(sources), rows

    def done(self, server: ServerName, tasks: Iterable[TaskId]) -> None:
        """A server reports these tasks: their outputs lie there, where somebody still waits for them."""
        for task_id in tasks:
            attempt = self._attempts.get(task_id)
            if attempt is None:
                continue
            task = attempt[1]
            state = self._items.get(task.item)
            if state is not None and state.task == task_id:
                self._trails[task.item].outputs[task.segment] = Whereabouts(server, task_id)

    def answered(self, tasks: Sequence[TaskId], output: Tensor) -> None:
        """Row i of `output` is the answer of tasks[i]."""
        known = [(row, self._attempts[task][1]) for row, task in enumerate(tasks) if task in self._attempts]
        for row, task in known:
            self.store([task], output[row : row + 1])

    def forget(self, items: Iterable[ItemId]) -> None:
        items = list(items)
        super().forget(items)
        for item in items:
            trail = self._trails.pop(item, None)
            if trail is not None:
                for task in trail.attempts:
                    self._attempts.pop(task, None)
                for server in trail.servers:
                    self._items_to_forget.setdefault(server, []).append(item)

    def lies_at(self, server: ServerName) -> bool:
        """Whether an item in flight may still need an output that lies there."""
        return any(o.server == server for trail in self._trails.values() for o in trail.outputs.values())

    def take_forgotten(self, server: ServerName) -> Forget:
        """What a server may forget since the last call."""
        outputs = self._outputs_to_forget.pop(server, ())
        return Forget(tuple(outputs), tuple(self._items_to_forget.pop(server, ())))
