"""Random histories of each machine, as hypothesis state machines: whatever happens in whatever order, nothing is
lost, doubled, starved or spun on, and no limit is passed."""

from itertools import cycle

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.dispatch.order import Order, RemainingTime
from slim_scheduler.core.messages import (
    BatchDone,
    BatchFailed,
    BatchReported,
    BlockArrived,
    BlockFinished,
    CancelTasks,
    DeviceSampled,
    InstanceFailed,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    Reply,
    RequestCancelled,
    RouteNow,
    RouterTooSlow,
    RouteSoon,
    SendBlock,
    ServerChanged,
    ServerLeft,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.router.heuristics import RandomRouter
from slim_scheduler.core.server.rest import PAID_AHEAD
from slim_scheduler.core.server.scheduler import ServerKnobs, ServerScheduler
from slim_scheduler.core.types import Outcome
from tests.core.networks import SEGMENTS, WEIGHT, WIDTHS, block, dispatcher, jsq, report, request, task

HISTORIES = 2000
STEPS = 20
LONGEST_DEADLINE = 1.5
MAX_BATCH = 4
BUDGET = 9 * WEIGHT
BEST = 0.9  # utilisation of a device that rests

gaps = st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.1])
widths = st.sampled_from(WIDTHS)


class ServerHistory(RuleBasedStateMachine):
    """One server under everything a host may tell it."""

    last_gap = 0.01  # seconds between events once nothing more arrives

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.server = ServerScheduler("a", self.knobs(), self.shape(), incarnation=0, batch_time=self.batch_time)
        self.held = {}  # task id -> (key, order of arrival)
        self.expired = set()
        self.batches, self.loading, self.leaving = {}, [], []
        self.tasks = self.blocks = 0
        self.last_order = {}

    @staticmethod
    def shape():
        from tests.core.networks import SHAPE

        return SHAPE

    @staticmethod
    def knobs():
        return ServerKnobs(MAX_BATCH, BUDGET, 0.9, 1.0, 3, 2, max_concurrent_batches=2)

    @staticmethod
    def batch_time(segment, previous_width, width, size):
        return 0.01 * width * (1 + size)

    def advance(self, gap):
        self.now += gap

    def tell(self, event):
        commands = self.server.handle(event, self.now)
        assert len(commands) <= 4 + 2 * len(self.held), "an answer out of proportion"
        for command in commands:
            match command:
                case StartBatch():
                    self.started(command.batch)
                case LoadInstance():
                    self.loading.append(command.instance)
                case UnloadInstance():
                    self.leaving.append(command.instance)
                case BatchReported() | TasksReturned():
                    for task_id in command.tasks:
                        del self.held[task_id]  # a KeyError would be a second word on the same task
                case WakeAt():
                    assert command.at > self.now, "a timer that would fire at once"
        return commands

    def started(self, batch):
        assert 1 <= len(batch.tasks) <= MAX_BATCH
        keys = {self.held[t.task_id][0] for t in batch.tasks}
        assert len(keys) == 1, "a batch mixes keys"
        (key,) = keys
        orders = [self.held[t.task_id][1] for t in batch.tasks]
        waiting = [
            order
            for task_id, (other, order) in self.held.items()
            if other == key and not any(task_id in [t.task_id for t in b.tasks] for b in self.batches.values())
        ]
        assert orders == sorted(waiting)[: len(orders)], "not the first of their key"
        assert all(t.deadline is None or t.deadline > self.now for t in batch.tasks), "expired work runs"
        assert batch.width >= batch.requested_width
        assert batch.width == batch.requested_width or not key[3], "an exact width was widened"
        self.batches[batch.batch_id] = batch

    @rule(gap=gaps, size=st.integers(1, 6), segment=st.integers(0, SEGMENTS - 1), width=widths, previous=widths,
          exact=st.booleans(), deadline=st.sampled_from([None, None, 0.1, 2.0]))  # fmt: skip
    def block_arrives(self, gap, size, segment, width, previous, exact, deadline):
        self.advance(gap)
        previous = previous if segment else None
        tasks = []
        for _ in range(size):
            self.tasks += 1
            tasks.append(task(self.tasks, segment, previous, None if deadline is None else self.now + deadline))
            self.held[self.tasks] = ((segment, width, previous, exact), self.tasks)
        self.blocks += 1
        event = BlockArrived(self.block(block(self.blocks, tuple(tasks), width, exact)))
        self.tell(event)
        if size == 1:
            self.tell(event)  # delivered twice

    def block(self, arriving):
        return arriving

    @precondition(lambda self: self.batches)
    @rule(gap=gaps, data=st.data(), how=st.sampled_from(["done", "done", "out of memory", "error"]))
    def batch_ends(self, gap, data, how):
        self.advance(gap)
        batch_id = data.draw(st.sampled_from(sorted(self.batches)))
        self.batches.pop(batch_id)
        if how == "done":
            self.tell(BatchDone(batch_id))
        else:
            self.tell(BatchFailed(batch_id, how, out_of_memory=how == "out of memory"))

    @precondition(lambda self: self.loading)
    @rule(gap=gaps, works=st.sampled_from([True, True, True, False]))
    def load_ends(self, gap, works):
        self.advance(gap)
        instance = self.loading.pop(0)
        self.tell(InstanceReady(instance) if works else InstanceFailed(instance, "no such device"))

    @precondition(lambda self: self.leaving)
    @rule(gap=gaps)
    def unload_ends(self, gap):
        self.advance(gap)
        self.tell(InstanceUnloaded(self.leaving.pop()))

    @rule(gap=gaps, utilization=st.sampled_from([None, 0.0, 0.5, 0.95]))
    def device_is_sampled(self, gap, utilization):
        self.advance(gap)
        self.tell(DeviceSampled(utilization))

    @rule(gap=gaps)
    def timer_fires(self, gap):
        self.advance(gap)
        self.tell(TimerFired())

    @rule(data=st.data())
    def tasks_are_cancelled(self, data):
        chosen = data.draw(st.sets(st.integers(1, self.tasks + 1), max_size=4))
        self.tell(CancelTasks("a", tuple(chosen)))

    @invariant()
    def limits_hold(self):
        self.server.check_invariants(self.now)

    def teardown(self):
        """No starvation: when the device does its part, everything held is done in a bounded number of events."""
        for _ in range(8 * len(self.held) + 50):
            if not self.held:
                break
            self.advance(self.last_gap)
            if self.batches:
                self.batches.pop(batch_id := next(iter(self.batches)))
                self.tell(BatchDone(batch_id))
            elif self.loading:
                self.tell(InstanceReady(self.loading.pop(0)))
            elif self.leaving:
                self.tell(InstanceUnloaded(self.leaving.pop()))
            else:
                self.tell(DeviceSampled(0.0))
        assert not self.held, f"{len(self.held)} tasks were never ended"


