"""The router's side of the loop: global FIFO, routing, collecting results, deadlines, lost servers.

`Dispatcher.handle` is its only mutator. It owns every request and item in flight (`flight.py`), the waiting tasks
(`queues.py`) and what is known of the servers (`fleet.py`). It carries no tensors and talks to nobody: hosts deliver
events and perform commands.
"""

from heapq import heappop, heappush

import msgspec
from numpy.random import Generator

from slim_scheduler.core.admission import AccuracyPrior, Admission
from slim_scheduler.core.fifo import GlobalFifo, Key
from slim_scheduler.core.fleet import Fleet, SentBlock
from slim_scheduler.core.flight import ItemFlight, Ledger
from slim_scheduler.core.messages import (
    BatchReported,
    CancelTasks,
    DispatcherCommand,
    DispatcherEvent,
    RequestArrived,
    RequestCancelled,
    RouterFellBack,
    RouterTooSlow,
    SendBlock,
    ServerChanged,
    ServerDraining,
    ServerJoined,
    ServerLeft,
    ServerReported,
    TasksReturned,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.router.base import Router
from slim_scheduler.core.router.guarded import GuardedRouter
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.telemetry import Head, ServerReport, ServerView, View
from slim_scheduler.core.types import (
    Block,
    Bytes,
    Decision,
    Outcome,
    RequestId,
    Seconds,
    ServerName,
    Task,
    TaskId,
)

CLOCK_SLACK = 1e-6  # seconds that a host's timer may be early
NOBODYS_FAULT = ("expired", "cancelled")  # reasons of returned tasks that say nothing of their server
RETRIES_AT_START = 256.0  # so that a server lost early on can be made up for
RETRIES_SAVED = 10_000.0  # the most that a long quiet time saves up


class DispatchLimits(msgspec.Struct, frozen=True):
    """What bounds the dispatcher, in the core's units (`DispatchConfig` says what each is)."""

    reentry_back: bool = True
    max_waiting_items: int = 100_000
    max_activation_bytes: Bytes = 2 << 30
    home_matters: bool = False
    priority_aging: Seconds = 1.0
    max_retries: int = 3
    retry_budget: float = 0.2
    heartbeat_timeout: Seconds = 0.8
    loss_grace: Seconds = 2.0
    no_server_timeout: Seconds = 30.0
    slow_router: Seconds = 0.02
    router_probe: Seconds = 1.0


class Dispatcher:
    """Global FIFO and routing. `accuracy` resolves accuracy floors; without it such requests are refused."""

    def __init__(
        self,
        limits: DispatchLimits,
        shape: ModelShape,
        router: Router,
        fallback: Router,
        rng: Generator,
        accuracy: AccuracyPrior | None = None,
    ) -> None:
        self._limits = limits
        self._shape = shape
        self._router = GuardedRouter(router, fallback, rng)
        self._ledger = Ledger()
        self._fleet = Fleet(limits.heartbeat_timeout, limits.loss_grace)
        self._admission = Admission(shape, limits.max_waiting_items, accuracy)
        self._fifo = GlobalFifo(
            shape, self._ledger.items, limits.max_activation_bytes, limits.home_matters, limits.priority_aging
        )
        self._deadlines: list[tuple[Seconds, RequestId]] = []
        self._held: tuple[Key, Decision, str] | None = None
        self._key_due: Key
        self._retry_tokens = RETRIES_AT_START
        self._all_down_since: Seconds | None = None
        self._wake_at = float("inf")
        self._last_block = 0
        self._commands: list[DispatcherCommand] = []

    # ---- what hosts and pages may read

    @property
    def servers(self) -> dict[ServerName, ServerView]:
        return self._fleet.views

    @property
    def fifo_length(self) -> int:
        return len(self._fifo)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return self._ledger.counts()

    def handle(self, event: DispatcherEvent, now: Seconds) -> list[DispatcherCommand]:
        """Takes one event, returns what the host must do.

        It is these four steps; only an environment that stops at every decision takes them one by one.
        """
        self.absorb(event, now)
        if isinstance(event, RequestArrived) and event.more:
            return self.finish(now)
        while (view := self.pending(now)) is not None:
            self.decide(view)
        return self.finish(now)

    def absorb(self, event: DispatcherEvent, now: Seconds) -> None:
        """Takes an event in without routing."""
        match event:
            case BatchReported():
                self._collect(event, now)
            case RequestArrived():
                self._arrive(event, now)
            case ServerReported():
                self._hear(event.report, now)
            case TimerFired():
                self._on_time(now)
            case TasksReturned():
                self._take_back(event, now)
            case RequestCancelled():
                self._abandon(event.request_id, Outcome.CANCELLED, "cancelled by the client", now)
            case ServerJoined():
                self._join(event, now)
            case ServerDraining():
                if event.server in self._fleet.views:
                    self._fleet.drain(event.server)
            case ServerLeft():
                self._leave(event, now)
            case RouterTooSlow():
                self._suspend_router(event.seconds, now)

    def pending(self, now: Seconds) -> View | None:
        """The next decision that is due, about the oldest task's key. None: nothing waits, or nobody has credit."""
        fifo, fleet = self._fifo, self._fleet
        while len(fifo) and fleet.any_available():
            key = fifo.head()
            if key is None:
                return None
            held, self._held = self._held, None
            if held is None or held[0] != key or not self._may_hold(held[1].server):
                self._key_due = key
                return self._view(key, now)
            if not fleet.views[held[1].server].available:
                self._held = held
                return None
            self._send(*held, now)
        return None

    def _may_hold(self, server: ServerName) -> bool:
        view = self._fleet.views.get(server)
        return view is not None and view.in_service

    def decide(self, view: View) -> Decision:
        """Asks the router about the pending view and sends the block, or holds it for the server it chose."""
        decision, router, complaint = self._router.decide(view)
        if complaint is not None:
            self._commands.append(RouterFellBack(complaint))
        if self._fleet.views[decision.server].available:
            self._send(self._key_due, decision, router, view.now)
        else:  # only a router that holds gets here
            self._held = (self._key_due, decision, router)
        return decision

    def finish(self, now: Seconds) -> list[DispatcherCommand]:
        """The commands of what was absorbed and decided."""
        self._arm(now)
        commands, self._commands = self._commands, []
        return commands

    # ---- arrivals

    def _arrive(self, event: RequestArrived, now: Seconds) -> None:
        request = event.request
        if request.deadline is not None and request.deadline <= now:
            self._commands.append(self._ledger.refuse(request, Outcome.EXPIRED, "the deadline had passed", None))
            return
        refusal = self._admission.refuse(request, len(self._fifo), len(self._ledger.items), now)
        if refusal is not None:
            self._commands.append(self._ledger.refuse(request, Outcome.REJECTED, *refusal))
            return
        self._retry_tokens = min(RETRIES_SAVED, self._retry_tokens + self._limits.retry_budget * len(request.items))
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.request_id))
        for flight in self._ledger.admit(request):
            self._fifo.enter(flight, 0, now, now)

    # ---- routing

    def _suspend_router(self, took: Seconds, now: Seconds) -> None:
        until = now + self._limits.router_probe
        self._router.suspend(until)
        reason = f"took {took * 1e3:.1f} ms, limit {self._limits.slow_router * 1e3:g} ms"
        self._commands.append(RouterFellBack(reason, until))

    def _view(self, key: Key, now: Seconds) -> View:
        fifo = self._fifo
        oldest = fifo.oldest(key)
        head = Head(
            key[0],
            key[1],
            oldest.home,
            fifo.count(key),
            now - oldest.entered,
            None if oldest.deadline is None else oldest.deadline - now,
            self._admission.widths(key[0], key[3]),
            key[3][0] if key[3] is not None else None,
            now - self._ledger.items[oldest.item].request.request.arrival,
        )
        return View(now, head, len(fifo), fifo.per_segment, self._ledger.completed, self._fleet.views)

    def _send(self, key: Key, decision: Decision, router: str, now: Seconds) -> None:
        fifo_length = len(self._fifo)
        tasks = self._fifo.take(key, min(decision.group, self._fleet.views[decision.server].credit))
        segment, previous_width, _, bounds = key
        exact = bounds is not None and bounds[0].widths is not None
        self._last_block += 1
        block = Block(self._last_block, decision.server, segment, decision.width, previous_width, exact, tasks, now)
        self._fleet.send(SentBlock(block, decision, fifo_length, self._ledger.completed, router))
        self._commands.append(SendBlock(block))

    # ---- results

    def _collect(self, event: BatchReported, now: Seconds) -> None:
        self._admission.worked(len(event.tasks), now)
        share = None if event.energy_j is None else event.energy_j / len(event.tasks)
        seconds = event.finished - event.started
        width, server = (event.width,), (event.server,)
        items = self._ledger.items
        settled = self._fleet.settle_all(event.tasks)
        ran: list[ItemFlight] = []
        for sent, task in settled:
            flight = items.get(task.item)
            if flight is None or flight.task is not task:
                sent.lost += 1  # expired or cancelled while it ran
                continue
            flight.widths += width
            flight.servers += server
            flight.home = event.server
            flight.compute += seconds
            if share is not None:
                flight.energy = share + (flight.energy or 0.0)
            sent.latency += now - task.entered
            sent.ran.append((task.item, flight.widths))
            ran.append(flight)
        if ran and event.segment < self._shape.segments - 1:
            self._fifo.go_on(ran, event.segment, event.width, now, self._limits.reentry_back)
        else:
            for flight in ran:
                self._admission.completed(now)
                self._end(flight, Outcome.ANSWERED, now)
        self._commands.extend([sent.finished(now) for sent in dict.fromkeys(s for s, _ in settled) if not sent.left])
        if event.server in self._fleet.views and self._fleet.succeeded(event.server, now):
            self._commands.append(ServerChanged(event.server, True, "its probe succeeded", 0))

    def _take_back(self, event: TasksReturned, now: Seconds) -> None:
        if event.reason not in NOBODYS_FAULT and not event.activation_lost:
            self._blame(event.server, event.reason, now)
        for task_id in event.tasks:
            self._give_up(task_id, event.reason, now, event.permanent, event.activation_lost)

    def _give_up(
        self, task_id: TaskId, reason: str, now: Seconds, permanent: bool = False, activation_lost: bool = False
    ) -> bool:
        """One sent task did not run: settle it and try its item again. True if the item was still waiting for it."""
        settled = self._fleet.settle(task_id)
        if settled is None:
            return False
        sent, task = settled
        sent.lost += 1
        if not sent.left:
            self._commands.append(sent.finished(now))
        flight = self._ledger.items.get(task.item)
        if flight is None or flight.task is not task:
            return False
        self._retry(flight, task, reason, now, permanent, activation_lost)
        return True

    def _retry(
        self,
        flight: ItemFlight,
        task: Task,
        reason: str,
        now: Seconds,
        permanent: bool = False,
        activation_lost: bool = False,
    ) -> None:
        if task.deadline is not None and task.deadline <= now:
            return self._end(flight, Outcome.EXPIRED, now, "the deadline passed")
        if permanent and len(self._fleet.views) == 1:
            return self._end(flight, Outcome.FAILED, now, reason)
        if flight.retries >= self._limits.max_retries:
            return self._end(flight, Outcome.FAILED, now, f"{reason}; gave up after {flight.retries} retries")
        if self._retry_tokens < 1:
            return self._end(flight, Outcome.FAILED, now, f"{reason}; the retry budget is spent")
        self._retry_tokens -= 1
        flight.retries += 1
        home = self._fleet.views.get(flight.home) if flight.home is not None else None
        if task.segment == 0 or activation_lost or home is None or not home.up:
            flight.restart()
            self._fifo.let_go(flight)
            self._fifo.enter(flight, 0, task.entered, task.entered)
        else:
            self._fifo.enter(flight, task.segment, task.entered, task.entered)

    def _end(self, flight: ItemFlight, outcome: Outcome, now: Seconds, reason: str = "") -> None:
        if flight.waiting:
            self._fifo.withdraw(flight)
        self._fifo.let_go(flight)
        reply = self._ledger.end(flight, outcome, now, reason)
        if reply is not None:
            self._commands.append(reply)

    # ---- deadlines, cancellation, time

    def _abandon(self, request_id: RequestId, outcome: Outcome, reason: str, now: Seconds) -> None:
        """Ends all unfinished items of a request at once and calls back what was sent."""
        flight = self._ledger.requests.get(request_id)
        if flight is None:
            return
        recalled: dict[ServerName, list[TaskId]] = {}
        for item in list(flight.items.values()):
            assert item.task is not None
            server = None if item.waiting else self._fleet.server_of(item.task.task_id)
            if server is not None:
                recalled.setdefault(server, []).append(item.task.task_id)
            self._end(item, outcome, now, reason)
        self._commands.extend(CancelTasks(server, tuple(tasks)) for server, tasks in recalled.items())

    def _on_time(self, now: Seconds) -> None:
        if now < self._wake_at - CLOCK_SLACK:
            return  # a timer that an earlier need made superfluous
        if now - self._wake_at > self._limits.heartbeat_timeout / 4:
            self._fleet.forgive(now)
        self._wake_at = float("inf")
        while self._deadlines and self._deadlines[0][0] <= now:
            self._abandon(heappop(self._deadlines)[1], Outcome.EXPIRED, "the deadline passed", now)
        self._fleet.begin_probes(now)
        for server in self._fleet.silent(now):
            self._lose(server, f"silent for {self._limits.heartbeat_timeout:g} s", now)
        if self._all_down_since is not None and self._all_down_since + self._limits.no_server_timeout <= now:
            reason = f"no server was in service for {self._limits.no_server_timeout:g} s"
            for flight in [f for f in self._ledger.items.values() if f.waiting]:
                self._end(flight, Outcome.FAILED, now, reason)

    def _arm(self, now: Seconds) -> None:
        """Asks for the next timer. A need that only moved later is found out when the timer fires."""
        deadline = self._deadlines[0][0] if self._deadlines else float("inf")
        if self._wake_at <= deadline and self._wake_at != float("inf"):
            return
        at = min(deadline, self._fleet.next_check())
        if self._all_down_since is not None and self._ledger.items:
            at = min(at, max(now, self._all_down_since + self._limits.no_server_timeout))
        if at < self._wake_at:
            self._wake_at = at
            self._commands.append(WakeAt(at))

    # ---- servers

    def _join(self, event: ServerJoined, now: Seconds) -> None:
        if event.server in self._fleet.views:
            self._lose(event.server, "joined again", now)
        self._fleet.join(event.server, event.credit_tasks, event.incarnation, now)
        self._all_down_since = None
        self._wake_at = float("inf")

    def _leave(self, event: ServerLeft, now: Seconds) -> None:
        if event.server in self._fleet.views:
            self._lose(event.server, event.reason, now)
            self._fleet.end_life(event.server)
            if event.removed:
                self._fleet.remove(event.server)

    def _hear(self, report: ServerReport, now: Seconds) -> None:
        view = self._fleet.views.get(report.server)
        if view is None or not self._fleet.is_news(report):
            return
        if report.incarnation > view.incarnation:
            self._lose(report.server, "restarted", now)
        self._fleet.heard(report, now)
        if not view.up:
            self._fleet.up(report.server, now)
            self._all_down_since = None
            self._commands.append(ServerChanged(report.server, True, "heard again", 0))
        lost = self._fleet.lost_tasks(report)
        if lost:
            self._blame(report.server, "blocks are lost on the way", now)
        for task_id in lost:
            self._give_up(task_id, "lost on the way", now)

    def _blame(self, name: ServerName, reason: str, now: Seconds) -> None:
        """Counts a failure against a server, which may get it ejected."""
        if self._fleet.failed(name, now):
            self._commands.append(ServerChanged(name, False, f"ejected: {reason}", 0))
            self._wake_at = float("inf")

    def _lose(self, name: ServerName, reason: str, now: Seconds) -> None:
        """Takes a server out of service: its tasks, and the activations it held, are tried again elsewhere."""
        view = self._fleet.views[name]
        if not view.up:
            return
        self._fleet.down(name, now)
        lost = self._fleet.unsettled(name)
        requeued = sum(self._give_up(task_id, f"server {name} was lost ({reason})", now) for task_id in lost)
        for flight in [f for f in self._ledger.items.values() if f.waiting and f.home == name]:
            assert flight.task is not None
            self._fifo.withdraw(flight)
            self._retry(flight, flight.task, f"server {name} held the activation ({reason})", now)
            requeued += 1
        if lost:
            self._commands.append(CancelTasks(name, tuple(lost)))
        self._commands.append(ServerChanged(name, False, reason, requeued))
        if not self._fleet.any_up():
            self._all_down_since = now
            self._wake_at = float("inf")

    # ---- checks

    def check_invariants(self) -> None:
        """For tests, after every event: conservation, one place per item, ledgers that agree."""
        self._ledger.check_invariants()
        self._fifo.check_invariants()
        self._fleet.check_invariants()
        for flight in self._ledger.items.values():
            assert flight.task is not None
            assert flight.waiting or self._fleet.server_of(flight.task.task_id), "an item that is nowhere"
