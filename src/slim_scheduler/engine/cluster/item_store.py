"""Where every item's tensors are in a cluster: inputs and answers here, activations at the servers that made them.

For each task that is sent it knows whose output it continues, and what each server may forget. It holds no activation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slim_scheduler.core.types import Block, ItemId, ItemOutcome, ServerName, Task, TaskId
from slim_scheduler.engine.activations import Activations, Row
from slim_scheduler.engine.cluster.wire import Forget


class Location(NamedTuple):
    """The server that holds an output, and the task that made it."""

    server: ServerName
    task: TaskId


class ItemLocations:
    """One item's way: the outputs that are still needed, by segment, its attempts, and every server it touched."""

    __slots__ = ("attempts", "kept", "outputs", "servers")

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.outputs: dict[int, Location] = {}
        self.attempts: list[TaskId] = []
        self.servers: set[ServerName] = set()


class ClusterItemStore:
    """Inputs and answers as in one process, activations by their locations."""

    def __init__(self) -> None:
        self._here = Activations()
        self._locations: dict[ItemId, ItemLocations] = {}
        self._attempts: dict[TaskId, tuple[ServerName, Task]] = {}
        self._outputs_to_forget: dict[ServerName, list[TaskId]] = {}
        self._items_to_forget: dict[ServerName, list[ItemId]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def add(self, items: Iterable[ItemId], batch: Tensor) -> None:
        """Row i of `batch` is the input of the i-th item."""
        self._here.add(items, batch)

    def results(self, ended: Sequence[ItemOutcome]) -> npt.NDArray[np.float32]:
        return self._here.results(ended)

    def sent(self, tasks: Iterable[Task]) -> None:
        """The dispatcher sends these attempts; outputs older than what they continue are done with."""
        tasks = list(tasks)
        self._here.sent(tasks)
        for task in tasks:
            found = self._locations.setdefault(task.item, ItemLocations())
            if task.keep:
                found.kept.add(task.segment - 1)
            elif task.again or task.segment == 0:
                found.kept.clear()
            for segment in [s for s in found.outputs if s != task.segment - 1 and s not in found.kept]:
                server, output = found.outputs.pop(segment)
                self._outputs_to_forget.setdefault(server, []).append(output)

    def sources_of(self, block: Block) -> tuple[tuple[int | None, ...], list[Row]]:
        """Each task's source as `BlockMessage` has it, and the input rows that travel along."""
        sources: list[int | None] = []
        rows: list[Row] = []
        for task in block.tasks:
            found = self._locations.get(task.item)
            if found is None or not self._here.is_newest(task):
                sources.append(None)  # ended, or tried again since
                continue
            found.servers.add(block.server)
            found.attempts.append(task.task_id)
            self._attempts[task.task_id] = (block.server, task)
            if task.segment == 0:
                _, row = self._here.inputs([task])
                sources.append(len(rows))
                rows += row
                continue
            output = found.outputs.get(task.segment - 1)
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
            if self._here.is_newest(task):
                self._locations[task.item].outputs[task.segment] = Location(server, task_id)

    def answered(self, tasks: Sequence[TaskId], output: Tensor) -> None:
        """Row i of `output` is the answer of tasks[i]."""
        known = [(row, self._attempts[task][1]) for row, task in enumerate(tasks) if task in self._attempts]
        for row, task in known:
            self._here.store([task], output[row : row + 1])

    def forget(self, items: Iterable[ItemId]) -> None:
        items = list(items)
        self._here.forget(items)
        for item in items:
            found = self._locations.pop(item, None)
            if found is not None:
                for task in found.attempts:
                    self._attempts.pop(task, None)
                for server in found.servers:
                    self._items_to_forget.setdefault(server, []).append(item)

    def is_needed_at(self, server: ServerName) -> bool:
        """Whether an item in flight may still need an output that lies there."""
        return any(o.server == server for found in self._locations.values() for o in found.outputs.values())

    def take_forgotten(self, server: ServerName) -> Forget:
        """What a server may forget since the last call."""
        outputs = self._outputs_to_forget.pop(server, ())
        return Forget(tuple(outputs), tuple(self._items_to_forget.pop(server, ())))
