"""Which servers take part: who joins, leaves, falls silent, is heard again, and is blamed.

The fleet knows the servers; this decides what follows for the tasks that a lost one held. Silence of
`heartbeat_timeout` takes a server out of service, and its next report, or its next life's first one, back in.
"""

from collections.abc import Callable

from slim_scheduler.core.dispatch.fleet import Fleet
from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.dispatch.recovery import Retries
from slim_scheduler.core.messages import (
    CancelTasks,
    DispatcherCommand,
    ServerChanged,
    ServerJoined,
    ServerLeft,
    TasksReturned,
)
from slim_scheduler.core.types import Seconds, ServerName
from slim_scheduler.core.view import ServerReport

NOBODYS_FAULT = ("expired", "cancelled")  # reasons of returned tasks that say nothing of their server


class Membership:
    """`all_down_since`: when the last server went. `earlier` is called when something may be due sooner than before."""

    def __init__(
        self,
        limits: DispatchLimits,
        fleet: Fleet,
        retries: Retries,
        tell: Callable[[DispatcherCommand], None],
        earlier: Callable[[], None],
    ) -> None:
        self.all_down_since: Seconds | None = None
        self._limits = limits
        self._fleet = fleet
        self._retries = retries
        self._tell = tell
        self._earlier = earlier

    def join(self, event: ServerJoined, now: Seconds) -> None:
        if event.server in self._fleet.views:
            self._lose(event.server, "joined again", now)
        self._fleet.join(event.server, event.credit_tasks, event.incarnation, now)
        self.all_down_since = None
        self._earlier()

    def drain(self, server: ServerName, now: Seconds) -> None:
        if server in self._fleet.views and not self._fleet.views[server].draining:
            self._fleet.drain(server, now)
            self._earlier()

    def leave(self, event: ServerLeft, now: Seconds) -> None:
        if event.server in self._fleet.views:
            self._lose(event.server, event.reason, now)
            self._fleet.end_life(event.server)
            if event.removed:
                self._fleet.remove(event.server)

    def hear(self, report: ServerReport, now: Seconds) -> None:
        view = self._fleet.views.get(report.server)
        if view is None or not self._fleet.is_news(report):
            return
        if report.incarnation > view.incarnation:
            self._lose(report.server, "restarted", now)
        self._fleet.heard(report, now)
        if not view.up:
            self._fleet.up(report.server, now)
            self.all_down_since = None
            self._earlier()
            self._tell(ServerChanged(report.server, True, "heard again", 0))
        lost = self._fleet.lost_tasks(report)
        if lost:
            self._blame(report.server, "blocks are lost on the way", now)
        for task_id in lost:
            self._retries.did_not_run(task_id, "lost on the way", now)

    def ran(self, server: ServerName, now: Seconds) -> None:
        """A batch of this server is done."""
        if server in self._fleet.views and self._fleet.succeeded(server, now):
            self._tell(ServerChanged(server, True, "its probe succeeded", 0))

    def gave_back(self, event: TasksReturned, now: Seconds) -> None:
        """A server returns tasks that it did not run. A word on none that is still open is late or doubled."""
        if all(self._fleet.server_of(task) != event.server for task in event.tasks):
            return
        if event.reason not in NOBODYS_FAULT and not event.activation_lost:
            self._blame(event.server, event.reason, now)
        for task_id in event.tasks:
            self._retries.did_not_run(task_id, event.reason, now, event.permanent, event.activation_lost)

    def look(self, now: Seconds, overslept: Seconds) -> None:
        """Time has passed: probes begin, silent servers go. `overslept` is how much later than asked the look is."""
        if overslept > self._limits.heartbeat_timeout / 4:
            self._fleet.forgive(now)
        self._fleet.begin_probes(now)
        for server in self._fleet.silent(now):
            self._lose(server, f"silent for {self._limits.heartbeat_timeout:g} s", now)

    @property
    def hopeless_at(self) -> Seconds:
        """When waiting items are given up because nobody serves; infinity while somebody does."""
        if self.all_down_since is None:
            return float("inf")
        return self.all_down_since + self._limits.no_server_timeout

    def _blame(self, server: ServerName, reason: str, now: Seconds) -> None:
        """Counts a failure against a server, which may get it ejected."""
        if self._fleet.failed(server, now):
            self._tell(ServerChanged(server, False, f"ejected: {reason}", 0))
            self._earlier()

    def _lose(self, server: ServerName, reason: str, now: Seconds) -> None:
        """Takes a server out of service: its tasks, and the activations it held, are tried again elsewhere."""
        if not self._fleet.views[server].up:
            return
        self._fleet.down(server, now)
        lost = self._fleet.unsettled(server)
        requeued = sum(self._retries.did_not_run(task, f"server {server} was lost ({reason})", now) for task in lost)
        requeued += self._retries.lost_with(server, reason, now)
        if lost:
            self._tell(CancelTasks(server, tuple(lost)))
        self._tell(ServerChanged(server, False, reason, requeued))
        if not self._fleet.any_up():
            self.all_down_since = now
            self._earlier()
