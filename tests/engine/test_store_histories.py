"""The dispatcher with both hosts' stores through random histories: every item is computed from its own tensors and
answered with its own, and leaves nothing behind.

A row is its item and the width at which each segment ran, 0 where none has: one of another item, attempt or pass shows.
"""

from collections import namedtuple
from functools import partial
from random import Random

import msgspec
import pytest
import torch

from slim_scheduler.core import messages as m
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.activations import Activations, gather
from slim_scheduler.engine.cluster.activation_store import ServerActivations
from slim_scheduler.engine.cluster.item_store import ClusterItemStore
from tests.core.networks import SEGMENTS, SHAPE, WIDTHS, dispatcher, jsq, report, request
from tests.core.test_histories import ChangingEscalation

SEEDS, SEEDS_TO_ACCEPT = range(30), range(30, 1000)
STEPS = 250
LONGEST_END = 300.0  # far beyond what is left, at a credit of 1 too and where each lost block takes its credit along

RunningBatch = namedtuple("RunningBatch", "block tasks one_process cluster")  # with each store's tasks and their rows
ServerStep = namedtuple("ServerStep", "weight possible take")


def row_of(item, widths):
    return [item, *widths, *[0.0] * (SEGMENTS - len(widths))]


def run(rows, segment, width):
    output = rows.clone()
    output[:, 1 + segment] = width
    return output


class Server:
    """Its sessions, one after the other: blocks on their way, queued and running, and the tensors that lie here.
    `late` is what the dispatcher has yet to hear of it, or hears twice."""

    def __init__(self, name):
        self.name, self.incarnation, self.late = name, 0, []
        self.end()
        self.up = True

    def end(self, removed=False):
        self.up, self.removed = False, removed
        self.activations = ServerActivations(SEGMENTS - 1)
        self.arriving, self.queued, self.running = [], [], []

    @property
    def blocks(self):
        arriving, running = [block for block, _, _ in self.arriving], [batch.block for batch in self.running]
        return {block.block_id for block in [*arriving, *self.queued, *running]}

    def take_from_queue(self, wanted):
        taken = tuple(task for block in self.queued for task in block.tasks if task.task_id in wanted)
        rest = [(block, tuple(task for task in block.tasks if task not in taken)) for block in self.queued]
        self.queued = [msgspec.structs.replace(block, tasks=tasks) for block, tasks in rest if tasks]
        return taken

    def returned(self, tasks, reason, **more):
        return m.TasksReturned(self.name, self.incarnation, tuple(task.task_id for task in tasks), reason, **more)


