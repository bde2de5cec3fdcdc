"""The cost model: what is predicted of times, from profiles, links and what is known of queues. All routers ask here.

First what a task costs at best: device time, bytes on the links, what a server carries. Then `ServerCost`: when a block
that is sent now would be back.
"""

import math
from collections.abc import Container
from typing import NamedTuple

from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, ServerName, Width, WidthTuple
from slim_scheduler.core.view import Head, ServerReport, ServerView, View

MOST_AWAY = 128  # batches that are on their way to a server beside those that run, whatever the link


def moved_bytes(facts: RouterFacts, head: Head, server: ServerName) -> Bytes:
    """What one of the head's tasks takes to a server: its input, or its activation where that must move."""
    if head.home is None:
        return facts.shape.input_bytes
    if facts.move_activations and head.home != server and head.previous_width is not None:
        return facts.shape.activation(head.segment - 1, head.previous_width)
    return 0


def seconds_per_item(
    server: ServerFacts, segment: int, previous_width: Width | None, width: Width, longest: Seconds = math.inf
) -> float:
    """Device time of an item at the batch size that is best per item, the device shared as well as it can be.

    Of batches that take up to `longest`; infinite where none does.
    """
    sizes = range(1, server.max_batch + 1)
    times = [(b, server.slowdown * server.latency.seconds(segment, previous_width, width, b)) for b in sizes]
    least = min((seconds / b for b, seconds in times if seconds <= longest), default=math.inf)
    sharing = server.profile.sharing[: server.concurrency]
    return least / max(sharing)


def tuple_seconds(server: ServerFacts, widths: WidthTuple) -> Seconds:
    """Device time of an item that runs a whole width tuple there."""
    before: tuple[Width | None, ...] = (None, *widths)
    return sum(seconds_per_item(server, segment, before[segment], width) for segment, width in enumerate(widths))


def items_per_second(server: ServerFacts, shape: ModelShape, width: Width) -> float:
    """What a server alone carries at a width throughout, in full batches."""
    seconds = [
        server.latency.seconds(segment, width if segment else None, width, server.max_batch)
        for segment in range(shape.segments)
    ]
    return server.max_batch / (server.slowdown * sum(seconds))


def tasks_to_stay_busy(server: ServerFacts, shape: ModelShape) -> int:
    """How many tasks on the way to a server, there and back, keep it busy while work waits, by Little's law.

    As many as it does at the narrowest width, or as its link brings inputs for where that is less, while a message goes
    both ways, its own inputs and another batch's before it on the link; beside the batches that run and one to follow.
    In full batches, since the rest of one would travel for itself. Where the link is slower than the device, more would
    carry a few per cent more (lab/2026-11-windows.md). A shared medium is taken for the server's own.
    """
    full, transfer = server.max_batch, shape.input_bytes / server.bytes_per_s
    away = 2 * (server.link_latency + full * transfer)
    seconds = max(transfer, tuple_seconds(server, (shape.widths[0],) * shape.segments))
    return full * (server.concurrency + 1 + math.ceil(min(MOST_AWAY, shape.segments * away / seconds / full)))


