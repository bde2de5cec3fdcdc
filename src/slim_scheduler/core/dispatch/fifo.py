"""The global queue: every task that waits for a routing decision, and the activation bytes that waiting work holds.

Owns the order, the keys and the bound on activations (segment 0 is held back while they are at their limit, a
continuing task never is). What is decided about the head is the dispatcher's.
"""

from collections.abc import Callable, Sequence

from slim_scheduler.core.dispatch.items import ItemFlight
from slim_scheduler.core.dispatch.order import Order
from slim_scheduler.core.queues import KeyedQueue
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, ItemId, Seconds, ServerName, Task, TaskConstraints, Width, WidthTuple

# segment, previous width, home (where moving an activation costs), constraints with the widths they met so far
Bounds = tuple[TaskConstraints, WidthTuple] | None
Key = tuple[int, Width | None, ServerName | None, Bounds]


class GlobalFifo:
    """Waiting tasks by key, first come first served unless there is an `order`. `items` is the ledger's map of items in
    flight. `may_resume`: whether a second pass may go on after these widths, where the request asks for none; without
    it none does."""

    def __init__(
        self,
        shape: ModelShape,
        items: dict[ItemId, ItemFlight],
        max_activation_bytes: Bytes,
        home_matters: bool,
        priority_aging: Seconds,
        reentry_back: bool,
        order: Order | None = None,
        may_resume: Callable[[WidthTuple], bool] | None = None,
    ) -> None:
        self._items = items
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self.per_segment = [0] * shape.segments
        self._activation = [dict(zip(shape.widths, row, strict=True)) for row in shape.activation_bytes]
        self._reserve = max(shape.activation_bytes[0])
        self._activation_bytes = 0
        self._max_activation_bytes = max_activation_bytes
        self._home_matters = home_matters
        self._priority_aging = priority_aging
        self._reentry_back = reentry_back
        self._order = order
        self._may_resume = may_resume
        self._last_task = 0

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, flight: ItemFlight, segment: int, entered: Seconds) -> None:
        """Makes the item's next task and lets it wait: at the back, or at its item's place."""
        task, rank = self._next_task(flight, segment, entered)
        self._queue.push(self._key(flight, task), rank, task)
        self.per_segment[segment] += 1

    def go_on(self, flights: Sequence[ItemFlight], done: int, width: Width, now: Seconds) -> None:
        """Items whose segment `done` ran together at `width` leave its output behind and wait for the next segment.

        It is `enter` for each; those alike are queued at once. Outputs that a second pass may go on from are kept.
        """
        self._hold_all(flights, self._activation[done][width])
        if self._may_resume is not None:
            for flight in flights:
                asks = flight.constraints is not None or flight.request.request.confidence_floor is not None
                if not asks and self._may_resume(flight.widths):
                    flight.kept = {**flight.kept, done + 1: flight.servers[-1]}
        key: Key = (done + 1, width, flights[0].home if self._home_matters else None, None)
        tasks: list[Task] = []
        ranks: list[Seconds] = []
        for flight in flights:
            if flight.constraints is None:
                task, rank = self._next_task(flight, done + 1, now)
                tasks.append(task)
                ranks.append(rank)
            else:
                self._wait_together(key, ranks, tasks)
                tasks, ranks = [], []
                self.enter(flight, done + 1, now)
        self._wait_together(key, ranks, tasks)

    def _wait_together(self, key: Key, ranks: list[Seconds], tasks: list[Task]) -> None:
        if tasks:
            self._queue.push_all(key, ranks, tasks)
            self.per_segment[key[0]] += len(tasks)

    def _next_task(self, flight: ItemFlight, segment: int, entered: Seconds) -> tuple[Task, Seconds]:
        """The task, and its rank among those that wait."""
        request, widths = flight.request.request, flight.widths
        self._last_task = number = self._last_task + 1
        arrival = None if self._reentry_back else request.arrival
        if self._order is not None:
            arrival = self._order.counts_from(flight, segment, entered if arrival is None else arrival)
        priority = request.priority
        task = flight.task = Task(
            number,
            flight.item,
            segment,
            widths[-1] if widths else None,
            flight.home,
            entered,
            request.deadline,
            priority,
            arrival,
            flight.first is not None,
            segment in flight.kept,
        )
        return task, (entered if arrival is None else arrival) + self._priority_aging * priority

    def withdraw(self, flight: ItemFlight) -> None:
        """Takes out an item's waiting task."""
        task = flight.task
        assert task is not None
        self._queue.remove(self._key(flight, task), task.task_id)
        self.per_segment[task.segment] -= 1

    def head(self) -> Key | None:
        """The oldest task's key, or None; continuing tasks only while activations are at their limit."""
        full = self._activation_bytes >= self._max_activation_bytes
        return self._queue.head(_is_first_segment if full else None)

    def oldest(self, key: Key) -> Task:
        return self._queue.oldest(key)

    def count(self, key: Key) -> int:
        return self._queue.count(key)

    def take(self, key: Key, limit: int) -> tuple[Task, ...]:
        """Removes the first tasks of a key, which are then on their way."""
        tasks = tuple([entry[2] for entry in self._queue.take(key, limit)])
        self.per_segment[key[0]] -= len(tasks)
        if key[0] == 0:  # room for what it will leave behind, at the widest it may run
            self._hold_all([self._items[task.item] for task in tasks], self._reserve)
        return tasks

    def resume(self, flight: ItemFlight, segment: int, now: Seconds) -> None:
        """A second pass begins, with an activation of the first or, at segment 0, with the input."""
        self.let_go(flight)
        if segment:
            self._hold_all([flight], self._activation[segment - 1][flight.widths[-1]])
        self.enter(flight, segment, now)

    def let_go(self, flight: ItemFlight) -> None:
        """The item holds no activation any more."""
        self._activation_bytes -= flight.held
        flight.held = 0

    def items_waiting(self) -> set[ItemId]:
        return {entry[2].item for _, entry in self._queue.entries()}

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        for _, entry in self._queue.entries():
            assert self._items[entry[2].item].task is entry[2], "a task without its item"
        for flight in self._items.values():
            assert all(flight.servers[s - 1] == home for s, home in flight.kept.items()), "kept where it was not made"
            assert flight.first is None or not flight.kept, "kept for a third pass"
        assert sum(self.per_segment) == len(self._queue), "waiting per segment"
        assert self._activation_bytes == sum(f.held for f in self._items.values()) >= 0, "activation bytes"

    def _key(self, flight: ItemFlight, task: Task) -> Key:
        constraints = flight.constraints
        return (
            task.segment,
            task.previous_width,
            task.home if self._home_matters else None,
            None if constraints is None else (constraints, flight.widths),
        )

    def _hold_all(self, flights: Sequence[ItemFlight], each: Bytes) -> None:
        """Each holds so many bytes, and what is kept of it."""
        more = 0
        for flight in flights:
            held = each if not flight.kept else each + self._kept(flight)
            more += held - flight.held
            flight.held = held
        self._activation_bytes += more

    def _kept(self, flight: ItemFlight) -> Bytes:
        return sum(self._activation[segment - 1][flight.widths[segment - 1]] for segment in flight.kept)


def _is_first_segment(key: Key) -> bool:
    return key[0] == 0