class WindowHistory(ServerHistory):
    """The same with a batch window, timers that fire when they were asked for, and blocks that others may follow."""

    def __init__(self):
        super().__init__()
        self.timers = []

    @staticmethod
    def knobs():
        return msgspec.structs.replace(ServerHistory.knobs(), batch_window=0.06, tile=3, credit=12, awaits_return=True)

    def block(self, arriving):
        return msgspec.structs.replace(arriving, more=arriving.block_id % 3)

    def advance(self, gap):
        """What was asked for meanwhile comes first, each at its time."""
        until = self.now + gap
        while (due := min(self.timers, default=until + 1)) <= until:
            self.timers.remove(due)
            self.now = max(self.now, due)
            self.tell(TimerFired())
            self.server.check_invariants(self.now)
        self.now = until

    def tell(self, event):
        commands = super().tell(event)
        self.timers += [command.at for command in commands if isinstance(command, WakeAt)]
        return commands


class AutomaticWindowHistory(WindowHistory):
    """The same with the window and the tiles that the profile suggests."""

    @staticmethod
    def knobs():
        return msgspec.structs.replace(ServerHistory.knobs(), batch_window=None)


class RestingHistory(AutomaticWindowHistory):
    """The same on a device that does most at nine tenths of the time: it is not busier for longer."""

    last_gap = 0.1  # it may owe two seconds

    def __init__(self):
        super().__init__()
        self.busy = []  # [from, until] of each stretch

    @staticmethod
    def knobs():
        return msgspec.structs.replace(AutomaticWindowHistory.knobs(), best_utilization=BEST)

    def tell(self, event):
        if isinstance(event, BatchDone | BatchFailed) and not self.batches:
            self.busy[-1][1] = self.now
        return super().tell(event)

    def started(self, batch):
        worked = 0.0
        for began, until in reversed(self.busy):
            worked += min(until, self.now) - began
            assert worked <= BEST * (self.now - began) + PAID_AHEAD * (1 - BEST) + 1e-5, "too busy"
        if not self.batches:
            self.busy.append([self.now, float("inf")])
        super().started(batch)


