"""Which waiting task is next where it is not the first that came: `shortest` and `least-slack`.

A task then counts as having come up to `bound` later than it did, in the global queue and in the servers' queues. So
it is never passed by one of its priority that came more than `bound` after it. `RemainingTime` is the ranker: what it
expects an item still to take.
"""

from collections.abc import Mapping, Sequence

from slim_scheduler.core.dispatch.items import ItemFlight
from slim_scheduler.core.types import Seconds, Width, WidthTuple

REMEMBERED = 1000  # tasks over which what first passes come to is averaged


class RemainingTime:
    """Expected computing time to an item's answer, each segment in a full batch; waiting and links are left out.

    Of a pass at fixed widths, such as every second one, it is the profile's. A first pass is expected to run at the
    widths at which first passes ran lately, and to be followed by what second passes they came to. `batch`: time of a
    full batch, by segment and width.
    """

    def __init__(self, batch: Sequence[Mapping[Width, Seconds]]) -> None:
        self._batch = batch
        self._first = [row[min(row)] for row in batch]  # by segment
        self._second: Seconds = 0.0

    def of(self, flight: ItemFlight, segment: int) -> Seconds:
        """Of an item that waits for a segment."""
        constraints = flight.constraints
        if constraints is not None and constraints.widths is not None:
            return self._fixed(constraints.widths, segment)
        return sum(self._first[segment:]) + self._second

    def ran(self, segment: int, width: Width, count: int) -> None:
        """So many first passes ran a segment at a width."""
        memory = min(1.0, count / REMEMBERED)
        self._first[segment] += memory * (self._batch[segment][width] - self._first[segment])

    def first_ended(self, second: WidthTuple | None, segment: int) -> None:
        """A first pass came to its end; `second`: the tuple of the second one that follows, and where it goes on."""
        follows = 0.0 if second is None else self._fixed(second, segment)
        self._second += (follows - self._second) / REMEMBERED

    def _fixed(self, widths: WidthTuple, segment: int) -> Seconds:
        return sum([self._batch[s][widths[s]] for s in range(segment, len(widths))])


class Order:
    """When a task counts as having come: later by what is left of its item, or by the slack that this leaves."""

    def __init__(self, remaining: RemainingTime, bound: Seconds, by_slack: bool) -> None:
        self.remaining = remaining
        self._bound = bound
        self._by_slack = by_slack

    def counts_from(self, flight: ItemFlight, segment: int, came: Seconds) -> Seconds:
        """In [came, came + bound]. Without a deadline the slack has no end."""
        left = self.remaining.of(flight, segment)
        at = came + left
        if self._by_slack:
            deadline = flight.request.request.deadline
            at = float("inf") if deadline is None else deadline - left
        return min(max(at, came), came + self._bound)
