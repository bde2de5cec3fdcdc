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
    ServerCommand,
    ServerEvent,
    ServerReported,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.queues import PRIORITY_AGING, Entry, KeyedQueue
from slim_scheduler.core.server.instances import Instance, InstancePool, InstanceState
from slim_scheduler.core.server.pace import Pace
from slim_scheduler.core.server.rest import Rest
from slim_scheduler.core.server.window import CLOCK_SLACK, BatchTime, BatchWindow, Key
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Batch, BatchId, Block, BlockId, Bytes, Seconds, ServerName, Task, TaskId, Width
from slim_scheduler.core.view import ServerReport

RECENT_BATCHES = 256  # percentiles in the telemetry are over this many
REMEMBERED_BLOCKS = 1024  # to recognise a block that was delivered twice
LONG_BATCH: Seconds = 0.005  # deciding about a batch's items takes some tenths of a millisecond
SAMPLED: Seconds = 1.0  # that a device's utilisation looks back at the most: from then on it tells of others
NEXT_LOAD: Seconds = 1.0  # after a load that failed, where another instance can run what waits
RETURN: Seconds = 2e-6  # a simulated message in one process takes nanoseconds; a live host comes to timers after them


class ServerKnobs(msgspec.Struct, frozen=True):
    """Algorithm 1's knobs, in the core's units. `max_upgrade` None: any wider instance will do.

    `batch_window` 0: the server never rests while anything waits, the paper's rule. None, for it and `tile`: automatic.
    `credit`: tasks that the dispatcher lets the server have at once. `link_latency`: of one message to it or back.
    `awaits_return`: after a long batch its items may be back at once for their next segment, and come before younger
    ones.
    """

    max_batch: int = 32
    vram_budget: Bytes = 10 << 30
    utilization_block: float = 0.95
    idle_unload: Seconds = 30.0
    scale_queue_threshold: int = 16
    max_new_instances: int = 2
    max_concurrent_batches: int = 1
    max_upgrade: float | None = None
    priority_aging: Seconds = PRIORITY_AGING
    batch_window: Seconds | None = 0.0
    tile: int | None = None
    credit: int | None = None
    link_latency: Seconds = 0.0
    awaits_return: bool = False
    best_utilization: float = 1.0


