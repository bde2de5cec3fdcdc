"""The router's side of the loop: global FIFO, routing, collecting results, deadlines.

`Dispatcher.handle` is its only mutator. It owns every request and item in flight (`items.py`), the waiting tasks
(`fifo.py`), which requests come in (`admission.py`), what is known of the servers (`fleet.py`), who of them takes part
(`membership.py`), and what becomes of tasks that did not run (`recovery.py`). It carries no tensors and talks to
nobody: hosts deliver events and perform commands.
"""

from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from numpy.random import Generator

from slim_scheduler.core.accuracy import AccuracyPrior
from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.dispatch.admission import Admission
from slim_scheduler.core.dispatch.fifo import GlobalFifo, Key
from slim_scheduler.core.dispatch.fleet import Fleet, SentBlock
from slim_scheduler.core.dispatch.items import ItemFlight, Ledger
from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.dispatch.membership import Membership
from slim_scheduler.core.dispatch.offers import IN_HAND, PAUSE
from slim_scheduler.core.dispatch.order import Order
from slim_scheduler.core.dispatch.recovery import Retries
from slim_scheduler.core.dispatch.second_pass import SecondPass
from slim_scheduler.core.messages import (
    BatchReported,
    CancelTasks,
    DispatcherCommand,
    DispatcherEvent,
    FrontTurned,
    OfferRepeated,
    OffersTaken,
    OfferWithdrawn,
    RefusedAgain,
    Reply,
    RequestArrived,
    RequestCancelled,
    RequestOffered,
    RouteNow,
    RouterFellBack,
    RouterTooSlow,
    RouteSoon,
    SendBlock,
    ServerDraining,
    ServerJoined,
    ServerLeft,
    ServerReported,
    TasksReturned,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.router.base import Escalation, Router
from slim_scheduler.core.router.guard import GuardedRouter
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import (
    NOT_FINITE,
    Block,
    Decision,
    ItemId,
    Outcome,
    Request,
    RequestId,
    Seconds,
    ServerName,
    Task,
    TaskConstraints,
    TaskId,
)
from slim_scheduler.core.view import Head, ServerView, View

STALE_DEADLINES = 1024  # that may stay: sweeping costs a look at all
ANSWER_LEAD: Seconds = 0.002  # before its deadline an item on its second pass is answered with its first
CLOCK_SLACK = 1e-6  # seconds that a host's timer may be early
ROUTE_SOON = RouteSoon()


class _Held(NamedTuple):
    """A decision for a full server, and who made it. It is made again where `task`, the oldest that it was made for,
    was cancelled or expired, or the server went out of service."""

    key: Key
    task: Task
    decision: Decision
    router: str


class Dispatcher:
    """Global FIFO and routing. `accuracy` resolves accuracy floors, `calibration` confidence floors; without them such
    requests are refused. `escalation` says which other items run again; without it none does. `order`: which waiting
    task is next, where it is not the first that came."""

    def __init__(
        self,
        limits: DispatchLimits,
        shape: ModelShape,
        router: Router,
        fallback: Router,
        rng: Generator,
        accuracy: AccuracyPrior | None = None,
        escalation: Escalation | None = None,
        calibration: Calibration | None = None,
        order: Order | None = None,
    ) -> None:
        self._limits = limits
        self.escalates = escalation is not None
        self.wants_margins = self.escalates or calibration is not None
        self._shape = shape
        self._router = GuardedRouter(router, fallback, rng)
        self._ledger = Ledger()
        self._fleet = Fleet(limits.heartbeat_timeout, limits.loss_grace)
        pairs = () if escalation is None else escalation.pairs
        self._admission = Admission(shape, limits.max_waiting_items, accuracy, calibration is not None, pairs)
        self._second_pass = SecondPass(shape, self._admission, escalation, calibration)
        self._fifo = GlobalFifo(
            shape,
            self._ledger.items,
            limits.max_activation_bytes,
            limits.home_matters,
            limits.priority_aging,
            limits.reentry_back,
            order,
            None if escalation is None else escalation.may_resume,
        )
        self._order = order
        self._commands: list[DispatcherCommand] = []
        tell = self._commands.append
        self._retries = Retries(limits, self._ledger, self._fifo, self._fleet, tell)
        self._members = Membership(limits, self._fleet, self._retries, tell, self._look_again)
        self._deadlines: list[tuple[Seconds, RequestId]] = []
        self._held: _Held | None = None
        self._fresh = 0  # items that came while somebody had room, and are routed soon
        self._routes_soon = False  # `RouteNow` was asked for and has not come
        self._refused: Request | None = None  # the last offer, if nothing but such requests has come since
        self._key_due: Key
        self._wake_at = inf
        self._last_block = 0

    # ---- what hosts and pages may read

    def unmet(self, constraints: TaskConstraints | None, confidence_floor: float | None) -> str | None:
        """Why what a request asks beyond an answer can never be met; None: it can. Changes nothing."""
        return self._admission.unmet(constraints, confidence_floor)

    @property
    def servers(self) -> dict[ServerName, ServerView]:
        return self._fleet.views

    @property
    def fifo_length(self) -> int:
        return len(self._fifo)

    @property
    def held_up(self) -> int:
        """Tasks that no server has credit for; not those that came while one had, which are routed soon."""
        return len(self._fifo) - self._fresh

    @property
    def blocks(self) -> int:
        """Blocks sent so far, which is the last one's number."""
        return self._last_block

    def runs_again(self, item: ItemId) -> bool:
        """Whether an item is on its second pass."""
        flight = self._ledger.items.get(item)
        return flight is not None and flight.first is not None

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return self._ledger.counts()

    def handle(self, event: DispatcherEvent, now: Seconds) -> list[DispatcherCommand]:
        """Takes one event, returns what the host must do.

        It is these four steps; only an environment that stops at every decision takes them one by one. An offer needs
        none of them: it changes neither timers nor what is routed, and most that come beyond the peak are refused.
        """
        if type(event) is RequestOffered:
            return self._offer(event.request, now)
        if type(event) is OfferRepeated:
            return self._offer_again(event.refused)
        if self.absorb(event, now):
            while (view := self.pending(now)) is not None:
                self.decide(view)
        return self.finish(now)

    def absorb(self, event: DispatcherEvent, now: Seconds) -> bool:
        """Takes an event in without routing. Whether routing follows: an arrival waits for those that come with it."""
        self._refused = None
        match event:
            case BatchReported():
                self._collect(event, now)
            case RouteNow():
                self._routes_soon = False
            case RequestArrived():
                self._arrive(event.request, now)
                return False
            case FrontTurned():
                self._turn_front(event, now)
                return False
            case OfferWithdrawn():
                request = self._admission.offers.ended(event.request_id)
                if event.cancelled and request is not None:
                    self._ledger.end_unnamed(len(request.items), Outcome.CANCELLED)
                return False
            case ServerReported():
                self._members.hear(event.report, now)
            case TimerFired():
                self._on_time(now)
            case TasksReturned():
                self._members.gave_back(event, now)
            case RequestCancelled():
                self._cancel(event, now)
            case ServerJoined():
                self._members.join(event, now)
            case ServerDraining():
                self._members.drain(event.server, now)
            case ServerLeft():
                self._members.leave(event, now)
            case RouterTooSlow():
                self._suspend_router(event.seconds, now)
        return True

    def pending(self, now: Seconds) -> View | None:
        """The next decision that is due, about the oldest task's key. None: nothing waits, or nobody has credit."""
        self._fresh = 0
        while (key := self._next_key()) is not None:
            held, self._held = self._held, None
            if held is None:
                self._key_due = key
                return self._view(key, now)
            self._send(key, held.decision, held.router, now)
        return None

    def _next_key(self) -> Key | None:
        """The oldest task's key. None: nothing waits, nobody has credit, or the decision about it is held for a server
        that has none. A held decision that is void goes."""
        if not self._fleet.any_available():
            return None
        key, held = self._fifo.head(), self._held
        if key is None or held is None:
            return key
        if not self._stands(held, key):
            self._held = None
        elif not self._fleet.views[held.decision.server].available:
            return None
        return key

    def decide(self, view: View) -> Decision:
        """Asks the router about the pending view and sends the block, or holds it for the server it chose."""
        decision, router, complaint = self._router.decide(view)
        if complaint is not None:
            self._commands.append(RouterFellBack(complaint.reason, raised=complaint.raised))
        if self._fleet.views[decision.server].available:
            self._send(self._key_due, decision, router, view.now)
        else:
            self._held = _Held(self._key_due, self._fifo.oldest(self._key_due), decision, router)
        return decision

    def finish(self, now: Seconds) -> list[DispatcherCommand]:
        """The commands of what was absorbed and decided."""
        self._arm(now)
        if self._admission.offers.any:
            self._look_at_offers(now)
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    # ---- arrivals

    def _offer(self, request: Request, now: Seconds) -> list[DispatcherCommand]:
        waiting, in_flight = len(self._fifo), len(self._ledger.items)
        refusal = self._admission.refuse_offer(request, waiting, waiting - self._fresh, in_flight, now)
        self._refused = None if refusal is None else request
        return [] if refusal is None else [self._ledger.refuse(request, Outcome.REJECTED, *refusal)]

    def _offer_again(self, refused: RequestId) -> list[DispatcherCommand]:
        """What decided about the last offer is as it was, and its wait has only grown: the like of it is refused."""
        last = self._refused
        if last is None or last.request_id != refused:
            return []
        self._ledger.end_unnamed(len(last.items), Outcome.REJECTED)
        return [RefusedAgain()]

    def _turn_front(self, event: FrontTurned, now: Seconds) -> None:
        offers = self._admission.offers
        for request in offers.expired(now):
            self._commands.append(self._ledger.refuse(request, Outcome.EXPIRED, "the deadline passed", None))
        taken = offers.turn(event.load, event.after_pause, self._most_in_hand, now)
        turn_at = now + PAUSE if offers.paused else now if offers.waits else None
        self._commands.append(OffersTaken(tuple([request.request_id for request in taken]), turn_at))
        for request in taken:
            self._arrive(request, now)

    def _look_at_offers(self, now: Seconds) -> None:
        """Answers go out: where the front end pauses, they may make room for a batch."""
        offers = self._admission.offers
        for command in self._commands:
            if isinstance(command, Reply):
                offers.ended(command.request_id)
        if offers.paused and offers.room_for_a_batch(self._most_in_hand):
            offers.paused = False
            self._commands.append(OffersTaken((), now))

    @property
    def _most_in_hand(self) -> int:
        """What the servers have at a time, or two batches: more would wait here, where refusing costs more."""
        return max(IN_HAND, sum(view.limit for view in self._fleet.views.values() if view.up))

    def _arrive(self, request: Request, now: Seconds) -> None:
        ledger, waiting = self._ledger, len(self._fifo)
        if request.deadline is not None and request.deadline <= now:
            self._commands.append(ledger.refuse(request, Outcome.EXPIRED, "the deadline had passed", None))
            return
        refusal = self._admission.refuse(request, waiting, waiting - self._fresh, len(ledger.items), now)
        if refusal is not None:
            self._commands.append(ledger.refuse(request, Outcome.REJECTED, *refusal))
            return
        self._retries.arrived(len(request.items))
        if request.deadline is not None:
            self._ends_at(request.deadline, request.request_id)
        for flight in ledger.admit(request):
            self._fifo.enter(flight, 0, now)
        if self._next_key() is not None:  # else what frees a server routes
            self._fresh += len(request.items)
            if not self._routes_soon:
                self._routes_soon = True
                self._commands.append(ROUTE_SOON)

    # ---- routing

    def _suspend_router(self, took: Seconds, now: Seconds) -> None:
        until = now + self._limits.router_probe
        self._router.suspend(until)
        reason = f"took {took * 1e3:.1f} ms, limit {self._limits.slow_router * 1e3:g} ms"
        self._commands.append(RouterFellBack(reason, until))

    def _stands(self, held: _Held, key: Key) -> bool:
        """Whether a held decision is for the head, in whose place another may have come, and its server in service."""
        flight = self._ledger.items.get(held.task.item)
        if held.key != key or flight is None or flight.task is not held.task:
            return False
        server = self._fleet.views.get(held.decision.server)
        return server is not None and server.in_service

    def _view(self, key: Key, now: Seconds) -> View:
        """What the router sees, and whom it may choose."""
        fifo, servers, constraints = self._fifo, self._fleet.views, key[3]
        oldest = fifo.oldest(key)
        flight = self._ledger.items[oldest.item]
        head = Head(
            key[0],
            key[1],
            oldest.home,
            fifo.count(key),
            now - oldest.entered,
            None if oldest.deadline is None else oldest.deadline - now,
            self._shape.widths if constraints is None else self._admission.widths(key[0], *constraints),
            None if constraints is None else constraints[0],
            now - flight.request.request.arrival,
            flight.first is not None,
            None if flight.first is None else flight.first.margin,
        )
        if self._router.chooses_full:
            choices = {name: server for name, server in servers.items() if server.in_service}
        else:
            choices = {name: s for name, s in servers.items() if s.up and s.outstanding < s.limit}
        ledger = self._ledger
        arrived = ledger.received_items, ledger.received_squares
        return View(now, head, len(fifo), fifo.per_segment, ledger.completed, servers, choices, *arrived)

    def _send(self, key: Key, decision: Decision, router: str, now: Seconds) -> None:
        fifo_length = len(self._fifo)
        tasks = self._fifo.take(key, min(decision.group, self._fleet.views[decision.server].credit))
        segment, previous_width, _, bounds = key
        exact = bounds is not None and bounds[0].widths is not None
        self._last_block += 1
        more = self._may_follow(key, decision.server, len(tasks)) if self._limits.batch_windows else 0
        block = Block(
            self._last_block, decision.server, segment, decision.width, previous_width, exact, tasks, now, more
        )
        self._fleet.send(SentBlock(block, decision, fifo_length, self._ledger.completed, router, len(tasks)))
        self._commands.append(SendBlock(block))

    def _may_follow(self, key: Key, server: ServerName, taken: int) -> int:
        """How many tasks may soon follow a block of a key: what waits here of it, and what runs or is queued anywhere
        one segment before. New requests may follow where others are about, as many as these have items."""
        if self._fleet.views[server].credit <= taken:
            return 0
        waiting, ledger = self._fifo.count(key), self._ledger
        segment, previous_width, _, _ = key
        if previous_width is None:
            return waiting if len(ledger.requests) == 1 else len(ledger.items) - taken
        return waiting + self._fleet.pending(segment - 1, previous_width)

    # ---- results

    def _collect(self, event: BatchReported, now: Seconds) -> None:
        share = None if event.energy_j is None else event.energy_j / len(event.tasks)
        seconds = event.finished - event.started
        width, server = (event.width,), (event.server,)
        home, items = event.server, self._ledger.items
        settled = self._fleet.settle_all(event.tasks)  # nothing of a late or doubled word
        self._admission.worked(sum([len(tasks) for _, tasks in settled]), now)
        ran: list[ItemFlight] = []
        for sent, tasks in settled:
            latency, ran_of_block = sent.latency, sent.ran
            for task in tasks:
                item = task.item
                flight = items.get(item)
                if flight is None or flight.task is not task:
                    sent.lost += 1  # expired or cancelled while it ran
                    continue
                flight.widths = widths = flight.widths + width
                flight.servers += server
                flight.home = home
                flight.compute += seconds
                flight.energy = None if share is None or flight.energy is None else share + flight.energy
                latency += now - task.entered
                ran_of_block.append((item, widths))
                ran.append(flight)
            sent.latency = latency
        if self._order is not None and ran and ran[0].constraints is None:
            self._order.remaining.ran(event.segment, event.width, len(ran))
        if ran and event.segment < self._shape.segments - 1:
            self._fifo.go_on(ran, event.segment, event.width, now)
        else:
            self._answer(ran, event, now)
        ended = dict.fromkeys([sent for sent, _ in settled if not sent.left])
        self._commands.extend([sent.finished(now) for sent in ended])
        if settled:
            self._members.ran(event.server, now)

    def _answer(self, ran: list[ItemFlight], event: BatchReported, now: Seconds) -> None:
        """Items whose last segment ran: each is answered, or runs again."""
        margins = dict(zip(event.tasks, event.margins, strict=True)) if event.margins else {}
        for flight in ran:
            assert flight.task is not None
            task = flight.task.task_id
            margin = margins.get(task)
            if task in event.not_finite:
                self._retries.end(flight, Outcome.FAILED, now, NOT_FINITE)
                continue
            is_first, second = flight.first is None, self._second_pass.widths(flight, margin, now)
            segment = 0 if second is None or margin is None else flight.go_again(second, margin, now)
            if self._order is not None and is_first:
                self._order.remaining.first_ended(second, segment)
            if second is None:
                self._second_pass.ended(flight, now)
                self._admission.completed(now)
                self._retries.end(flight, Outcome.ANSWERED, now, margin=margin)
                continue
            self._fifo.resume(flight, segment, now)
            request = flight.request.request
            if request.deadline is not None and request.anytime and not flight.request.answers_early:
                flight.request.answers_early = True
                self._ends_at(request.deadline - ANSWER_LEAD, request.request_id)

    # ---- deadlines, cancellation, time

    def _cancel(self, event: RequestCancelled, now: Seconds) -> None:
        if event.stopping:
            self._abandon(event.request_id, Outcome.EXPIRED, "the engine is stopping", now, with_answer=True)
        reason = "the engine is stopping" if event.stopping else "cancelled by the client"
        self._abandon(event.request_id, Outcome.CANCELLED, reason, now)

    def _abandon(
        self, request_id: RequestId, outcome: Outcome, reason: str, now: Seconds, with_answer: bool = False
    ) -> None:
        """Ends all unfinished items of a request at once, or those that have an answer, and calls back what was
        sent."""
        flight = self._ledger.requests.get(request_id)
        if flight is None:
            return
        recalled: dict[ServerName, list[TaskId]] = {}
        for item in list(flight.items.values()):
            if with_answer and not item.has_answer:
                continue
            assert item.task is not None
            if outcome is Outcome.EXPIRED:
                self._second_pass.ended(item, now)
            server = self._fleet.server_of(item.task.task_id)
            if server is None:
                self._fifo.withdraw(item)
            else:
                recalled.setdefault(server, []).append(item.task.task_id)
            self._retries.end(item, outcome, now, reason)
        self._commands.extend(CancelTasks(server, tuple(tasks)) for server, tasks in recalled.items())

    def _ends_at(self, at: Seconds, request_id: RequestId) -> None:
        """Remembers a deadline. Those of requests that have ended leave the heap's head by themselves, and the rest of
        it when they are most of it: a far one would stay until it comes."""
        going_on = self._ledger.requests
        if len(self._deadlines) > 2 * len(going_on) + STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in going_on]
            heapify(self._deadlines)
        heappush(self._deadlines, (at, request_id))

    def _expire(self, request_id: RequestId, now: Seconds) -> None:
        """Its deadline has passed, or comes so soon that who has an answer gets it."""
        flight = self._ledger.requests.get(request_id)
        if flight is not None:
            deadline = flight.request.deadline
            early = deadline is not None and deadline > now
            self._abandon(request_id, Outcome.EXPIRED, "the deadline passed", now, with_answer=early)

    def _on_time(self, now: Seconds) -> None:
        if now < self._wake_at - CLOCK_SLACK:
            return  # a timer that an earlier need made superfluous
        overslept, self._wake_at = now - self._wake_at, inf
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(heappop(self._deadlines)[1], now)
        self._members.look(now, overslept)
        if self._members.hopeless_at <= now:
            reason = f"no server was in service for {self._limits.no_server_timeout:g} s"
            for flight in self._fleet.unsent(self._ledger.items.values()):
                self._fifo.withdraw(flight)
                self._retries.end(flight, Outcome.FAILED, now, reason)

    def _arm(self, now: Seconds) -> None:
        """Asks for the next timer. A need that only moved later is found out when the timer fires."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._ledger.requests:
            heappop(deadlines)  # answered: its deadline needs no timer
        soonest = deadlines[0][0] if deadlines else inf
        if self._wake_at <= soonest and self._wake_at != inf:
            return
        at = min(soonest, self._fleet.next_check())
        if self._ledger.items:
            at = min(at, max(now, self._members.hopeless_at))
        if at < self._wake_at:
            self._wake_at = at
            self._commands.append(WakeAt(at))

    def _look_again(self) -> None:
        """Something may be due earlier than the timer that was asked for."""
        self._wake_at = inf

    # ---- checks

    def check_invariants(self) -> None:
        """For tests, after every event: conservation, one place per item, ledgers that agree."""
        self._ledger.check_invariants()
        self._admission.offers.check_invariants()
        self._fifo.check_invariants()
        self._fleet.check_invariants()
        unsent = {flight.item for flight in self._fleet.unsent(self._ledger.items.values())}
        assert unsent == self._fifo.items_waiting(), "an item that is nowhere, or twice"
        kept = {home for flight in self._ledger.items.values() for home in flight.kept.values()}
        assert all(self._fleet.views[home].up for home in kept), "an activation kept at a lost server"
        held = self._held
        assert self._routes_soon or self._next_key() is None, "a task waits although somebody has credit"
        self._held = held