class History:
    """Three servers that answer, lose, double, delay, return, die and leave as they like, and what both hosts keep."""

    def __init__(self, seed):
        rng = self.rng = Random(seed)
        self.now, self.requests, self.open = 0.0, 0, {}  # the items of each request that has no reply
        self.credit = rng.choice([1, 4, 32, 32])
        self.servers = {name: Server(name) for name in "abc"}
        self.dispatcher = dispatcher(
            jsq(rng.choice(["random", "0.5"])), tuple("abc"), self.credit, escalation=ChangingEscalation(),
            max_activation_bytes=rng.choice([1, 1500, 1 << 30]), max_waiting_items=rng.choice([4, 60, 60]),
            home_matters=rng.random() < 0.5, reentry_back=rng.random() < 0.5, retry_budget=rng.choice([0.2, 5.0]),
        )  # fmt: skip
        self.one_process, self.cluster = Activations(), ClusterItemStore()

    def tell(self, event):
        commands = self.dispatcher.handle(event, self.now)
        for command in commands:
            match command:
                case m.SendBlock(block):
                    self._send(block)
                case m.Reply():
                    self._reply(command)
                case m.CancelTasks(name, tasks):
                    server = self.servers[name]
                    if self.rng.random() < 0.8 and (taken := server.take_from_queue(tasks)):
                        server.late.append(partial(self.tell, server.returned(taken, "cancelled")))
        self.dispatcher.check_invariants()
        self._check_activation_bytes()
        if m.RouteSoon() in commands:
            self.tell(m.RouteNow())

    def _check_activation_bytes(self):
        """An item counts for the output that it goes on with, and for those that its second pass may."""
        for flight in self.dispatcher._ledger.items.values():
            needed = {flight.task.segment, *flight.kept} - {0}
            size = sum(SHAPE.activation(segment - 1, flight.widths[segment - 1]) for segment in needed)
            assert flight.held >= size, f"item {flight.item} counts {flight.held} bytes for outputs of {size}"

    def _send(self, block):
        self.one_process.sent(block.tasks)
        self.cluster.sent(block.tasks)
        for task in block.tasks:
            if task.again or task.segment == 0:
                assert not self.one_process._items[task.item].kept, f"outputs that {task} will not read stay"
                assert self.cluster._locations[task.item].outputs.keys() <= {task.segment - 1}, f"{task}: as above"
        self.servers[block.server].arriving.append((block, *self.cluster.sources_of(block)))

    def _reply(self, reply):
        assert reply.request_id in self.open, f"a second reply to request {reply.request_id}"
        items = self.open.pop(reply.request_id)
        assert tuple(end.item for end in reply.items) == items
        for store in (self.one_process, self.cluster):
            if reply.outcome is Outcome.ANSWERED:
                rows = store.results(reply.items).tolist()
                assert rows == [[end.item, *end.widths] for end in reply.items], type(store).__name__
            store.forget(items)

    def request_arrives(self):
        rng = self.rng
        self.requests += 1
        deadline = self.now + within if (within := rng.choice([None, None, None, None, 0.3, 1.5])) else None
        asked = {"widths": (0.5,) * SEGMENTS} if rng.random() < 0.1 else {}
        size, anytime = rng.choice([1, 2, 4, 24]), rng.random() < 0.8
        event = request(self.requests, size, self.now, deadline, rng.choice([0, 0, 1]), anytime=anytime, **asked)
        items = self.open[self.requests] = event.request.items
        for store in (self.one_process, self.cluster):
            store.add(items, torch.tensor([row_of(item, ()) for item in items]))
        self.tell(event)

    def block_arrives(self, server):
        block, sources, inputs = server.arriving.pop(0)
        if self.rng.random() < 0.02:
            return
        lost = []
        for task, source in zip(block.tasks, sources, strict=True):
            row = inputs[source] if block.segment == 0 else self.servers[task.home].activations.output(source)
            if row is None:
                lost.append(task.task_id)
            else:
                server.activations.put_input(task, row)
        server.queued.append(block)
        if lost:
            self.tell(server.returned(server.take_from_queue(lost), "its activation is lost", activation_lost=True))

    def batch_starts(self, server):
        block = self.rng.choice(server.queued)
        size = self.rng.choice([len(block.tasks), len(block.tasks), self.rng.randint(1, len(block.tasks))])
        tasks = server.take_from_queue([task.task_id for task in block.tasks[:size]])
        inputs = [self._inputs(store, tasks) for store in (self.one_process, server.activations)]
        server.running.append(RunningBatch(block, tasks, *inputs))

    def _inputs(self, store, tasks):
        """Every attempt that was not given up finds its own."""
        found, rows = store.inputs(tasks)
        row_of_task = dict(zip(found, rows, strict=True))
        for task in filter(self._is_live, tasks):
            assert task in row_of_task, f"{type(store).__name__} lacks the input of {task}"
            batch, at = row_of_task[task]
            assert batch[at].tolist() == row_of(task.item, self.dispatcher._ledger.items[task.item].widths), task
        return found, gather(rows) if rows else torch.empty(0, 1 + SEGMENTS)

    def _is_live(self, task):
        flight = self.dispatcher._ledger.items.get(task.item)
        return flight is not None and flight.task is task

    def batch_ends(self, server):
        """It fails, or its report is heard: at once, late, or both."""
        batch = server.running.pop(self.rng.randrange(len(server.running)))
        if self.rng.random() < 0.08:
            return self.tell(server.returned(batch.tasks, "out of memory"))
        segment, ids = batch.block.segment, tuple(task.task_id for task in batch.tasks)
        width = batch.block.width if batch.block.exact or self.rng.random() < 0.8 else WIDTHS[-1]
        tasks, rows = batch.cluster
        server.activations.store(tasks, run(rows, segment, width))
        while server.activations.answers:
            self.cluster.answered(*server.activations.answers.pop())
        margins = tuple(self.rng.random() for _ in ids) if segment == SEGMENTS - 1 else ()
        done = m.BatchReported(server.name, server.incarnation, 1, segment, width, ids, 0.0, 0.001, margins=margins)
        hear, delay = partial(self._hear, done, *batch.one_process), self.rng.random()
        if delay < 0.1:
            server.late.append(hear)
        if delay > 0.05:
            hear()

    def _hear(self, done, tasks, rows):
        """One process gives up no attempt that still runs, so it stores nothing of those that were."""
        live = [at for at, task in enumerate(tasks) if self._is_live(task)]
        self.one_process.store([tasks[at] for at in live], run(rows, done.segment, done.width)[live])
        self.cluster.done(done.server, done.tasks)
        self.tell(done)

    def server_reports(self, server):
        self.tell(report(server.name, self.now, server.incarnation, tuple(server.blocks)))

    def server_forgets(self, server):
        """What stays moves to smaller tensors, and is still its item's."""
        activations = server.activations
        activations.forget(*msgspec.structs.astuple(self.cluster.take_forgotten(server.name)))
        rows = [(item, activations.output(task)) for item, tasks in activations._tasks.items() for task in tasks]
        rows += [(item, row) for (item, _), row in self.one_process._kept._rows.items()]
        assert all(row is None or row[0][row[1], 0] == item for item, row in rows), "an output is another item's"

    def server_leaves(self, server):
        server.end(removed=self.rng.random() < 0.3)
        self.tell(m.ServerLeft(server.name, "left", removed=server.removed))

    def server_returns(self, server):
        server.up, server.incarnation = True, server.incarnation + 1
        if server.removed:
            self.tell(m.ServerJoined(server.name, self.credit, server.incarnation))
        self.server_reports(server)

    def step(self):
        self.now += self.rng.choice([0.0, 0.0, 0.001, 0.01, 0.03])
        self.tell(m.TimerFired())
        chance = self.rng.random()
        if chance < 0.12:
            self.request_arrives()
        elif chance < 0.13 and self.open:
            self.tell(m.RequestCancelled(self.rng.choice(list(self.open)), stopping=self.rng.random() < 0.4))
        else:
            _, possible, take = self.rng.choices(SERVER_STEPS, [step.weight for step in SERVER_STEPS])[0]
            if servers := [server for server in self.servers.values() if possible(server)]:
                take(self, self.rng.choice(servers))

    def end(self):
        """Servers that do their part, until nobody waits and no server has anything to do."""
        latest, servers = self.now + LONGEST_END, self.servers.values()
        while self.open or any(server.blocks for server in servers):
            assert self.now < latest, f"requests {sorted(self.open)} never got a reply"
            self.now += 0.1
            self.tell(m.TimerFired())
            for server in servers:
                (self.server_reports if server.up else self.server_returns)(server)
                for _, possible, take in WORK:
                    if possible(server):
                        take(self, server)
        assert len(self.one_process) == len(self.one_process._kept) == 0
        assert len(self.cluster) == len(self.cluster._locations) == len(self.cluster._attempts) == 0
        assert self.dispatcher._fifo._activation_bytes == 0
        for server in servers:
            self.server_forgets(server)
            assert len(server.activations) == 0, f"tensors stay at server {server.name}"


WORK = (
    ServerStep(25, lambda server: server.arriving, History.block_arrives),
    ServerStep(25, lambda server: server.queued, History.batch_starts),
    ServerStep(25, lambda server: server.running, History.batch_ends),
    ServerStep(5, lambda server: server.late, lambda _, server: server.late.pop(0)()),
)
SERVER_STEPS = (
    *WORK,
    ServerStep(8, lambda server: server.up, History.server_reports),
    ServerStep(20, lambda server: server.up, History.server_forgets),
    ServerStep(1, lambda server: server.up, History.server_leaves),
    ServerStep(2, lambda server: not server.up, History.server_returns),
)


@pytest.mark.parametrize("seed", [*SEEDS, *[pytest.param(seed, marks=pytest.mark.accept) for seed in SEEDS_TO_ACCEPT]])
def test_every_item_is_computed_and_answered_from_its_own_tensors(seed):
    history = History(seed)
    try:
        for _ in range(STEPS):
            history.step()
        history.end()
    except Exception as error:
        error.add_note(f"seed {seed}, at {history.now:.3f} s")
        raise