class DispatcherHistory(RuleBasedStateMachine):
    """The dispatcher with three servers that answer, lose, double, return and die as they like."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.dispatcher = dispatcher(self.router(), servers=("a", "b", "c"), credit=6, max_waiting_items=25)
        self.open = set()  # requests without a reply
        self.accepted_items = {}
        self.at_server = {"a": {}, "b": {}, "c": {}}
        self.said = []  # reports that may be doubled later
        self.incarnation = dict.fromkeys("abc", 0)
        self.requests = 0
        self.last_sent = {}
        self.wake_at = None
        self.routes_soon = False

    def router(self):
        return jsq("random")

    def tell(self, event):
        commands = self.dispatcher.handle(event, self.now)
        self.routes_soon = self.routes_soon and not isinstance(event, RouteNow)
        for command in commands:
            match command:
                case RouteSoon():
                    assert not self.routes_soon, "asked for twice"
                    self.routes_soon = True
                case SendBlock():
                    self.sent(command.block)
                case Reply():
                    assert command.request_id in self.open, "a second reply"
                    self.open.remove(command.request_id)
                    assert {i.item for i in command.items} == self.accepted_items.pop(command.request_id)
                    if command.outcome is Outcome.ANSWERED:
                        assert all(len(i.widths) == SEGMENTS for i in command.items)
                case CancelTasks():
                    for task_id in command.tasks:
                        found = self.at_server[command.server].pop(task_id, None)
                        if found is not None:
                            self.tell_later(TasksReturned(command.server, 0, (task_id,), "cancelled"))
                case WakeAt():
                    assert command.at > self.now or not isinstance(event, TimerFired), "timers that never end"
                case ServerChanged() | BlockFinished():
                    pass
        return commands

    def margins(self, block, tasks):
        return ()

    def tell_later(self, event):
        self.said.append(event)

    def sent(self, sent):
        assert sent.tasks
        assert self.dispatcher.servers[sent.server].up, "sent to a server that is out of service"
        assert len({(t.segment, t.previous_width) for t in sent.tasks}) == 1, "a block mixes keys"
        self.in_order(sent.tasks)
        for t in sent.tasks:
            self.at_server[sent.server][t.task_id] = sent

    def in_order(self, tasks):
        entered = [t.entered for t in tasks if t.priority == 0]
        assert entered == sorted(entered), "not in FIFO order"

    @rule(gap=gaps, items=st.integers(1, 3), deadline=st.sampled_from([None, None, 0.04, LONGEST_DEADLINE]),
          priority=st.sampled_from([0, 0, 1]), fixed=st.booleans(), alone=st.booleans())  # fmt: skip
    def request_arrives(self, gap, items, deadline, priority, fixed, alone=True):
        self.now += gap
        self.requests += 1
        self.open.add(self.requests)
        asked = {"widths": (0.5,) * SEGMENTS} if fixed else {}
        at = None if deadline is None else self.now + deadline
        event = request(self.requests, items, self.now, at, priority, **asked)
        self.accepted_items[self.requests] = set(event.request.items)
        self.tell(event)
        if alone and self.routes_soon:
            self.tell(RouteNow())

    @precondition(lambda self: any(self.at_server.values()))
    @rule(gap=gaps, data=st.data(), returned=st.sampled_from([False, False, False, True]), wider=st.booleans())
    def server_answers(self, gap, data, returned, wider):
        self.now += gap
        server = data.draw(st.sampled_from([name for name, tasks in self.at_server.items() if tasks]))
        tasks = self.at_server[server]
        first = tasks[data.draw(st.sampled_from(sorted(tasks)))]
        of_block = [t.task_id for t in first.tasks if t.task_id in tasks]
        some = tuple(of_block[: data.draw(st.integers(1, len(of_block)))])
        for task_id in some:
            del tasks[task_id]
        width = 1.0 if wider and not first.exact else first.width
        event = (
            TasksReturned(server, 0, some, "device lost")
            if returned
            else BatchReported(
                server, 0, 1, first.segment, width, some, self.now - 0.001, self.now, 0.5, (), self.margins(first, some)
            )
        )
        self.tell(event)
        self.said.append(event)

    @precondition(lambda self: self.said)
    @rule(gap=gaps, data=st.data())
    def a_word_comes_late_or_twice(self, gap, data):
        self.now += gap
        self.tell(self.said[data.draw(st.integers(0, len(self.said) - 1))])

    @rule(gap=gaps, server=st.sampled_from("abc"), restarted=st.booleans(), forgets=st.booleans())
    def server_reports(self, gap, server, restarted, forgets):
        self.now += gap
        if restarted:
            self.incarnation[server] += 1
            self.at_server[server].clear()
        blocks = () if forgets else tuple({b.block_id for b in self.at_server[server].values()})
        self.tell(report(server, self.now, self.incarnation[server], blocks))

    @rule(gap=gaps, server=st.sampled_from("abc"))
    def server_leaves(self, gap, server):
        self.now += gap
        self.at_server[server].clear()
        self.tell(ServerLeft(server, "its process died"))

    @rule(gap=gaps)
    def timer_fires(self, gap):
        self.now += gap
        self.tell(TimerFired())

    @rule(data=st.data())
    def client_cancels(self, data):
        self.tell(RequestCancelled(data.draw(st.integers(1, self.requests + 1))))

    @rule()
    def router_is_slow(self):
        self.tell(RouterTooSlow(0.05))

    @invariant()
    def nothing_is_lost_or_doubled(self):
        self.dispatcher.check_invariants()
        assert self.dispatcher.counts["requests"]["in_flight"] == len(self.open)

    def teardown(self):
        """No starvation: with servers that answer, every request gets its reply in a bounded number of events.

        Word of cancelled tasks may be lost for good; what they held is free two graces after the last deadline.
        """
        for name in "abc":
            self.incarnation[name] += 1
            self.at_server[name].clear()
            self.tell(report(name, self.now, self.incarnation[name]))
        until_lost = round((LONGEST_DEADLINE + 2 * DispatchLimits().loss_grace) / 0.01)
        for _ in range(40 * len(self.open) + 60 + until_lost):
            if not self.open:
                break
            self.now += 0.01
            for name in "abc":
                self.tell(report(name, self.now, self.incarnation[name], tuple(
                    {b.block_id for b in self.at_server[name].values()})))  # fmt: skip
                for task_id, sent in list(self.at_server[name].items()):
                    del self.at_server[name][task_id]
                    self.tell(BatchReported(name, 0, 1, sent.segment, sent.width, (task_id,), self.now, self.now))
            self.tell(TimerFired())
        assert not self.open, f"requests {sorted(self.open)} never got a reply"


WIDE = (1.0,) * SEGMENTS
SECONDS = (WIDE, (0.5, *WIDE[1:]), (0.5,) * (SEGMENTS - 1) + (1.0,))


class ChangingEscalation:
    """Items of a small margin run again, at one width tuple after the other."""

    pairs = ()

    def __init__(self):
        self._next = cycle(SECONDS)

    def second(self, ran, margin):
        return next(self._next) if margin < 0.5 else None

    def may_resume(self, ran):
        return any(second[: len(ran)] == ran for second in SECONDS)


class EscalationHistory(DispatcherHistory):
    """The same where items of a small margin run again, from the input or from an activation that was kept."""

    def __init__(self):
        super().__init__()
        self.dispatcher = dispatcher(
            self.router(),
            servers=("a", "b", "c"),
            credit=6,
            max_waiting_items=25,
            escalation=ChangingEscalation(),
        )

    def margins(self, block, tasks):
        return tuple((task % 4) / 4 for task in tasks) if block.segment == SEGMENTS - 1 else ()

    def tell(self, event):
        commands = super().tell(event)
        for item in [i for c in commands if isinstance(c, Reply) for i in c.items if i.outcome is Outcome.ANSWERED]:
            assert item.passes == 1 or (item.widths in SECONDS and len(item.other_widths) == SEGMENTS)
        return commands


class OrderHistory(EscalationHistory):
    """The same where the shortest is next, or the one with the least slack."""

    BOUND = 0.4
    by_slack = False

    def __init__(self):
        super().__init__()
        self.latest = 0.0  # when the youngest came that was the next one so far
        self.sent_at = {}
        batch = [{width: 0.2 * width for width in WIDTHS}] * SEGMENTS
        self.dispatcher = dispatcher(
            self.router(),
            servers=("a", "b", "c"),
            credit=6,
            max_waiting_items=25,
            escalation=ChangingEscalation(),
            order=Order(RemainingTime(batch), self.BOUND, self.by_slack),
        )

    def in_order(self, tasks):
        places = [(t.arrival, t.task_id) for t in tasks if t.priority == 0]
        assert places == sorted(places), "not in order"
        for t in tasks:
            assert t.entered <= t.arrival <= t.entered + self.BOUND
            tried = t.entered <= self.sent_at.get(t.item, -1.0)  # and passed while it was away
            if t.priority == 0 and not tried:
                assert self.latest <= t.entered + self.BOUND, "passed by one that came later than the bound"
            self.sent_at[t.item] = self.now
        if tasks[0].priority == 0:
            self.latest = max(self.latest, tasks[0].entered)


class SlackHistory(OrderHistory):
    by_slack = True


class RandomRouterHistory(DispatcherHistory):
    """The same with the router that holds its head for a full server."""

    def router(self):
        return RandomRouter((1, 2, 8))


def test_a_head_held_for_a_full_server_goes_on_when_word_of_cancelled_tasks_was_lost():
    history = RandomRouterHistory()
    history.request_arrives(gap=0.0, items=2, deadline=None, priority=0, fixed=False)
    for server in "bca":
        history.server_leaves(gap=0.0, server=server)
    for items, deadline in ((3, None), (2, 0.04), (3, 0.04), (3, 0.04)):
        history.request_arrives(gap=0.0, items=items, deadline=deadline, priority=0, fixed=False)
    history.request_arrives(gap=0.05, items=3, deadline=None, priority=0, fixed=False)
    history.teardown()
    assert history.now > 2 * DispatchLimits().loss_grace, "cancelled at one server, which never said so"


MACHINES = [
    (ServerHistory, HISTORIES),
    (WindowHistory, HISTORIES),
    (AutomaticWindowHistory, HISTORIES // 2),
    (RestingHistory, HISTORIES // 2),
    (DispatcherHistory, HISTORIES),
    (EscalationHistory, HISTORIES),
    (OrderHistory, HISTORIES // 2),
    (SlackHistory, HISTORIES // 2),
    (RandomRouterHistory, HISTORIES // 4),
]


def _run(machine, histories, derandomize):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("machine", "histories"), MACHINES)
def test_random_histories(machine, histories):
    """The same histories every time, so that a change is judged by itself; others are in `make accept`."""
    _run(machine, histories, derandomize=True)


@pytest.mark.accept
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("machine", "histories"), MACHINES)
def test_histories_never_seen(machine, histories):
    _run(machine, 10 * histories, derandomize=False)
