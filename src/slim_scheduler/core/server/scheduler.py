"""One server's greedy scheduler (the paper's Algorithm 1): batches, best-fit instances, loading and unloading.

`ServerScheduler.handle` is its only mutator. It owns the server's queue and the ledger of its instances; it does not
run anything, read a clock or know how a batch is executed: hosts perform its commands and tell it what happened. Called
by the simulator and the live engine alike.
"""

from collections import deque

import msgspec

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.messages import (
    BatchDone,
    BatchFailed,
    BatchReported,
    BlockArrived,
    CancelTasks,
    DeviceSampled,
    InstanceFailed,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    Resume,
    ServerCommand,
    ServerEvent,
    ServerReported,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.queues import Entry, KeyedQueue
from slim_scheduler.core.server.instances import Instance, InstancePool, InstanceState
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Batch, BatchId, Block, BlockId, Bytes, Seconds, ServerName, TaskId, Width
from slim_scheduler.core.view import ServerReport

RECENT_BATCHES = 256  # percentiles in the telemetry are over this many
REMEMBERED_BLOCKS = 1024  # to recognise a block that was delivered twice
WORTH_A_PAUSE: Seconds = 0.005  # deciding about a batch's items takes some tenths of a millisecond

# segment, requested width, previous width, exact
Key = tuple[int, Width, Width | None, bool]


class ServerKnobs(msgspec.Struct, frozen=True):
    """Algorithm 1's knobs, in the core's units. `max_upgrade` None: any wider instance will do."""

    max_batch: int = 32
    vram_budget: Bytes = 10 << 30
    utilization_block: float = 0.95
    idle_unload: Seconds = 30.0
    scale_queue_threshold: int = 16
    max_new_instances: int = 2
    max_concurrent_batches: int = 1
    max_upgrade: float | None = None
    priority_aging: Seconds = 1.0


def worth_a_pause(batch: Batch, now: Seconds, segments: int) -> bool:
    """Whether the next batch should wait until this one's items are back, where that is at once.

    With `reentry = "oldest-item"`. Otherwise a younger batch always slips in between, two batches take turns segment
    by segment, and the older ends nearly as late as the younger: 1.2 times the mean and p99 latency near saturation.
    """
    return batch.segment < segments - 1 and now - batch.started >= WORTH_A_PAUSE


class ServerScheduler:
    """Queue, batches and instances of one server. Raises InputError for a budget that cannot hold the network."""

    def __init__(self, name: ServerName, knobs: ServerKnobs, shape: ModelShape, incarnation: int = 0) -> None:
        self.name = name
        self.incarnation = incarnation
        self._knobs = knobs
        self._shape = shape
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self._queued_per_segment = [0] * shape.segments
        self._pool = InstancePool(knobs.vram_budget)
        self._running: dict[BatchId, tuple[Batch, Instance, Key, list[Entry]]] = {}
        self._open_blocks: dict[BlockId, int] = {}
        self._seen_blocks: dict[BlockId, None] = {}
        self._batch_limits: dict[tuple[int, Width], int] = {}
        self._service_times: deque[Seconds] = deque(maxlen=RECENT_BATCHES)
        self._utilization: float | None = None
        self._next_batch = 0
        self._wake_at: Seconds | None = None
        self._check_budget()

    def handle(self, event: ServerEvent, now: Seconds) -> list[ServerCommand]:
        """Takes one event, returns what the host must do."""
        commands: list[ServerCommand] = []
        match event:
            case BatchDone():
                self._finish(event, now, commands)
            case BlockArrived():
                self._enqueue(event.block, now)
            case DeviceSampled():
                self._utilization = event.utilization
                commands.append(ServerReported(self._report(event, now)))
            case InstanceReady():
                self._ready(event, now)
            case InstanceUnloaded():
                self._unloaded(event)
            case TimerFired():
                self._wake_at = None
                self._unload_idle(now, commands)
            case CancelTasks():
                self._cancel(set(event.tasks), commands)
            case BatchFailed():
                self._batch_failed(event, now, commands)
            case InstanceFailed():
                self._load_failed(event, commands)
            case Resume():
                pass
        if not (isinstance(event, BatchDone) and event.pause):
            self._start_batches(now, commands)
        self._arm(commands)
        return commands

    # ---- serving

    def _start_batches(self, now: Seconds, commands: list[ServerCommand]) -> None:
        knobs = self._knobs
        while len(self._queue) and len(self._running) < knobs.max_concurrent_batches:
            key = self._queue.head()
            assert key is not None
            entries = self._queue.take(key, knobs.max_batch)
            entries = self._without_expired(entries, now, commands)
            if not entries:
                continue
            segment, width, previous_width, exact = key
            instance = self._pool.best_fit(segment, width, self._widest(width, exact), previous_width)
            if instance is None:
                self._queue.put_back(key, entries)
                self._load(key, now, commands)
                return
            variant = 0
            build = previous_width not in instance.variants
            if build:
                variant = self._shape.variant(segment, previous_width, instance.width)
                if not self._pool.fits(variant):
                    self._queue.put_back(key, entries)
                    self._evict(variant, commands, keep=instance)
                    return
                self._pool.grow(instance, previous_width, variant)
            self._start(key, instance, entries, build, now, commands)

    def _start(
        self,
        key: Key,
        instance: Instance,
        entries: list[Entry],
        build: bool,
        now: Seconds,
        commands: list[ServerCommand],
    ) -> None:
        segment, width, previous_width, _ = key
        limit = self._batch_limits.get((segment, instance.width))
        if limit is not None and len(entries) > limit:
            self._queue.put_back(key, entries[limit:])
            entries = entries[:limit]
        self._next_batch += 1
        tasks = tuple([entry[2] for entry in entries])
        batch = Batch(
            self._next_batch, instance.instance_id, segment, instance.width, width, previous_width, tasks, now
        )
        instance.move(InstanceState.BUSY)
        self._queued_per_segment[segment] -= len(entries)
        self._running[batch.batch_id] = (batch, instance, key, entries)
        commands.append(StartBatch(batch, build))

    def _finish(self, event: BatchDone, now: Seconds, commands: list[ServerCommand]) -> None:
        batch, instance, _, entries = self._running.pop(event.batch_id)
        instance.move(InstanceState.FREE)
        instance.last_used = now
        self._service_times.append(now - entries[0][0])
        self._close(entries)
        commands.append(
            BatchReported(
                self.name,
                self.incarnation,
                batch.batch_id,
                batch.segment,
                batch.width,
                tuple([task.task_id for task in batch.tasks]),
                batch.started,
                now,
                event.energy_j,
            )
        )

    def _enqueue(self, block: Block, now: Seconds) -> None:
        if block.block_id in self._seen_blocks:
            return
        self._seen_blocks[block.block_id] = None
        if len(self._seen_blocks) > REMEMBERED_BLOCKS:
            del self._seen_blocks[next(iter(self._seen_blocks))]
        key = (block.segment, block.width, block.previous_width, block.exact)
        if any(task.priority or task.arrival is not None for task in block.tasks):
            aging = self._knobs.priority_aging
            for task in block.tasks:
                since = now if task.arrival is None else task.arrival
                self._queue.push(key, since + aging * task.priority, task, block.block_id)
        else:
            self._queue.push_all(key, now, block.tasks, block.block_id)
        self._queued_per_segment[block.segment] += len(block.tasks)
        self._open_blocks[block.block_id] = len(block.tasks)

    def _widest(self, width: Width, exact: bool) -> Width:
        if exact:
            return width
        if self._knobs.max_upgrade is None:
            return self._shape.widths[-1]
        return width + self._knobs.max_upgrade

    def _without_expired(self, entries: list[Entry], now: Seconds, commands: list[ServerCommand]) -> list[Entry]:
        expired = [e for e in entries if e[2].deadline is not None and e[2].deadline <= now]
        if not expired:
            return entries
        self._give_back(expired, "expired", commands)
        return [e for e in entries if e[2].deadline is None or e[2].deadline > now]

    # ---- instances

    def _load(self, key: Key, now: Seconds, commands: list[ServerCommand]) -> None:
        """No free instance fits the head: load one or more if the limits allow, else wait for the next event."""
        segment, width, _, _ = key
        knobs, pool = self._knobs, self._pool
        if self._utilization is not None and self._utilization >= knobs.utilization_block:
            return
        crowded = self._queue.count(key) >= knobs.scale_queue_threshold
        loading = pool.loading(segment, width)
        size = self._shape.instance_bytes(segment, width, knobs.max_batch)
        for _ in range((knobs.max_new_instances if crowded else 1) - loading):
            if not pool.fits(size):
                if not loading:
                    self._evict(size, commands)
                return
            loading += 1
            instance = pool.add(segment, width, size, now)
            commands.append(LoadInstance(instance.instance_id, segment, width, size))

    def _evict(self, size: Bytes, commands: list[ServerCommand], keep: Instance | None = None) -> None:
        """The head is blocked by memory alone: unload free instances, least recently used first, until it will fit."""
        pool = self._pool
        while pool.used - pool.leaving + size > pool.budget:
            victim = pool.least_recently_used(keep)
            if victim is None:
                return
            pool.unload(victim)
            commands.append(UnloadInstance(victim.instance_id))

    def _unload_idle(self, now: Seconds, commands: list[ServerCommand]) -> None:
        for instance in list(self._pool):
            if instance.state is InstanceState.FREE and instance.last_used + self._knobs.idle_unload <= now:
                self._pool.unload(instance)
                commands.append(UnloadInstance(instance.instance_id))

    def _arm(self, commands: list[ServerCommand]) -> None:
        if self._wake_at is not None or not len(self._pool):
            return
        idle = [i.last_used for i in self._pool if i.state is InstanceState.FREE]
        if idle:
            self._wake_at = min(idle) + self._knobs.idle_unload
            commands.append(WakeAt(self._wake_at))

    def _ready(self, event: InstanceReady, now: Seconds) -> None:
        instance = self._pool.get(event.instance)
        if instance is not None:
            instance.move(InstanceState.FREE)
            instance.last_used = now

    def _unloaded(self, event: InstanceUnloaded) -> None:
        instance = self._pool.get(event.instance)
        if instance is not None:
            self._pool.remove(instance)

    # ---- what goes wrong

    def _batch_failed(self, event: BatchFailed, now: Seconds, commands: list[ServerCommand]) -> None:
        batch, instance, key, entries = self._running.pop(event.batch_id)
        if event.out_of_memory and len(entries) > 1:
            # Split, and remember: from now on this (segment, width) runs smaller batches.
            instance.move(InstanceState.FREE)
            instance.last_used = now
            self._batch_limits[batch.segment, batch.width] = len(entries) // 2
            self._queue.put_back(key, entries)
            self._queued_per_segment[batch.segment] += len(entries)
            return
        self._pool.unload(instance)
        commands.append(UnloadInstance(instance.instance_id))
        self._queued_per_segment[batch.segment] += len(entries)
        self._give_back(entries, event.reason, commands, permanent=event.out_of_memory)

    def _load_failed(self, event: InstanceFailed, commands: list[ServerCommand]) -> None:
        instance = self._pool.get(event.instance)
        if instance is None:
            return
        self._pool.remove(instance)
        for key in [k for k in self._queue.counts() if k[:2] == (instance.segment, instance.width)]:
            self._give_back(self._queue.take(key, self._queue.count(key)), event.reason, commands)

    def _cancel(self, tasks: set[TaskId], commands: list[ServerCommand]) -> None:
        dropped = [(key, entry) for key, entry in self._queue.entries() if entry[2].task_id in tasks]
        for key, entry in dropped:
            self._queue.remove(key, entry[2].task_id)
        if dropped:
            self._give_back([entry for _, entry in dropped], "cancelled", commands)

    def _give_back(
        self, entries: list[Entry], reason: str, commands: list[ServerCommand], permanent: bool = False
    ) -> None:
        for entry in entries:
            self._queued_per_segment[entry[2].segment] -= 1
        self._close(entries)
        tasks = tuple(entry[2].task_id for entry in entries)
        commands.append(TasksReturned(self.name, self.incarnation, tasks, reason, permanent))

    def _close(self, entries: list[Entry]) -> None:
        blocks = self._open_blocks
        for entry in entries:
            left = blocks[entry[3]] - 1
            if left:
                blocks[entry[3]] = left
            else:
                del blocks[entry[3]]

    # ---- telemetry and checks

    def _report(self, sample: DeviceSampled, now: Seconds) -> ServerReport:
        times = sorted(self._service_times)
        return ServerReport(
            server=self.name,
            incarnation=self.incarnation,
            made_at=now,
            queue_per_segment=tuple(self._queued_per_segment),
            running_tasks=sum([len(entries) for _, _, _, entries in self._running.values()]),
            running_batches=len(self._running),
            memory_used=self._pool.used,
            memory_total=self._pool.budget,
            instances=self._pool.telemetry(),
            open_blocks=tuple(self._open_blocks),
            utilization=sample.utilization,
            power_w=sample.power_w,
            energy_j=sample.energy_j,
            energy_source=sample.energy_source,
            batch_p50=times[len(times) // 2] if times else None,
            batch_p99=times[len(times) * 99 // 100] if times else None,
        )

    def _check_budget(self) -> None:
        shape, knobs = self._shape, self._knobs
        largest = max(
            shape.instance_bytes(segment, width, knobs.max_batch)
            + sum(shape.variant(segment, previous, width) for previous in shape.widths if segment)
            for segment in range(shape.segments)
            for width in shape.widths
        )
        if largest > knobs.vram_budget:
            raise InputError(
                f"server {self.name}: vram_budget is {knobs.vram_budget / 2**30:.3f} GiB, but one instance of "
                f"{shape.name} with batches of {knobs.max_batch} needs {largest / 2**30:.3f} GiB; raise "
                "vram_budget_gib or lower max_batch"
            )

    def check_invariants(self) -> None:
        """For tests, after every event: limits kept, ledgers agree, no one waits without a reason."""
        self._queue.check_invariants()
        self._pool.check_invariants()
        assert len(self._running) <= self._knobs.max_concurrent_batches, "too many concurrent batches"
        assert sum(self._queued_per_segment) == len(self._queue), "queue telemetry"
        held = len(self._queue) + sum(len(entries) for _, _, _, entries in self._running.values())
        assert sum(self._open_blocks.values()) == held, "open blocks"
        for batch, instance, key, entries in self._running.values():
            assert 0 < len(entries) <= self._knobs.max_batch, "batch size"
            assert instance.state is InstanceState.BUSY, "a batch on an instance that is not busy"
            assert batch.width == instance.width >= batch.requested_width, "narrower than requested"
            assert {(t.segment, t.previous_width) for t in batch.tasks} == {(key[0], key[2])}, "mixed batch"
        if len(self._queue) and not self._running and not len(self._pool):
            blocked = self._utilization is not None and self._utilization >= self._knobs.utilization_block
            assert blocked, "work waits although nothing runs, loads or blocks"
