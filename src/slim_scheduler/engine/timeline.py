"""Where the time of single items went, for requests that ask: from the same events and commands as the record.

Following costs nothing while nobody asks. What a server did is known from its report alone, so it works the same in one
process and over a cluster.
"""

from collections.abc import Iterable, Sequence

import msgspec

from slim_scheduler.core.messages import BatchReported, Message, SendBlock
from slim_scheduler.core.types import ItemId, Seconds, ServerName, Task, TaskId, Width
from slim_scheduler.engine.host import StepRecorder


class Visit(msgspec.Struct, frozen=True):
    """One segment of one item.

    `queued_s`: in the global FIFO; `waited_s`: from the decision to the batch's start (link, batch window, the server's
    queue, an instance's load); `compute_s`: the batch, of `batch` items.
    """

    item: ItemId
    segment: int
    server: ServerName
    width: Width
    batch: int
    queued_s: Seconds
    waited_s: Seconds
    compute_s: Seconds


class Timelines:
    """Passes every step on, and follows the items that it was asked to."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder
        self._followed: set[ItemId] = set()
        self._newest: dict[ItemId, TaskId] = {}  # attempt of an item
        self._sent: dict[TaskId, tuple[Task, Seconds]] = {}  # newest attempts that have not run
        self._visits: dict[ItemId, list[Visit]] = {}

    def follow(self, items: Iterable[ItemId]) -> None:
        self._followed.update(items)

    def take(self, items: Iterable[ItemId]) -> tuple[Visit, ...]:
        """What was seen of some items, in their order and by segment; they are followed no longer."""
        visits: list[Visit] = []
        for item in items:
            self._followed.discard(item)
            self._give_up(item)
            visits += self._visits.pop(item, ())
        return tuple(visits)

    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Message]) -> None:
        self.recorder.step(machine, now, event, commands)
        if not self._followed:
            return
        # A report that answers an item is the event of the step that ends it, so it is noted before the reply is made.
        if isinstance(event, BatchReported):
            self._ran(event)
        for command in commands:
            if isinstance(command, SendBlock):
                for task in command.block.tasks:
                    if task.item in self._followed:
                        self._give_up(task.item)
                        self._newest[task.item] = task.task_id
                        self._sent[task.task_id] = task, now

    def _give_up(self, item: ItemId) -> None:
        attempt = self._newest.pop(item, None)
        if attempt is not None:
            self._sent.pop(attempt, None)

    def _ran(self, report: BatchReported) -> None:
        for task_id in report.tasks:
            task, sent = self._sent.pop(task_id, (None, 0.0))
            if task is None:
                continue
            visit = Visit(
                item=task.item,
                segment=task.segment,
                server=report.server,
                width=report.width,
                batch=len(report.tasks),
                queued_s=max(0.0, sent - task.entered),
                waited_s=max(0.0, report.started - sent),
                compute_s=report.finished - report.started,
            )
            self._visits.setdefault(task.item, []).append(visit)
