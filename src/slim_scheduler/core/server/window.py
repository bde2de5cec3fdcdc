"""The batch window of one server: which of its keys are *ripe*, so that a batch of theirs may start.

A server that never rests runs small batches whenever there is less to do, all the time and at its least efficient. So a
key may be held back until its tile is full, its oldest task has waited the window, its least slack is used up, or
nothing more of it can come soon. `ServerScheduler` tells what was queued and what left, and asks; nothing is started
here.
"""

from collections.abc import Callable, Iterable, Sequence
from math import exp

from slim_scheduler.core.queues import Entry
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, Task, Width

# segment, requested width, previous width, exact
Key = tuple[int, Width, Width | None, bool]
# Mean seconds of a batch on this server: segment, previous width, width, size
BatchTime = Callable[[int, Width | None, Width, int], Seconds]

KNEE = 1.05  # a tile is the smallest batch whose time per task is within so many times the best
LONGEST_AUTOMATIC: Seconds = 0.05  # of each segment: on slow devices a pass takes a second (lab/2026-11-windows.md)
RATE_MEMORY: Seconds = 0.25  # over which a key's arrivals are averaged
MARGIN = 1.25  # on the predicted time that a task still needs
UNHURRIED: Seconds = 1.0  # a task without deadline goes like one whose slack is used up so long after it came
CLOCK_SLACK: Seconds = 1e-6  # that a host's timer may be early


class _HeldKey:
    """What waits of one key. `since`: when the first of it came. `latest`: when the most urgent of it has to start.
    `turn`: the same where priorities count, which says who goes first. `more`: tasks that may yet come, by the last
    block's word."""

    __slots__ = ("latest", "more", "since", "turn")

    def __init__(self, more: int) -> None:
        self.since: Seconds = float("inf")
        self.latest: Seconds = float("inf")
        self.turn: Seconds = float("inf")
        self.more = more


class _KeyFacts:
    """What a key's profile says, and how many of its tasks came lately."""

    __slots__ = ("batches", "came", "came_at", "messages", "tile", "window")

    def __init__(self, tile: int, window: Seconds, batches: Seconds, messages: Seconds) -> None:
        self.tile = tile
        self.window = window
        self.batches = batches  # of a task, to the end of the network, by the profile
        self.messages = messages  # that it is under way until then
        self.came = 0.0
        self.came_at: Seconds = 0.0