def cluster_capacity(facts: RouterFacts) -> float:
    """Items per second of all servers at the middle width: the unit of a policy's rates."""
    width = facts.shape.widths[len(facts.shape.widths) // 2]
    return sum(items_per_second(server, facts.shape, width) for server in facts.servers.values())


def full_batch_time(facts: RouterFacts) -> Seconds:
    """Mean over servers, segments and widths of the time of a full batch: the unit of a policy's times."""
    shape = facts.shape
    times = [
        server.slowdown * server.latency.seconds(segment, shape.widths[0] if segment else None, width, server.max_batch)
        for server in facts.servers.values()
        for segment in range(shape.segments)
        for width in shape.widths
    ]
    return sum(times) / len(times)


def batch_seconds(facts: RouterFacts) -> list[dict[Width, Seconds]]:
    """Time of a full batch by segment and width: the mean over servers and previous widths."""
    widths = facts.shape.widths

    def mean(segment: int, width: Width) -> Seconds:
        times = [
            server.slowdown * server.latency.seconds(segment, previous, width, server.max_batch)
            for server in facts.servers.values()
            for previous in (widths if segment else (None,))
        ]
        return sum(times) / len(times)

    return [{width: mean(segment, width) for width in widths} for segment in range(facts.shape.segments)]


def remaining_time(
    facts: RouterFacts, server: ServerFacts, segment: int, previous: Width | None, widths: WidthTuple, count: int
) -> Seconds:
    """Time of a block of `count` tasks through the segments from `segment` on at `widths`, all on one free server."""
    shape = facts.shape
    seconds = 0.0
    for i, width in enumerate(widths):
        run = server.latency.seconds(segment + i, previous, width, count)
        seconds += server.slowdown * run + 2 * server.link_latency
        previous = width
    return seconds + (count * shape.input_bytes / server.bytes_per_s if segment == 0 else 0.0)


class BlockPrediction(NamedTuple):
    """Of a block on one server, in seconds: queued work before it, its link time, and by width how long it runs and
    when it is back, counted from now."""

    backlog: Seconds
    transfer: Seconds
    run: tuple[Seconds, ...]
    done: list[Seconds]


class ServerCost:
    """What is predicted of one server. It is of one run: what follows from a report is kept until the next report."""

    def __init__(self, server: ServerFacts, facts: RouterFacts) -> None:
        shape = facts.shape
        batch = server.max_batch
        self.server = server
        self._facts = facts
        self._widths = shape.widths
        self._runs: dict[tuple[int, Width | None], list[tuple[Seconds, ...]]] = {}  # [count][width]
        # An item's share of a full batch, averaged over previous widths: what queued work is worth.
        self._share: dict[tuple[int, Width], Seconds] = {}
        self._load: list[list[Seconds]] = []  # [segment][width]
        for segment in range(shape.segments):
            previous = shape.widths if segment else (None,)
            for p in previous:
                self._runs[segment, p] = [
                    tuple(server.slowdown * server.latency.seconds(segment, p, width, n) for width in shape.widths)
                    for n in range(batch + 1)
                ]
            for i, width in enumerate(shape.widths):
                whole = sum(self._runs[segment, p][batch][i] for p in previous)
                self._share[segment, width] = whole / (len(previous) * batch)
            self._load.append(
                [server.profile.load_time(shape.instance_bytes(segment, width, batch)) for width in shape.widths]
            )
        self._moved: dict[tuple[int, Width | None, ServerName | None], Bytes] = {}
        self._report: ServerReport | None = None
        self._loads: list[list[Seconds] | None] = [None] * shape.segments

    def predict(self, server: ServerView, head: Head, count: int) -> BlockPrediction:
        """Of a block of so many of the head's tasks, at every width of the network."""
        backlog, transfer = self.backlog(server), self.transfer(head, count)
        ahead = backlog + transfer
        run = self._runs[head.segment, head.previous_width][count]
        if server.pace != 1.0:
            run = tuple([server.pace * seconds for seconds in run])
        loads = self.loads(server.report, head.segment)
        return BlockPrediction(backlog, transfer, run, [ahead + r + load for r, load in zip(run, loads, strict=True)])

    def completion(self, server: ServerView, head: Head, width: Width) -> Seconds:
        """Seconds until a block of all waiting tasks, as many as fit, would be back."""
        count = server.takes(min(head.waiting, self.server.max_batch))
        return self.predict(server, head, count).done[self._widths.index(width)]

    def backlog(self, server: ServerView) -> Seconds:
        """Seconds of work sent and not yet done."""
        pending = server.pending
        return server.pace * sum([count * self._share[kind] for kind, count in pending.items()]) if pending else 0.0

    def transfer(self, head: Head, count: int) -> Seconds:
        """Link time of a block of so many of the head's tasks and of its results, on a link that is free."""
        key = (head.segment, head.previous_width, head.home)
        moved = self._moved.get(key)
        if moved is None:
            moved = self._moved[key] = moved_bytes(self._facts, head, self.server.name)
        return 2 * self.server.link_latency + count * moved / self.server.bytes_per_s

    def runs(self, segment: int, previous: Width | None) -> list[tuple[Seconds, ...]]:
        """Device time of a block by the profile: [count][width]."""
        return self._runs[segment, previous]

    def loads(self, report: ServerReport | None, segment: int) -> list[Seconds]:
        """By width, what loading an instance takes: zero where one that fits is known to be there or on its way."""
        if report is not self._report:
            self._report = report
            self._loads = [None] * len(self._loads)
        loads = self._loads[segment]
        if loads is None:
            there = [i.width for i in report.instances if i.segment == segment and i.count] if report else []
            widest = max(there, default=0.0)
            load = zip(self._widths, self._load[segment], strict=True)
            loads = self._loads[segment] = [0.0 if width <= widest else seconds for width, seconds in load]
        return loads


def server_costs(facts: RouterFacts) -> dict[ServerName, ServerCost]:
    return {name: ServerCost(server, facts) for name, server in facts.servers.items()}


def choices_of(names: Container[ServerName], view: View) -> list[ServerView]:
    """Servers that may be chosen and whose profile is known; one that joined after the run began has none."""
    return [server for name, server in view.choices.items() if name in names]


def least_outstanding(view: View) -> ServerName:
    """Who has the fewest tasks of those that may be chosen: where no profile says more of any."""
    return min((server.outstanding, name) for name, server in view.choices.items())[1]
