"""The dispatcher's side of the servers: credit, what was sent and not yet reported, who is alive, fails, got lost.

A server is out of service when it was silent for `heartbeat_timeout` or the host says so; it is back when it is heard
again. A block that a server's reports keep leaving out was lost on the way. The fleet finds out; what then happens to
the tasks is the dispatcher's decision.
"""

from collections.abc import Iterable

import msgspec

from slim_scheduler.core.dispatch.items import ItemFlight
from slim_scheduler.core.dispatch.outliers import OutlierLimits, Outliers
from slim_scheduler.core.messages import BlockFinished
from slim_scheduler.core.types import (
    Block,
    BlockId,
    Decision,
    ItemId,
    Seconds,
    ServerName,
    Task,
    TaskId,
    Width,
    WidthTuple,
)
from slim_scheduler.core.view import ServerReport, ServerView


class SentBlock(msgspec.Struct, eq=False):
    """A block on its way or at its server, of which `left` tasks have not been heard of, with the sums its
    `BlockFinished` is made of. `missing`: since when reports leave it out."""

    block: Block
    decision: Decision
    fifo_length: int
    completed: int
    router: str
    left: int
    latency: Seconds = 0.0
    ran: list[tuple[ItemId, WidthTuple]] = []
    lost: int = 0
    missing: Seconds | None = None

    def finished(self, now: Seconds) -> BlockFinished:
        block = self.block
        return BlockFinished(
            block.block_id,
            self.decision,
            block.segment,
            block.previous_width,
            len(block.tasks),
            block.sent_at,
            now,
            self.latency / len(self.ran) if self.ran else 0.0,
            tuple(self.ran),
            self.lost,
            self.fifo_length,
            self.completed,
            self.router,
        )