class ServerScheduler:
    """Queue, batches and instances of one server. Raises InputError for a budget that cannot hold the network.

    `batch_time`, its profile's, is what automatic windows and tiles are made of; without it the window is 0. `pace`
    compares batches with the profile.
    """

    def __init__(
        self,
        name: ServerName,
        knobs: ServerKnobs,
        shape: ModelShape,
        incarnation: int = 0,
        batch_time: BatchTime | None = None,
        pace: Pace | None = None,
    ) -> None:
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
        self._failed_loads: dict[tuple[int, Width], Seconds] = {}
        self._service_times: deque[Seconds] = deque(maxlen=RECENT_BATCHES)
        self._utilization: float | None = None
        self._next_batch = 0
        self._idle_wake: Seconds | None = None
        self._window = _batch_window(knobs, shape, batch_time)
        self._pace = pace
        self._window_wake: Seconds = float("inf")
        self._others_since: Seconds = float("inf")  # that the device is sampled as too busy, and runs nothing of ours
        self._rest = Rest(knobs.best_utilization)
        self._returning: Seconds | None = None  # until when a batch's items may be on their way back
        self._arrived: dict[BlockId, Seconds] = {}  # of open blocks, where there is a window
        self._check_budget()

    def handle(self, event: ServerEvent, now: Seconds) -> list[ServerCommand]:
        """Takes one event, returns what the host must do."""
        commands: list[ServerCommand] = []
        match event:
            case BatchDone():
                self._finish(event, now, commands)
            case BlockArrived():
                self._enqueue(event.block, now, commands)
            case DeviceSampled():
                self._sampled(event.utilization, now)
                commands.append(ServerReported(self._report(event, now)))
            case InstanceReady():
                self._ready(event, now)
            case InstanceUnloaded():
                self._unloaded(event)
            case TimerFired():
                self._on_time(now, commands)
            case CancelTasks():
                self._cancel(set(event.tasks), commands)
            case BatchFailed():
                self._batch_failed(event, now, commands)
            case InstanceFailed():
                self._load_failed(event, now, commands)
        self._keep_pace()
        if self._returning is None and not self._rests(now):
            self._start_batches(now, commands)
        self._arm(commands)
        return commands

    # ---- serving

    def _start_batches(self, now: Seconds, commands: list[ServerCommand]) -> None:
        knobs = self._knobs
        while len(self._queue) and len(self._running) < knobs.max_concurrent_batches:
            key = self._next_key(now, commands)
            if key is None:
                return
            entries = self._queue.take(key, knobs.max_batch)
            if self._expired(key, entries, now, commands):
                continue  # what is left may be less urgent than another key, or more
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

    def _next_key(self, now: Seconds, commands: list[ServerCommand]) -> Key | None:
        """The key that runs next: the head's or, where there is a window, the most urgent ripe one. Where none is, a
        timer is asked for."""
        window = self._window
        if window is None:
            return self._queue.head()
        nothing_comes = self._nothing_comes()
        chosen: Key | None = None
        least = (float("inf"), 0)
        soonest = float("inf")
        for key, count, first in self._queue.lanes():
            if nothing_comes or window.ripe(key, count, now):
                urgency = window.urgency(key, first)
                if urgency < least:
                    chosen, least = key, urgency
            else:
                soonest = min(soonest, window.due(key))
        if chosen is None and soonest < self._window_wake:
            self._window_wake = soonest
            commands.append(WakeAt(soonest))
        return chosen

    def _nothing_comes(self) -> bool:
        """Whether every task that this server may hold waits here: then every key is as good as ripe."""
        return not self._running and self._knobs.credit is not None and len(self._queue) >= self._knobs.credit

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
        if not self._running:
            self._others_since = float("inf")
            self._rest.turn(True, now)
        tasks = tuple([entry[2] for entry in entries])
        batch = Batch(
            self._next_batch, instance.instance_id, segment, instance.width, width, previous_width, tasks, now
        )
        instance.move(InstanceState.BUSY)
        self._queued_per_segment[segment] -= len(entries)
        self._queue_changed(key)
        self._running[batch.batch_id] = (batch, instance, key, entries)
        if self._pace is not None:
            self._pace.began(batch, build, now)
        commands.append(StartBatch(batch, build))

    def _finish(self, event: BatchDone, now: Seconds, commands: list[ServerCommand]) -> None:
        batch, instance, _, entries = self._running.pop(event.batch_id)
        instance.move(InstanceState.FREE)
        instance.last_used = now
        rank, _, first, _ = entries[0]
        self._service_times.append(now - (rank - self._knobs.priority_aging * first.priority))
        if self._pace is not None:
            self._pace.ran(batch, self._utilization, now)
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
                event.not_finite,
                event.margins,
            )
        )
        if self._knobs.awaits_return:
            self._await_return(batch, now, commands)
        self._turns_idle(now, commands)

    def _turns_idle(self, now: Seconds, commands: list[ServerCommand]) -> None:
        """Asks for a timer at the end of the rest that is due once nothing runs."""
        if self._running:
            return
        self._rest.turn(False, now)
        rested = self._rest.until()
        if rested is not None and self._window is not None:
            commands.append(WakeAt(rested))

    def _rests(self, now: Seconds) -> bool:
        """Whether nothing may start for the device's own sake. Without a window a server never rests."""
        return self._window is not None and self._rest.due(now)

    def _await_return(self, batch: Batch, now: Seconds, commands: list[ServerCommand]) -> None:
        """Starts nothing until a timer that is due at once: by then, the batch's items that go on here are back.

        Otherwise a younger batch always slips in between, two batches take turns segment by segment, and the older ends
        nearly as late as the younger: 1.2 times the mean and p99 latency near saturation.
        """
        if batch.segment < self._shape.segments - 1 and now - batch.started >= LONG_BATCH:
            self._returning = now + RETURN
            commands.append(WakeAt(self._returning))

    def _enqueue(self, block: Block, now: Seconds, commands: list[ServerCommand]) -> None:
        if block.block_id in self._seen_blocks or block.block_id in self._open_blocks:
            return
        self._seen_blocks[block.block_id] = None
        if len(self._seen_blocks) > REMEMBERED_BLOCKS:
            del self._seen_blocks[next(iter(self._seen_blocks))]
        key = (block.segment, block.width, block.previous_width, block.exact)
        aging = self._knobs.priority_aging
        ranks = [(now if task.arrival is None else task.arrival) + aging * task.priority for task in block.tasks]
        self._queue.push_all(key, ranks, block.tasks, block.block_id)
        self._queued_per_segment[block.segment] += len(block.tasks)
        if self._window is not None:
            self._arrived[block.block_id] = now
            self._window.queued(key, block.tasks, block.more, now)
            if not self._pool.has(block.segment, block.width, self._widest(block.width, block.exact)):
                self._load(key, now, commands)  # meanwhile, others may join
        self._open_blocks[block.block_id] = len(block.tasks)

    def _widest(self, width: Width, exact: bool) -> Width:
        return width if exact else self._shape.widest(width, self._knobs.max_upgrade)

    def _queue_changed(self, key: Key) -> None:
        """Tasks of a key left the queue or are back in it."""
        if self._window is not None:
            self._window.changed(key, self._waiting(key))

    def _keep_pace(self) -> None:
        """Tasks with a deadline start the sooner the slower this server has become."""
        window, pace = self._window, self._pace
        if window is not None and pace is not None and window.pace != pace.value:
            window.pace = pace.value
            for key in self._queue.counts():
                self._queue_changed(key)

    def _waiting(self, key: Key) -> list[tuple[Seconds, Task]]:
        """A key's tasks with the times at which they came."""
        return [(self._arrived[block_id], task) for _, _, task, block_id in self._queue.of(key)]

    def _expired(self, key: Key, entries: list[Entry], now: Seconds, commands: list[ServerCommand]) -> bool:
        """Whether the deadline of some of these entries has come: those are given back, the others wait as before."""
        expired = [e for e in entries if e[2].deadline is not None and e[2].deadline <= now]
        if not expired:
            return False
        self._give_back(expired, "expired", commands)
        self._queue.put_back(key, [e for e in entries if e[2].deadline is None or e[2].deadline > now])
        self._queue_changed(key)
        return True

    # ---- instances

    def _load(self, key: Key, now: Seconds, commands: list[ServerCommand]) -> None:
        """No free instance fits the head: load one or more if the limits allow, else wait for the next event."""
        segment, width, _, exact = key
        knobs, pool = self._knobs, self._pool
        if self._load_blocked(now):
            return
        failed = self._failed_loads.get((segment, width))
        if failed is not None and now < failed + NEXT_LOAD and pool.has(segment, width, self._widest(width, exact)):
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

    def _load_blocked(self, now: Seconds) -> bool:
        """Whether the device is too busy for another instance, by the last sample. Where there is a window, a device on
        which nothing runs is not: its key would wait for the next sample, and every other key behind it. Without one,
        a device that is sampled so while nothing runs for longer than a sample looks back: others use it, maybe for
        ever."""
        if self._utilization is None or self._utilization < self._knobs.utilization_block:
            return False
        return bool(self._running) or (self._window is None and now - self._others_since <= SAMPLED)

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
        for segment, width, previous_width, exact in self._queue.counts():
            needed = self._pool.best_fit(segment, width, self._widest(width, exact), previous_width)
            if needed is not None:
                needed.last_used = now  # what waits, maybe for its window, will run there
        for instance in list(self._pool):
            if instance.state is InstanceState.FREE and instance.last_used + self._knobs.idle_unload <= now:
                self._pool.unload(instance)
                commands.append(UnloadInstance(instance.instance_id))

    def _on_time(self, now: Seconds, commands: list[ServerCommand]) -> None:
        if self._returning is not None and self._returning <= now + CLOCK_SLACK / 2:
            self._returning = None
        if self._window_wake <= now + CLOCK_SLACK:
            self._window_wake = float("inf")  # what is ripe by now starts like after any event
        if self._idle_wake is not None and self._idle_wake <= now + CLOCK_SLACK:
            self._idle_wake = None
            self._unload_idle(now, commands)

    def _arm(self, commands: list[ServerCommand]) -> None:
        if self._idle_wake is not None or not len(self._pool):
            return
        idle = [i.last_used for i in self._pool if i.state is InstanceState.FREE]
        if idle:
            self._idle_wake = min(idle) + self._knobs.idle_unload
            commands.append(WakeAt(self._idle_wake))

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
        self._turns_idle(now, commands)
        if self._pace is not None:
            self._pace.failed(batch, now)
        if event.out_of_memory and len(entries) > 1:
            # Split, and remember: from now on this (segment, width) runs smaller batches.
            instance.move(InstanceState.FREE)
            instance.last_used = now
            known = self._batch_limits.get((batch.segment, batch.width), len(entries))
            limit = self._batch_limits[batch.segment, batch.width] = min(known, len(entries) // 2)
            if self._window is not None:
                for width in {batch.width, batch.requested_width}:
                    self._window.at_most(batch.segment, width, limit)
            self._queue.put_back(key, entries)
            self._queued_per_segment[batch.segment] += len(entries)
            self._queue_changed(key)
            return
        self._pool.unload(instance)
        commands.append(UnloadInstance(instance.instance_id))
        self._queued_per_segment[batch.segment] += len(entries)
        self._give_back(entries, event.reason, commands, permanent=event.out_of_memory)

    def _load_failed(self, event: InstanceFailed, now: Seconds, commands: list[ServerCommand]) -> None:
        """What no other instance can run goes back."""
        instance = self._pool.get(event.instance)
        if instance is None:
            return
        self._pool.remove(instance)
        segment, width = instance.segment, instance.width
        self._failed_loads[segment, width] = now
        keys = [k for k in self._queue.counts() if k[:2] == (segment, width)]
        for key in [k for k in keys if not self._pool.has(segment, width, self._widest(width, k[3]))]:
            self._give_back(self._queue.take(key, self._queue.count(key)), event.reason, commands)
            self._queue_changed(key)

    def _cancel(self, tasks: set[TaskId], commands: list[ServerCommand]) -> None:
        dropped = [(key, entry) for key, entry in self._queue.entries() if entry[2].task_id in tasks]
        for key, entry in dropped:
            self._queue.remove(key, entry[2].task_id)
        for key in dict.fromkeys(key for key, _ in dropped):
            self._queue_changed(key)
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
                self._arrived.pop(entry[3], None)

    # ---- telemetry and checks

    def _sampled(self, utilization: float | None, now: Seconds) -> None:
        self._utilization = utilization
        if utilization is None or utilization < self._knobs.utilization_block or self._running:
            self._others_since = float("inf")
        else:
            self._others_since = min(self._others_since, now)

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
            pace=1.0 if self._pace is None else self._pace.at(now),
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

    def check_invariants(self, now: Seconds = 0.0) -> None:
        """For tests, after every event: limits kept, ledgers agree, no one waits without a reason."""
        self._check_window(now)
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
        greedy = self._window is None and self._returning is None
        if greedy and len(self._queue) and not self._running and not len(self._pool):
            assert self._load_blocked(now), "work waits although nothing runs, loads or blocks"

    def _check_window(self, now: Seconds) -> None:
        """A slot that is free has no ripe key that could start; what is not ripe has its timer."""
        window = self._window
        if window is None or self._returning is not None or self._rests(now):
            return
        for key, _, _ in self._queue.lanes():
            window.check_invariants(key, self._waiting(key))
        if len(self._running) == self._knobs.max_concurrent_batches:
            return
        lanes = list(self._queue.lanes())
        nothing_comes = self._nothing_comes()
        ripe = [
            (window.urgency(key, first), key)
            for key, count, first in lanes
            if nothing_comes or window.ripe(key, count, now)
        ]
        if not ripe:
            assert not lanes or self._window_wake <= min([window.due(key) for key, _, _ in lanes]), "nobody wakes up"
        else:
            segment, width, previous_width, exact = key = min(ripe)[1]
            instance = self._pool.best_fit(segment, width, self._widest(width, exact), previous_width)
            fits = instance is not None and (
                previous_width in instance.variants
                or self._pool.fits(self._shape.variant(segment, previous_width, instance.width))
            )
            assert not fits, f"{key} is ripe and does not run"


def _batch_window(knobs: ServerKnobs, shape: ModelShape, batch_time: BatchTime | None) -> BatchWindow | None:
    if knobs.batch_window == 0 or (knobs.batch_window is None and batch_time is None):
        return None
    tile, most, aging = knobs.tile, knobs.max_batch, knobs.priority_aging
    return BatchWindow(knobs.batch_window, tile, most, aging, shape, batch_time, knobs.link_latency)
