"""What becomes of an item whose task did not run: another try within its bounds, or its end.

A try is bounded three ways: by the item's deadline, by `max_retries` of its own, and by a budget that all items
share, which arrivals fill (`retry_budget` tries per item). Owns the budget; `end` is the only way out of the
dispatcher.
"""

from collections.abc import Callable

from slim_scheduler.core.dispatch.fifo import GlobalFifo
from slim_scheduler.core.dispatch.fleet import Fleet
from slim_scheduler.core.dispatch.items import ItemFlight, Ledger
from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.messages import DispatcherCommand
from slim_scheduler.core.types import Outcome, Seconds, ServerName, Task, TaskId

BUDGET_AT_START = 256.0  # so that a server lost early on can be made up for
BUDGET_SAVED = 10_000.0  # the most that a long quiet time saves up


class Retries:
    """`tell` takes the commands that ends and settled blocks bring."""

    def __init__(
        self,
        limits: DispatchLimits,
        ledger: Ledger,
        fifo: GlobalFifo,
        fleet: Fleet,
        tell: Callable[[DispatcherCommand], None],
    ) -> None:
        self._limits = limits
        self._ledger = ledger
        self._fifo = fifo
        self._fleet = fleet
        self._tell = tell
        self._budget = BUDGET_AT_START

    def arrived(self, items: int) -> None:
        self._budget = min(BUDGET_SAVED, self._budget + self._limits.retry_budget * items)

    def end(
        self, flight: ItemFlight, outcome: Outcome, now: Seconds, reason: str = "", margin: float | None = None
    ) -> None:
        """The one outcome of an item that waits no longer; its request's reply if it was the last."""
        self._fifo.let_go(flight)
        reply = self._ledger.end(flight, outcome, now, reason, margin)
        if reply is not None:
            self._tell(reply)

    def did_not_run(
        self, task_id: TaskId, reason: str, now: Seconds, permanent: bool = False, activation_lost: bool = False
    ) -> bool:
        """Settles one sent task and tries its item again. False if the item no longer waited for it."""
        settled = self._fleet.settle(task_id)
        if settled is None:
            return False
        sent, task = settled
        sent.lost += 1
        if not sent.left:
            self._tell(sent.finished(now))
        flight = self._ledger.items.get(task.item)
        if flight is None or flight.task is not task:
            return False
        self._again(flight, task, reason, now, permanent, activation_lost)
        return True

    def lost_with(self, server: ServerName, reason: str, now: Seconds) -> int:
        """Waiting items whose activation lay at a lost server begin again; returns how many. No second pass goes on
        from one that was kept there."""
        for flight in self._ledger.items.values():
            if server in flight.kept.values():
                flight.kept = {segment: home for segment, home in flight.kept.items() if home != server}
        stranded = [f for f in self._fleet.unsent(self._ledger.items.values()) if f.home == server]
        for flight in stranded:
            assert flight.task is not None
            self._fifo.withdraw(flight)
            self._again(flight, flight.task, f"server {server} held the activation ({reason})", now)
        return len(stranded)

    def _again(
        self,
        flight: ItemFlight,
        task: Task,
        reason: str,
        now: Seconds,
        permanent: bool = False,
        activation_lost: bool = False,
    ) -> None:
        if task.deadline is not None and task.deadline <= now:
            return self.end(flight, Outcome.EXPIRED, now, "the deadline passed")
        if permanent and len(self._fleet.views) == 1:
            return self.end(flight, Outcome.FAILED, now, reason)
        if flight.retries >= self._limits.max_retries:
            return self.end(flight, Outcome.FAILED, now, f"{reason}; gave up after {flight.retries} retries")
        if self._budget < 1:
            return self.end(flight, Outcome.FAILED, now, f"{reason}; the retry budget is spent")
        self._budget -= 1
        flight.retries += 1
        home = self._fleet.views.get(flight.home) if flight.home is not None else None
        if task.segment == 0 or activation_lost or home is None or not home.up:
            flight.restart()
            self._fifo.let_go(flight)
            self._fifo.enter(flight, 0, task.entered)
        else:
            self._fifo.enter(flight, task.segment, task.entered)