class Fleet:
    """Every server's view, and the ledger of tasks that were sent."""

    def __init__(self, heartbeat_timeout: Seconds, loss_grace: Seconds) -> None:
        self.views: dict[ServerName, ServerView] = {}
        self._timeout = heartbeat_timeout
        self._grace = loss_grace
        self._outliers = Outliers(OutlierLimits())
        self._sent: dict[TaskId, tuple[SentBlock, Task]] = {}
        self._blocks: dict[ServerName, dict[BlockId, SentBlock]] = {}
        self._ended: dict[ServerName, int] = {}

    def join(self, name: ServerName, credit_tasks: int, incarnation: int, now: Seconds) -> None:
        """A server that nothing was sent to, or whose tasks have all been given up."""
        self.views[name] = ServerView(name, credit_tasks, incarnation, now)
        self._blocks[name] = {}
        self._ended.pop(name, None)
        self._outliers.joined(name, now)

    def remove(self, name: ServerName) -> None:
        """Forgets a server whose tasks have all been given up."""
        del self.views[name], self._blocks[name]

    def any_available(self) -> bool:
        # asked at every event: any() with a generator took 8 % of a simulated run
        for view in self.views.values():  # noqa: SIM110
            if view.up and view.outstanding < view.limit:
                return True
        return False

    def any_up(self) -> bool:
        return any(view.up for view in self.views.values())

    def end_life(self, name: ServerName) -> None:
        """The host knows that this life is over: reports of it that come yet say nothing of the next."""
        self._ended[name] = self.views[name].incarnation

    # ---- who gets how much

    def drain(self, name: ServerName, now: Seconds) -> None:
        """No more is sent to it; nor does it count among those that are left when another one is ejected."""
        view = self.views[name]
        view.draining = True
        self._set_limit(name)
        for reinstated in self._outliers.left(name, now):
            self._set_limit(reinstated)

    def up(self, name: ServerName, now: Seconds) -> None:
        """A server is back in service, and nothing is held against it."""
        self.views[name].up = True
        if not self.views[name].draining:
            self._outliers.joined(name, now)
        self._set_limit(name)

    def down(self, name: ServerName, now: Seconds) -> None:
        self.views[name].up = False
        for reinstated in self._outliers.left(name, now):
            self._set_limit(reinstated)

    def succeeded(self, name: ServerName, now: Seconds) -> bool:
        """A server's batch is done. True if that ends its probation."""
        view = self.views[name]
        view.heard_at = now
        if not view.up or view.draining or not self._outliers.succeeded(name, now):
            return False
        self._set_limit(name)
        return True

    def failed(self, name: ServerName, now: Seconds) -> bool:
        """A server gave work back by its own fault. True if it is ejected for that."""
        view = self.views.get(name)
        if view is None or not view.up or view.draining or not self._outliers.failed(name, now):
            return False
        self._set_limit(name)
        return True

    def begin_probes(self, now: Seconds) -> None:
        """Servers that were ejected long enough may be given a few tasks."""
        for name in self._outliers.probe_due(now):
            self._set_limit(name)

    def _set_limit(self, name: ServerName) -> None:
        view = self.views[name]
        if view.draining:
            view.limit = 0
            return
        allowance = self._outliers.allowance(name)
        view.limit = view.credit_tasks if allowance is None else min(view.credit_tasks, allowance)

    # ---- blocks

    def send(self, sent: SentBlock) -> None:
        block = sent.block
        view = self.views[block.server]
        count = len(block.tasks)
        view.outstanding += count
        kind = (block.segment, block.width)
        view.pending[kind] = view.pending.get(kind, 0) + count
        self._blocks[block.server][block.block_id] = sent
        for task in block.tasks:
            self._sent[task.task_id] = (sent, task)

    def settle(self, task_id: TaskId) -> tuple[SentBlock, Task] | None:
        """A server's word on a task came: its credit is free. None for a late or doubled word."""
        for sent, tasks in self.settle_all((task_id,)):
            return sent, tasks[0]
        return None

    def settle_all(self, tasks: Iterable[TaskId]) -> list[tuple[SentBlock, list[Task]]]:
        """`settle` for tasks reported together, without those that are late or doubled: in order, those that follow
        each other and came with one block together."""
        runs: list[tuple[SentBlock, list[Task]]] = []
        last: SentBlock | None = None
        run: list[Task] = []
        for task_id in tasks:
            found = self._sent.pop(task_id, None)
            if found is not None:
                sent, task = found
                if sent is last:
                    run.append(task)
                else:
                    last, run = sent, [task]
                    runs.append((sent, run))
        for sent, together in runs:
            self._settled(sent, len(together))
        return runs

    def _settled(self, sent: SentBlock, count: int) -> None:
        block = sent.block
        view = self.views[block.server]
        view.outstanding -= count
        kind = (block.segment, block.width)
        view.pending[kind] -= count
        if not view.pending[kind]:
            del view.pending[kind]
        sent.left -= count
        if not sent.left:
            del self._blocks[block.server][block.block_id]

    def pending(self, segment: int, width: Width) -> int:
        """Tasks of a segment and requested width that were sent and not yet reported, over all servers."""
        kind = (segment, width)
        return sum([view.pending.get(kind, 0) for view in self.views.values()])

    def server_of(self, task_id: TaskId) -> ServerName | None:
        found = self._sent.get(task_id)
        return found[0].block.server if found else None

    def unsent(self, flights: Iterable[ItemFlight]) -> list[ItemFlight]:
        """Those of which no task is on its way or at a server: they wait."""
        return [flight for flight in flights if flight.task is not None and flight.task.task_id not in self._sent]

    def unsettled(self, name: ServerName) -> list[TaskId]:
        return [task for task, (sent, _) in self._sent.items() if sent.block.server == name]

    # ---- liveness and loss

    def is_news(self, report: ServerReport) -> bool:
        """False for one of a life that is over, or that a later report or life of the server has overtaken."""
        view = self.views[report.server]
        if report.incarnation <= self._ended.get(report.server, -1):
            return False
        if report.incarnation != view.incarnation:
            return report.incarnation > view.incarnation
        return view.report is None or view.report.made_at < report.made_at

    def heard(self, report: ServerReport, now: Seconds) -> None:
        view = self.views[report.server]
        view.heard_at = now
        view.incarnation = report.incarnation
        view.report = report

    def lost_tasks(self, report: ServerReport) -> list[TaskId]:
        """Tasks of blocks that this server's reports have left out for longer than the grace."""
        now = report.made_at
        open_blocks = set(report.open_blocks)
        lost: set[BlockId] = set()
        for block_id, sent in self._blocks[report.server].items():
            if block_id in open_blocks or now - sent.block.sent_at <= self._grace:
                sent.missing = None
            elif sent.missing is None:
                sent.missing = now
            elif now - sent.missing > self._grace:
                lost.add(block_id)
        if not lost:
            return []
        return [task for task, (sent, _) in self._sent.items() if sent.block.block_id in lost]

    def silent(self, now: Seconds) -> list[ServerName]:
        return [view.name for view in self.views.values() if view.up and view.heard_at + self._timeout <= now]

    def next_check(self) -> Seconds:
        """When the next server would have been silent for too long, or a probe is due."""
        heard = min([view.heard_at for view in self.views.values() if view.up], default=float("inf"))
        return min(heard + self._timeout, self._outliers.next_check())

    def forgive(self, now: Seconds) -> None:
        """This process itself was asleep: silence until now proves nothing, so each server gets half the time anew."""
        for view in self.views.values():
            view.heard_at = max(view.heard_at, now - self._timeout / 2)

    def check_invariants(self) -> None:
        self._outliers.check_invariants()
        for name, view in self.views.items():
            tasks = self.unsettled(name)
            assert view.outstanding == len(tasks) == sum(view.pending.values()), f"credit ledger of {name}"
            assert view.outstanding <= view.credit_tasks, f"{name} got more than its credit"
            assert sum(sent.left for sent in self._blocks[name].values()) == len(tasks), f"blocks of {name}"
