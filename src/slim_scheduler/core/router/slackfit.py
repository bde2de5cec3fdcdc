"""SuperServe's rule: the time that is left picks the widths and the batch, from a table made beforehand.

The table has the time through the remaining segments for every batch size and every choice of widths. Larger batches
come first; among the widths that fit at that batch, the most accurate are taken. SuperServe's workers have no queue and
run the whole network at once; here the server is the one with the shortest backlog, which is taken off the slack, and
so is, for each segment that follows, the wait that the head has just had. Among the batch sizes are the configuration's
groups and always 1, so that widths are looked up however few wait.
"""

from bisect import bisect_right
from itertools import product

from numpy.random import Generator

from slim_scheduler.core.accuracy import AccuracyPrior, Expectation
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import choices_of, least_outstanding, remaining_time, server_costs
from slim_scheduler.core.router.heuristics import allowed
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width
from slim_scheduler.core.view import Head, View

# Ascending times, and the first width of the most accurate choice that takes no longer.
Front = tuple[tuple[Seconds, ...], tuple[Width, ...]]


class SlackFit:
    """`slo`: the time an item has where its request names no deadline. On its second pass the widths are given, and the
    time that is left is what the first has left."""

    chooses_full = False

    def __init__(self, facts: RouterFacts, accuracy: AccuracyPrior, slo: Seconds, name: str = "slackfit") -> None:
        self.name = name
        self._slo = slo
        self._segments = facts.shape.segments
        self._costs = server_costs(facts)
        self._groups = tuple(sorted({1, *facts.groups}, reverse=True))
        self._table = _table(facts, self._groups, Expectation(facts.shape, accuracy))

    def decide(self, view: View, rng: Generator) -> Decision:
        head = view.head
        choices = choices_of(self._costs, view)
        if not choices:
            return Decision(least_outstanding(view), head.widths[0], head.waiting)
        backlog, name = min([(self._costs[server.name].backlog(server), server.name) for server in choices])
        server = view.servers[name]
        left = (self._slo - head.item_age if head.slack is None else head.slack) - backlog
        left -= head.age * (self._segments - 1 - head.segment)
        left /= server.pace  # the table is by the profile
        most = server.takes(min(head.waiting, self._costs[server.name].server.max_batch))
        for group in self._groups:
            if group <= most:
                width = self._widest(server.name, head, group, left)
                if width is not None:
                    return Decision(server.name, width, group)
        return Decision(server.name, head.widths[0], most)  # too late for anything: what is soonest done

    def _widest(self, server: ServerName, head: Head, group: int, left: Seconds) -> Width | None:
        times, widths = self._table[server, head.segment, head.previous_width, group]
        fits = bisect_right(times, left)
        return allowed(widths[fits - 1], head.widths) if fits else None


def _table(
    facts: RouterFacts, groups: tuple[int, ...], expectation: Expectation
) -> dict[tuple[ServerName, int, Width | None, int], Front]:
    shape = facts.shape
    table = {}
    for name, server in facts.servers.items():
        for segment in range(shape.segments):
            for previous in shape.widths if segment else (None,):
                for group in {min(group, server.max_batch) for group in groups}:
                    choices = []
                    for widths in product(shape.widths, repeat=shape.segments - segment):
                        seconds = remaining_time(facts, server, segment, previous, widths, group)
                        choices.append((seconds, -expectation.top1(segment, previous, widths), widths[0]))
                    table[name, segment, previous, group] = _front(choices)
    return table


def _front(choices: list[tuple[Seconds, float, Width]]) -> Front:
    """The choices that no other is both faster and more accurate than."""
    front: list[tuple[Seconds, Width]] = []
    best = float("inf")
    for seconds, wrong, width in sorted(choices):
        if wrong < best:
            best = wrong
            front.append((seconds, width))
    return tuple(seconds for seconds, _ in front), tuple(width for _, width in front)
