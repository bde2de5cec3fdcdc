"""A FIFO split by key: the oldest entry names the key, and the first entries of one key are taken together.

Both machines queue with it; their keys are `core/dispatch/fifo.py`'s and `core/server/window.py`'s. An entry's order is
(rank, sequence): rank is its time of entry, later for lower priorities, so that they age and never starve; the sequence
breaks ties in the order of entry.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import repeat
from typing import Generic, TypeVar

from slim_scheduler.core.types import Seconds, Task, TaskId

K = TypeVar("K", bound=Hashable)
PRIORITY_AGING: Seconds = 1.0  # so much later a task one level lower counts as having come
STALE_HEADS = 64  # that may stay: sweeping costs a look at every lane
# (rank, sequence, task, tag): the tag is the owner's, such as the block a task came with
Entry = tuple[Seconds, int, Task, int]


class _Lane:
    """One key's entries: those that came in order, and a heap of those that did not (another priority, a retry).

    `announced` is the sequence of the entry under which the lane stands in the queue's heap of heads.
    """

    __slots__ = ("announced", "count", "early", "in_order")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.in_order: deque[Entry] = deque(entries)
        self.early: list[Entry] = []
        self.count = len(entries)
        self.announced = entries[0][1]

    def first(self) -> Entry:
        early, in_order = self.early, self.in_order
        if not early or (in_order and in_order[0] < early[0]):
            return in_order[0]
        return early[0]

    def pop(self) -> Entry:
        early, in_order = self.early, self.in_order
        if not early or (in_order and in_order[0] < early[0]):
            return in_order.popleft()
        return heappop(early)

    def insert(self, entry: Entry) -> bool:
        """Whether it is the first now."""
        in_order = self.in_order
        self.count += 1
        if not in_order:
            in_order.append(entry)
        elif entry > in_order[-1]:
            in_order.append(entry)
            return False
        elif entry < in_order[0]:
            in_order.appendleft(entry)
        else:
            heappush(self.early, entry)
        return self.first() is entry


class KeyedQueue(Generic[K]):
    """Entries by key. Each key's head is announced in one heap, out of date entries of which are dropped when they
    surface; so is a removed task when it becomes its key's head."""

    def __init__(self) -> None:
        self._lanes: dict[K, _Lane] = {}
        self._heads: list[tuple[Seconds, int, K]] = []
        self._removed: set[TaskId] = set()
        self._sequence = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, key: K, rank: Seconds, task: Task, tag: int = 0) -> None:
        self._sequence = sequence = self._sequence + 1
        self._insert(key, (rank, sequence, task, tag))

    def push_all(self, key: K, ranks: list[Seconds], tasks: Sequence[Task], tag: int = 0) -> None:
        """`push` for tasks that come together, one at least, each with its rank."""
        first = self._sequence + 1
        self._sequence += len(tasks)
        entries = list(zip(ranks, range(first, first + len(tasks)), tasks, repeat(tag), strict=False))
        lane = self._lanes.get(key)
        in_order = ranks == sorted(ranks)
        if lane is None and in_order:
            self._open(key, entries)
        elif lane is not None and in_order and lane.in_order and entries[0] > lane.in_order[-1]:
            lane.in_order.extend(entries)
            lane.count += len(entries)
            self._length += len(entries)
        else:
            for entry in entries:
                self._insert(key, entry)

    def put_back(self, key: K, entries: Sequence[Entry]) -> None:
        """Returns taken entries, in order, to the place they had."""
        lane = self._lanes.get(key)
        if lane is None:
            if entries:
                self._open(key, entries)
            return
        for entry in reversed(entries):
            lane.insert(entry)
        self._length += len(entries)
        first = self._first(lane)
        if lane.announced != first[1]:
            self._announce(key, lane, first)

    def take(self, key: K, limit: int) -> list[Entry]:
        """Removes and returns the first up to `limit` entries of a key, in order."""
        lane, removed = self._lanes[key], self._removed
        if not removed and not lane.early:
            in_order = lane.in_order
            taken = [in_order.popleft() for _ in range(min(limit, len(in_order)))]
        else:
            taken = []
            while len(taken) < limit and len(taken) < lane.count:
                entry = lane.pop()
                if entry[2].task_id in removed:
                    removed.discard(entry[2].task_id)
                else:
                    taken.append(entry)
        self._forget(key, lane, len(taken))
        return taken

    def remove(self, key: K, task_id: TaskId) -> None:
        """Drops a waiting task. The caller knows that it waits under this key."""
        self._removed.add(task_id)
        self._forget(key, self._lanes[key], 1)

    def head(self, skip: Callable[[K], bool] | None = None) -> K | None:
        """The key of the oldest entry, passing over keys for which `skip` holds."""
        if skip is not None:
            return self._head_but(skip)
        heads, lanes = self._heads, self._lanes
        while heads:
            _, sequence, key = heads[0]
            lane = lanes.get(key)
            if lane is not None and lane.announced == sequence:
                first = self._first(lane)
                if first[1] == sequence:
                    return key
                heappop(heads)
                self._announce(key, lane, first)
            else:
                heappop(heads)
        return None

    def oldest(self, key: K) -> Task:
        return self._first(self._lanes[key])[2]

    def count(self, key: K) -> int:
        lane = self._lanes.get(key)
        return 0 if lane is None else lane.count

    def lanes(self) -> Iterator[tuple[K, int, Entry]]:
        """Each key with how many of it wait, and the first of them."""
        for key, lane in self._lanes.items():
            yield key, lane.count, self._first(lane)

    def of(self, key: K) -> list[Entry]:
        """A key's waiting entries, in no particular order."""
        lane, removed = self._lanes.get(key), self._removed
        if lane is None:
            return []
        return [entry for entry in (*lane.in_order, *lane.early) if entry[2].task_id not in removed]

    def counts(self) -> dict[K, int]:
        """How many wait, by key."""
        return {key: lane.count for key, lane in self._lanes.items()}

    def entries(self) -> Iterator[tuple[K, Entry]]:
        """All waiting entries, in no particular order."""
        for key, lane in self._lanes.items():
            for entry in (*lane.in_order, *lane.early):
                if entry[2].task_id not in self._removed:
                    yield key, entry

    def check_invariants(self) -> None:
        live = list(self.entries())
        assert len(live) == self._length == sum(self.counts().values()), "lengths disagree"
        assert len({entry[2].task_id for _, entry in live}) == len(live), "a task waits twice"
        for lane in self._lanes.values():
            places = [entry[:2] for entry in lane.in_order]
            assert places == sorted(places), "a lane out of order"
        if live:
            assert self.head() == min(live, key=lambda found: found[1][:2])[0], "the head is not the oldest"

    def _insert(self, key: K, entry: Entry) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            self._open(key, (entry,))
            return
        self._length += 1
        if lane.insert(entry) and lane.announced != entry[1]:
            self._announce(key, lane, entry)

    def _open(self, key: K, entries: Sequence[Entry]) -> None:
        """A key's first entries, in order."""
        self._lanes[key] = _Lane(entries)
        self._length += len(entries)
        heappush(self._heads, (entries[0][0], entries[0][1], key))

    def _head_but(self, skip: Callable[[K], bool]) -> K | None:
        best: Entry | None = None
        found: K | None = None
        for key, lane in self._lanes.items():
            first = None if skip(key) else self._first(lane)
            if first is not None and (best is None or first < best):
                best, found = first, key
        return found

    def _announce(self, key: K, lane: _Lane, entry: Entry) -> None:
        lane.announced = entry[1]
        heappush(self._heads, (entry[0], entry[1], key))

    def _first(self, lane: _Lane) -> Entry:
        removed = self._removed
        if not removed and not lane.early:
            return lane.in_order[0]
        entry = lane.first()
        while removed and entry[2].task_id in removed:
            removed.discard(lane.pop()[2].task_id)
            entry = lane.first()
        return entry

    def _forget(self, key: K, lane: _Lane, gone: int) -> None:
        self._length -= gone
        lane.count -= gone
        if not lane.count:
            for entry in (*lane.in_order, *lane.early):
                self._removed.discard(entry[2].task_id)
            del self._lanes[key]
            if len(self._heads) > 2 * len(self._lanes) + STALE_HEADS:
                self._announce_again()

    def _announce_again(self) -> None:
        """Drops what is stale of the heads: who goes by `lanes` alone never comes across it."""
        firsts = [(key, lane, self._first(lane)) for key, lane in self._lanes.items()]
        self._heads.clear()
        for key, lane, first in firsts:
            self._announce(key, lane, first)
