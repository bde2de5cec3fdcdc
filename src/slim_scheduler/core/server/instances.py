"""The model instances of one server and the device memory they hold.

An instance is one segment at one width with the variants built so far. The pool knows what is loaded and what it
costs; when to load or unload is the scheduler's decision. Memory is counted from the moment a load is asked for until
the device has freed it.
"""

from collections.abc import Iterator
from enum import StrEnum

from slim_scheduler.core.types import Bytes, InstanceId, Seconds, Width
from slim_scheduler.core.view import InstanceCount


class InstanceState(StrEnum):
    LOADING = "loading"
    FREE = "free"
    BUSY = "busy"
    UNLOADING = "unloading"
    GONE = "gone"


MOVES: dict[InstanceState, tuple[InstanceState, ...]] = {
    InstanceState.LOADING: (InstanceState.FREE, InstanceState.GONE),
    InstanceState.FREE: (InstanceState.BUSY, InstanceState.UNLOADING),
    InstanceState.BUSY: (InstanceState.FREE, InstanceState.UNLOADING),
    InstanceState.UNLOADING: (InstanceState.GONE,),
    InstanceState.GONE: (),
}


class Instance:
    """One segment at one width on the device. `size` is what it holds, variants included."""

    __slots__ = ("instance_id", "last_used", "segment", "size", "state", "variants", "width")

    def __init__(self, instance_id: InstanceId, segment: int, width: Width, size: Bytes, now: Seconds) -> None:
        self.instance_id = instance_id
        self.segment = segment
        self.width = width
        self.size = size
        self.state = InstanceState.LOADING
        self.variants: set[Width | None] = {None}
        self.last_used = now

    def move(self, state: InstanceState) -> None:
        assert state in MOVES[self.state], f"instance {self.instance_id}: {self.state} -> {state}"
        self.state = state


class InstancePool:
    """All instances of a server, with the memory ledger."""

    def __init__(self, budget: Bytes) -> None:
        self.budget = budget
        self.used: Bytes = 0
        self.leaving: Bytes = 0
        self._by_id: dict[InstanceId, Instance] = {}
        self._by_segment: dict[int, list[Instance]] = {}
        self._next_id = 0

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, instance_id: InstanceId) -> Instance | None:
        return self._by_id.get(instance_id)

    def fits(self, size: Bytes) -> bool:
        return self.used + size <= self.budget

    def best_fit(self, segment: int, width: Width, widest: Width, previous_width: Width | None) -> Instance | None:
        """The free instance of the segment with the smallest width from `width` to `widest`.

        Among equals, one that has the variant for this previous width, then the oldest.
        """
        best: Instance | None = None
        for instance in self._by_segment.get(segment, ()):
            if instance.state is InstanceState.FREE and width <= instance.width <= widest:
                if best is None or instance.width < best.width:
                    best = instance
                elif instance.width == best.width and previous_width not in best.variants:
                    best = instance if previous_width in instance.variants else best
        return best

    def has(self, segment: int, width: Width, widest: Width) -> bool:
        """Whether an instance of the segment with a width from `width` to `widest` is there or coming."""
        return any(
            width <= instance.width <= widest and instance.state is not InstanceState.UNLOADING
            for instance in self._by_segment.get(segment, ())
        )

    def loading(self, segment: int, width: Width) -> int:
        return sum(
            instance.state is InstanceState.LOADING and instance.width == width
            for instance in self._by_segment.get(segment, ())
        )

    def add(self, segment: int, width: Width, size: Bytes, now: Seconds) -> Instance:
        """Reserves memory for a new instance, which is then loading."""
        self._next_id += 1
        instance = Instance(self._next_id, segment, width, size, now)
        self._by_id[instance.instance_id] = instance
        self._by_segment.setdefault(segment, []).append(instance)
        self.used += size
        return instance

    def grow(self, instance: Instance, previous_width: Width | None, size: Bytes) -> None:
        """Counts a variant as its instance's memory."""
        instance.variants.add(previous_width)
        instance.size += size
        self.used += size

    def unload(self, instance: Instance) -> None:
        instance.move(InstanceState.UNLOADING)
        self.leaving += instance.size

    def remove(self, instance: Instance) -> None:
        """The device has freed it, or never got it."""
        if instance.state is InstanceState.UNLOADING:
            self.leaving -= instance.size
        instance.move(InstanceState.GONE)
        self.used -= instance.size
        del self._by_id[instance.instance_id]
        self._by_segment[instance.segment].remove(instance)

    def least_recently_used(self, keep: Instance | None = None) -> Instance | None:
        """The free instance that was idle longest, other than `keep`."""
        free = [i for i in self if i.state is InstanceState.FREE and i is not keep]
        return min(free, key=lambda i: (i.last_used, i.instance_id), default=None)

    def telemetry(self) -> tuple[InstanceCount, ...]:
        """Counts by (segment, width), those that are leaving left out."""
        states: dict[tuple[int, Width], list[int]] = {}
        for instance in self:
            row = states.setdefault((instance.segment, instance.width), [0, 0, 0])
            if instance.state is InstanceState.FREE:
                row[0] += 1
            elif instance.state is InstanceState.BUSY:
                row[1] += 1
            elif instance.state is InstanceState.LOADING:
                row[2] += 1
        return tuple(InstanceCount(s, w, *states[s, w]) for s, w in sorted(states))

    def check_invariants(self) -> None:
        assert self.used == sum(i.size for i in self), "memory ledger"
        assert self.leaving == sum(i.size for i in self if i.state is InstanceState.UNLOADING), "leaving ledger"
        assert self.used <= self.budget, f"{self.used} bytes used, budget {self.budget}"
