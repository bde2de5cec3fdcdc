"""What a served model did, counted from the same events and commands that go into the record.

The engine calls `step` around every `handle`, as it does for a recorder; nothing is measured twice. Metrics and the
live page read the sums. One observer outlives the engines of its model, so a swap never makes a counter go back.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from slim_scheduler.core.messages import (
    BatchReported,
    BlockFinished,
    LoadInstance,
    Message,
    RouterFellBack,
    ServerChanged,
    StartBatch,
    UnloadInstance,
)
from slim_scheduler.core.types import ItemOutcome, Outcome, Seconds, ServerName, Width

# Seconds; a digit-sized network answers in 1 ms, an overloaded CIFAR network in some seconds.
SECONDS_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MARGIN_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
REASONS_KEPT = 8
# Most messages are replies, which `finished` and `item` count.
OBSERVED = frozenset(
    (BlockFinished, StartBatch, BatchReported, LoadInstance, UnloadInstance, RouterFellBack, ServerChanged)
)
Place = tuple[int, Width, ServerName]


class Histogram:
    """Counts by upper bound, as Prometheus has them but not yet summed up; the last bucket is open."""

    __slots__ = ("bounds", "buckets", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.buckets[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, count up to it), ending with +Inf."""
        rows, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
        return rows


class Observer:
    """Sums over the life of one served model. All times in seconds, energies in joules."""

    def __init__(self) -> None:
        self.block_seconds: dict[Place, Histogram] = {}
        self.batch_size: dict[ServerName, Histogram] = {}
        self.executions: dict[int, int] = {}  # by exact size
        self.decisions: dict[tuple[str, str], int] = {}
        self.fallbacks = 0
        self.suspensions = 0
        self.fallback_reasons: deque[str] = deque(maxlen=REASONS_KEPT)
        self.router = ""
        self.loads: dict[Place, int] = {}
        self.unloads: dict[ServerName, int] = {}
        self.batches: dict[ServerName, int] = {}
        self.outages: dict[ServerName, int] = {}
        self.batch_energy = 0.0
        self.not_finite = 0
        self.request_seconds: dict[Outcome, Histogram] = {outcome: Histogram(SECONDS_BOUNDS) for outcome in Outcome}
        self.recent: deque[tuple[float, float]] = deque(maxlen=4096)  # (when, seconds) of answered requests
        self.queue_seconds = 0.0
        self.compute_seconds = 0.0
        self.items_energy = 0.0
        self.items_energy_known = 0
        self.accuracy_sum = 0.0
        self.accuracy_known = 0
        self.width_items: dict[str, int] = {}
        self.second_passes = 0
        self.margins = Histogram(MARGIN_BOUNDS)  # of first passes

    # ---- the engine's side

    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Message]) -> None:
        if type(event) is BatchReported:
            self.not_finite += len(event.not_finite)
        for command in commands:
            if type(command) not in OBSERVED:
                continue
            match command:
                case BlockFinished():
                    self._block(command)
                case StartBatch():
                    self._batch(machine, command)
                case BatchReported():
                    self.batch_energy += command.energy_j or 0.0
                case LoadInstance():
                    place = (command.segment, command.width, machine)
                    self.loads[place] = self.loads.get(place, 0) + 1
                case UnloadInstance():
                    self.unloads[machine] = self.unloads.get(machine, 0) + 1
                case RouterFellBack():
                    self._fell_back(command)
                case ServerChanged(up=False):
                    self.outages[command.server] = self.outages.get(command.server, 0) + 1

    def _block(self, block: BlockFinished) -> None:
        decision = block.decision
        self.router = block.router
        group = f"{decision.group}"
        for head, choice in (("server", decision.server), ("width", f"{decision.width:g}"), ("group", group)):
            self.decisions[head, choice] = self.decisions.get((head, choice), 0) + 1
        if block.ran:
            place = (block.segment, block.ran[0][1][-1], decision.server)
            histogram = self.block_seconds.get(place)
            if histogram is None:
                histogram = self.block_seconds[place] = Histogram(SECONDS_BOUNDS)
            histogram.add(block.latency, len(block.ran))

    def _batch(self, machine: ServerName, command: StartBatch) -> None:
        histogram = self.batch_size.get(machine)
        if histogram is None:
            histogram = self.batch_size[machine] = Histogram(SIZE_BOUNDS)
        size = len(command.batch.tasks)
        histogram.add(size)
        self.executions[size] = self.executions.get(size, 0) + 1

    def _fell_back(self, command: RouterFellBack) -> None:
        if command.until is None:
            self.fallbacks += 1
        else:
            self.suspensions += 1
        if not self.fallback_reasons or self.fallback_reasons[-1] != command.reason:
            self.fallback_reasons.append(command.reason)

    # ---- the service's side

    def finished(self, outcome: Outcome, seconds: Seconds, now: float) -> None:
        """A request ended, so many seconds after it came."""
        self.request_seconds[outcome].add(seconds)
        if outcome is Outcome.ANSWERED:
            self.recent.append((now, seconds))

    def waited(self, longest: ItemOutcome) -> None:
        """A request was answered; of its items this one took longest, so its times are the request's."""
        self.queue_seconds += longest.queue_s
        self.compute_seconds += longest.compute_s

    def item(self, ended: ItemOutcome, widths: str, accuracy: float | None) -> None:
        """An item was answered at a width tuple. `accuracy`: the chance that it is right."""
        if ended.energy_j is not None:
            self.items_energy += ended.energy_j
            self.items_energy_known += 1
        self.width_items[widths] = self.width_items.get(widths, 0) + 1
        if ended.other_widths:
            self.second_passes += 1
        margin = ended.margin if ended.passes == 1 else ended.other_margin
        if margin is not None:
            self.margins.add(margin)
        if accuracy is not None:
            self.accuracy_sum += accuracy
            self.accuracy_known += 1