class BatchWindow:
    """Ripeness of every waiting key.

    `window` None: the time of a pass through the network in full tiles, 50 ms at most, while one more task is to be
    expected in it.
    `tile` None: the profile's knee. `batch_time` None, without a profile: a tile is a full batch, and tasks with a
    deadline are not held. `link_latency` is of one message to or from the dispatcher.

    `pace`: how many times slower batches run than their profile says; after setting it call `changed` for every key.
    """

    def __init__(
        self,
        window: Seconds | None,
        tile: int | None,
        max_batch: int,
        priority_aging: Seconds,
        shape: ModelShape,
        batch_time: BatchTime | None,
        link_latency: Seconds = 0.0,
    ) -> None:
        self.pace = 1.0
        self._window = window
        self._tile = tile
        self._max_batch = max_batch
        self._priority_aging = priority_aging
        self._shape = shape
        self._batch_time = batch_time
        self._link_latency = link_latency
        self._limits: dict[tuple[int, Width], int] = {}
        self._held: dict[Key, _HeldKey] = {}
        self._facts: dict[Key, _KeyFacts] = {}

    # ---- what the scheduler tells

    def queued(self, key: Key, tasks: Sequence[Task], more: int, now: Seconds) -> None:
        """Tasks of a key joined the queue; `more` others may come soon."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _HeldKey(more)
        held.more = more
        held.since = min(held.since, now)
        facts = self._facts_of(key)
        latest, turn = self._starts(facts, tasks)
        held.latest, held.turn = min(held.latest, latest), min(held.turn, turn)
        if self._window is None:
            facts.came = facts.came * exp((facts.came_at - now) / RATE_MEMORY) + len(tasks)
            facts.came_at = now

    def changed(self, key: Key, waiting: Sequence[tuple[Seconds, Task]]) -> None:
        """Tasks of a key left the queue, or are back. `waiting`: all that wait, each with the time at which it came."""
        before = self._held.pop(key, None)
        if waiting:
            held = self._held[key] = _HeldKey(0 if before is None else before.more)
            held.since = min([since for since, _ in waiting])
            held.latest, held.turn = self._starts(self._facts_of(key), [task for _, task in waiting])

    def at_most(self, segment: int, width: Width, size: int) -> None:
        """The device's memory allows no larger batches of this kind, so no key waits for more."""
        self._limits[segment, width] = size
        for key, facts in self._facts.items():
            if key[:2] == (segment, width):
                facts.tile = min(facts.tile, size)

    # ---- what it asks

    def ripe(self, key: Key, count: int, now: Seconds) -> bool:
        """Whether a batch of this key, of which `count` tasks wait, should start."""
        held = self._held[key]
        if not held.more:
            return True
        facts = self._facts[key]
        return count >= facts.tile or self._due(held, facts) <= now + CLOCK_SLACK

    def due(self, key: Key) -> Seconds:
        """When the key will be ripe if nothing comes."""
        return self._due(self._held[key], self._facts[key])

    def urgency(self, key: Key, first: Entry) -> tuple[Seconds, int]:
        """Of two ripe keys the lower goes first: the least slack, or the older. `first`: the first entry of the key."""
        return min(self._held[key].turn, first[0] + UNHURRIED), first[1]

    def check_invariants(self, key: Key, waiting: Sequence[tuple[Seconds, Task]]) -> None:
        """`waiting` as in `changed`."""
        held = self._held[key]
        assert held.since <= min([since for since, _ in waiting]) + CLOCK_SLACK, "a task waits past its window"
        latest, turn = self._starts(self._facts[key], [task for _, task in waiting])
        assert held.latest <= latest, "slack is overlooked"
        assert held.turn <= turn, "an urgent task is overlooked"

    # ---- one key

    def _due(self, held: _HeldKey, facts: _KeyFacts) -> Seconds:
        if self._window is None and facts.came * facts.window < RATE_MEMORY:
            return held.since  # not one more task is to be expected in the window
        return min(held.since + facts.window, held.latest)

    def _starts(self, facts: _KeyFacts, tasks: Iterable[Task]) -> tuple[Seconds, Seconds]:
        """When the most urgent of some tasks has to start, without and with priorities."""
        need = self.pace * facts.batches + facts.messages
        starts = [(t.deadline - need, t.priority) for t in tasks if t.deadline is not None]
        if not starts:
            return float("inf"), float("inf")
        aging = self._priority_aging
        return min(starts)[0], min([start + aging * priority for start, priority in starts])

    def _facts_of(self, key: Key) -> _KeyFacts:
        facts = self._facts.get(key)
        if facts is None:
            facts = self._facts[key] = self._read(key)
        return facts

    def _read(self, key: Key) -> _KeyFacts:
        segment, width, previous, _ = key
        tile = min(self._knee(segment, previous, width), self._limits.get((segment, width), self._max_batch))
        if self._batch_time is None:
            return _KeyFacts(tile, self._window or 0.0, float("inf"), 0.0)
        rest = [(segment, previous), *[(later, width) for later in range(segment + 1, self._shape.segments)]]
        batches = MARGIN * sum([self._batch_time(s, p, width, self._max_batch) for s, p in rest])
        messages = (2 * len(rest) - 1) * self._link_latency  # the results of this segment, and both ways of the others
        window = self._window
        if window is None:
            steps = [(s, width if s else None) for s in range(self._shape.segments)]
            a_pass = sum([self._batch_time(s, p, width, self._knee(s, p, width)) for s, p in steps])
            window = min(LONGEST_AUTOMATIC, a_pass)
        return _KeyFacts(tile, window, batches, messages)

    def _knee(self, segment: int, previous: Width | None, width: Width) -> int:
        """The tile: from there on the time per task hardly falls."""
        if self._tile is not None or self._batch_time is None:
            return min(self._tile or self._max_batch, self._max_batch)
        each = [self._batch_time(segment, previous, width, size) / size for size in range(1, self._max_batch + 1)]
        return next(size for size, seconds in enumerate(each, 1) if seconds <= KNEE * min(each))
