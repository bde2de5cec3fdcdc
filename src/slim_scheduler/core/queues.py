"""A FIFO split by key: the oldest entry names the key, and the first entries of one key are taken together.

Both machines queue with it: the dispatcher keys by (segment, previous width, home), a server by (segment, requested
width, previous width). An entry's order is (rank, sequence): rank is its time of entry, later for lower priorities, so
that they age and never starve; the sequence breaks ties in the order of entry.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

from slim_scheduler.core.types import Seconds, Task, TaskId

K = TypeVar("K", bound=Hashable)
# (rank, sequence, task, tag): the tag is the owner's, such as the block a task came with
Entry = tuple[Seconds, int, Task, int]


class KeyedQueue(Generic[K]):
    """Entries by key, each key a heap in (rank, sequence) order. Removal marks, and the mark is cleared on the way."""

    def __init__(self) -> None:
        self._heaps: dict[K, list[Entry]] = {}
        self._counts: dict[K, int] = {}
        self._removed: set[TaskId] = set()
        self._sequence = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, key: K, rank: Seconds, task: Task, tag: int = 0) -> None:
        self._sequence += 1
        self._insert(key, (rank, self._sequence, task, tag))

    def put_back(self, key: K, entries: Iterable[Entry]) -> None:
        """Returns taken entries to the place they had."""
        for entry in entries:
            self._insert(key, entry)

    def take(self, key: K, limit: int) -> list[Entry]:
        """Removes and returns the first up to `limit` entries of a key, in order."""
        heap, removed = self._heaps[key], self._removed
        taken: list[Entry] = []
        while heap and len(taken) < limit:
            entry = heappop(heap)
            if removed and entry[2].task_id in removed:
                removed.discard(entry[2].task_id)
            else:
                taken.append(entry)
        self._forget(key, len(taken))
        return taken

    def remove(self, key: K, task_id: TaskId) -> None:
        """Drops a waiting task. The caller knows that it waits under this key."""
        self._removed.add(task_id)
        self._forget(key, 1)

    def head(self, skip: Callable[[K], bool] | None = None) -> K | None:
        """The key of the oldest entry, passing over keys for which `skip` holds."""
        best: Entry | None = None
        found: K | None = None
        for key, heap in self._heaps.items():
            if skip is not None and skip(key):
                continue
            first = self._first(heap)
            if best is None or first < best:
                best, found = first, key
        return found

    def oldest(self, key: K) -> Task:
        return self._first(self._heaps[key])[2]

    def count(self, key: K) -> int:
        return self._counts.get(key, 0)

    def counts(self) -> dict[K, int]:
        """How many wait, by key; read only."""
        return self._counts

    def entries(self) -> Iterator[tuple[K, Entry]]:
        """All waiting entries, in no particular order."""
        for key, heap in self._heaps.items():
            for entry in heap:
                if entry[2].task_id not in self._removed:
                    yield key, entry

    def check_invariants(self) -> None:
        live = list(self.entries())
        assert len(live) == self._length == sum(self._counts.values()), "lengths disagree"
        assert len({entry[2].task_id for _, entry in live}) == len(live), "a task waits twice"

    def _insert(self, key: K, entry: Entry) -> None:
        heap = self._heaps.get(key)
        if heap is None:
            self._heaps[key] = [entry]
            self._counts[key] = 1
        else:
            heappush(heap, entry)
            self._counts[key] += 1
        self._length += 1

    def _first(self, heap: list[Entry]) -> Entry:
        while self._removed and heap[0][2].task_id in self._removed:
            self._removed.discard(heappop(heap)[2].task_id)
        return heap[0]

    def _forget(self, key: K, taken: int) -> None:
        self._length -= taken
        self._counts[key] -= taken
        if not self._counts[key]:
            for entry in self._heaps.pop(key):
                self._removed.discard(entry[2].task_id)
            del self._counts[key]
