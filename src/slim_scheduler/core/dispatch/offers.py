"""Requests that a front end has read and that wait there, a few being taken between two looks at its sockets.

Where requests are so small that taking them is the work, the front end's thread is never idle and they wait before the
dispatcher's own queue. How long an answer takes follows from how many are unanswered and how many were taken per second
while that thread was never idle, which falls with what refusals and other processes cost, as it should. `Admission`
owns this and asks it; it holds no request, only their numbers.
"""

from itertools import islice
from math import inf

from slim_scheduler.core.dispatch.capacity import Capacity
from slim_scheduler.core.types import Request, RequestId, Seconds

AT_ONCE = 32  # a full batch; more would keep answers and refusals waiting
IN_HAND = 2 * AT_ONCE  # taken and not answered, at least, while the thread is busy: one batch runs, one is prepared
BUSY = 0.7  # share of the time that the thread works: the rest is what other processes take of its core
PAUSE: Seconds = 0.005  # longer than brief batches take


class Offers:
    """What was offered: it waits, or was taken and is in hand until it is answered."""

    def __init__(self) -> None:
        self.paused = False
        self._waiting: dict[RequestId, Request] = {}  # in the order in which they were read
        self._taken: dict[RequestId, Request] = {}  # and not answered
        self._items_waiting = self._items_taken = 0
        self._soonest: Seconds = inf  # no deadline of those that wait is earlier
        self._busy = False
        self._capacity = Capacity(1)

    @property
    def items(self) -> int:
        """Of those that wait."""
        return self._items_waiting

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    @property
    def any(self) -> bool:
        """Whether anything that was offered has not ended."""
        return bool(self._taken or self._waiting)

    def add(self, request: Request) -> None:
        self._capacity.arrived(self._unanswered if self._busy else 0)
        self._waiting[request.request_id] = request
        self._items_waiting += len(request.items)
        if request.deadline is not None and request.deadline < self._soonest:
            self._soonest = request.deadline

    def expired(self, now: Seconds) -> list[Request]:
        """Takes out those that wait and whose deadline has passed."""
        if now < self._soonest:
            return []
        gone = [r for r in self._waiting.values() if r.deadline is not None and r.deadline <= now]
        for request in gone:
            del self._waiting[request.request_id]
            self._items_waiting -= len(request.items)
        self._soonest = min([r.deadline for r in self._waiting.values() if r.deadline is not None], default=inf)
        return gone

    def wait(self, now: Seconds) -> Seconds:
        """How long until who comes now would be answered, as far as it depends on the front end; 0 while that is not
        known and nobody waits."""
        first = now - next(iter(self._waiting.values())).arrival if self._waiting else 0.0
        return max(first, self._capacity.wait(self._unanswered) or 0.0)

    def turn(self, load: float, after_pause: bool, most: int, now: Seconds) -> list[Request]:
        """Those that come in now. `most` may be in hand while the front end is busy.

        Nobody, and `paused`, where there is no room for a full batch: one that ends meanwhile makes it. Where none does
        within the pause, the servers have more at a time, and as many come in as there is room for.
        """
        self._busy = load >= BUSY
        room = min(AT_ONCE, most - len(self._taken)) if self._busy else AT_ONCE
        self.paused = self.waits and (room <= 0 or (room < AT_ONCE and not after_pause))
        if self.paused:
            return []
        taken = list(islice(self._waiting.values(), room))
        items = 0
        for request in taken:
            del self._waiting[request.request_id]
            self._taken[request.request_id] = request
            items += len(request.items)
        self._items_waiting -= items
        self._items_taken += items
        self._capacity.worked(items, now)
        return taken

    def room_for_a_batch(self, most: int) -> bool:
        return most - len(self._taken) >= AT_ONCE

    def ended(self, request_id: RequestId) -> Request | None:
        """One was answered, or withdrawn; which, if it was here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._items_waiting -= len(waiting.items)
        taken = self._taken.pop(request_id, None)
        if taken is not None:
            self._items_taken -= len(taken.items)
        return waiting or taken

    @property
    def _unanswered(self) -> int:
        return self._items_waiting + self._items_taken

    def check_invariants(self) -> None:
        assert self._items_waiting == sum(len(request.items) for request in self._waiting.values()), "offers waiting"
        assert self._items_taken == sum(len(request.items) for request in self._taken.values()), "offers taken"
