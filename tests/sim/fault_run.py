"""One seeded run of a small cluster in which everything goes wrong, and the watcher that checks every step of it.

The seed decides the cluster, the requests and the faults. By the end of the run everything has recovered, so that
every request must have its one outcome.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.random import Generator, default_rng

from slim_scheduler.core.messages import (
    BatchDone,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    Message,
    Reply,
    StartBatch,
    UnloadInstance,
)
from slim_scheduler.core.types import Outcome, Request, TaskConstraints
from slim_scheduler.setup.config import Config, FaultConfig
from slim_scheduler.sim.faults import FaultChange, random_faults
from slim_scheduler.sim.host import Simulation
from tests.sim.clusters import NOBODY, small_cluster
from tests.sim.devices import SEGMENTS, WIDTHS, small_shape

ARRIVALS_OVER = 3.2
FAULTS_OVER = 2.5
DURATION = 30.0  # what an overloaded cluster has to catch up; the run is over when all is answered
LATE = 0.050  # guarantee 8
ROUTERS = (
    "random",
    "round-robin:random",
    "jsq:0.5",
    "jsq:random",
    "p2c:1",
    "cost-model:0.5",
    "jsq:0.5+1@0.6",
    "cost-model:0.5+0.5/1@0.3",
)


def margin_of(item: int, widths: tuple[float, ...]) -> float:
    """Of a made-up network: another for every item and width tuple."""
    return (37 * item + round(1000 * sum(w * (s + 1) for s, w in enumerate(widths)))) % 101 / 100


class Watcher:
    """Checks guarantees and invariants at every step; told of the requests beforehand."""

    def __init__(self, config: Config, requests: Sequence[Request]) -> None:
        self.simulation: Simulation
        self.log: list[str] | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.second_passes = 0
        self._requests = {request.request_id: request for request in requests}
        self._by_item = {item: request for request in requests for item in request.items}
        self._devices = {server.name: _Memory(server.max_batch, server.concurrency) for server in config.servers}
        self._budget = {server.name: int(server.vram_budget_gib * 2**30) for server in config.servers}
        self._lives = dict.fromkeys(self._devices, 0)

    def step(self, machine: str, now: float, event: Message, commands: Sequence[Any]) -> None:
        if self.log is not None:
            self.log.append(f"{now:.6f} {machine}: {event} -> {list(commands)}")
        if machine == "dispatcher":
            self.simulation.dispatcher.check_invariants()
            for command in commands:
                if isinstance(command, Reply):
                    self._check_reply(command, now)
        else:
            server = self.simulation.servers[machine]
            server.scheduler.check_invariants(now)
            if self._lives[machine] != server.incarnation:
                self._lives[machine] = server.incarnation
                self._devices[machine].restart()
            self._devices[machine].follow(event, commands)
            assert self._devices[machine].used <= self._budget[machine], f"{machine} is over its memory budget"
            for command in commands:
                if isinstance(command, StartBatch):
                    self._check_batch(command, now)

    def _check_reply(self, reply: Reply, now: float) -> None:
        request = self._requests[reply.request_id]
        assert reply.request_id not in self.outcomes, f"request {reply.request_id} is answered twice"
        self.outcomes[reply.request_id] = reply.outcome
        assert tuple(item.item for item in reply.items) == request.items, "a reply with other items than its request"
        if request.deadline is not None:
            assert now <= request.deadline + LATE, f"request {reply.request_id} is {now - request.deadline:.3f} s late"
        for item in reply.items:
            if item.outcome is Outcome.ANSWERED:
                assert len(item.widths) == len(item.servers) == SEGMENTS, f"item {item.item} did not run to the end"
                exact = request.constraints.widths if request.constraints else None
                assert exact in (None, item.widths), f"item {item.item} ran at {item.widths}, asked was {exact}"
                assert item.margin in (None, margin_of(item.item, item.widths)), f"item {item.item}: another's margin"
            self.second_passes += item.passes == 2
            if item.other_widths and item.outcome is not Outcome.ANSWERED:
                assert item.outcome is Outcome.CANCELLED, f"item {item.item} had an answer and is {item.outcome}"

    def _check_batch(self, command: StartBatch, now: float) -> None:
        batch = command.batch
        for task in batch.tasks:
            assert task.deadline is None or task.deadline > now, f"expired task {task.task_id} runs"
            assert (task.segment, task.previous_width) == (batch.segment, batch.previous_width), "a mixed batch"
            assert task.item in self._by_item
        assert len({task.task_id for task in batch.tasks}) == len(batch.tasks), "a task twice in a batch"

    def check_end(self) -> None:
        """Every request has its one outcome, and the books agree."""
        missing = self._requests.keys() - self.outcomes.keys()
        assert not missing, f"requests without an outcome: {sorted(missing)}"
        counts = self.simulation.dispatcher.counts
        for kind, received in (("requests", len(self._requests)), ("items", len(self._by_item))):
            assert counts[kind]["received"] == received
            assert counts[kind]["in_flight"] == 0
        self.simulation.dispatcher.check_invariants()


class _Memory:
    """What really lies on a device, counted apart from the scheduler's own ledger, and what runs there."""

    def __init__(self, max_batch: int, concurrency: int) -> None:
        self._max_batch = max_batch
        self._concurrency = concurrency
        self._shape = small_shape()
        self.restart()

    def restart(self) -> None:
        self._sizes: dict[int, int] = {}
        self._ready: set[int] = set()
        self._busy: dict[int, int] = {}

    @property
    def used(self) -> int:
        return sum(self._sizes.values())

    def follow(self, event: Message, commands: Sequence[Any]) -> None:
        if isinstance(event, InstanceReady):
            self._ready.add(event.instance)
        elif isinstance(event, InstanceUnloaded):
            del self._sizes[event.instance]
        elif isinstance(event, BatchDone):
            del self._busy[event.batch_id]
        for command in commands:
            if isinstance(command, LoadInstance):
                self._sizes[command.instance] = command.reserved
            elif isinstance(command, UnloadInstance):
                assert command.instance not in self._busy.values(), "a busy instance is unloaded"
                self._ready.remove(command.instance)
            elif isinstance(command, StartBatch):
                batch = command.batch
                assert batch.instance in self._ready, "a batch on an instance that is not loaded"
                assert batch.instance not in self._busy.values(), "two batches on one instance"
                assert 0 < len(batch.tasks) <= self._max_batch, "batch size"
                self._busy[batch.batch_id] = batch.instance
                if command.build_variant:
                    self._sizes[batch.instance] += self._shape.variant(batch.segment, batch.previous_width, batch.width)
        assert len(self._busy) <= self._concurrency, "too many batches at once"


def fault_run(seed: int, folder: Path, log: list[str] | None = None) -> Watcher:
    """Runs the seed to its end. Raises AssertionError where a guarantee does not hold."""
    rng = default_rng(seed)
    config = _cluster(rng, folder)
    requests = _requests(rng)
    watcher = Watcher(config, requests)
    watcher.log = log
    router = ROUTERS[int(rng.integers(len(ROUTERS)))]
    simulation = watcher.simulation = Simulation(
        config, router, seed, recorder=watcher, arrivals=NOBODY, margin=margin_of
    )
    for request in requests:
        simulation.submit(request)
        if rng.random() < 0.1:
            simulation.cancel(request.request_id, request.arrival + float(rng.exponential(0.2)))
    for server in config.servers:
        simulation.schedule(FaultChange(FAULTS_OVER, True, FaultConfig(server=server.name, at_s=0.0, kind="recover")))
    while not simulation.done and (len(watcher.outcomes) < len(requests) or simulation.agenda.now < FAULTS_OVER):
        simulation.step()
    watcher.check_end()
    return watcher


def _cluster(rng: Generator, folder: Path) -> Config:
    servers = [_server(rng) for _ in range(int(rng.integers(1, 5)))]
    names = "abcd"[: len(servers)]
    period = float(rng.uniform(0.05, 0.2))
    faults = random_faults(rng, names, FAULTS_OVER)
    return small_cluster(
        folder,
        servers,
        faults=[{f: getattr(fault, f) for f in fault.__struct_fields__} for fault in faults],
        network={
            "latency_ms": float(rng.choice([0.0, 1.0, 20.0])),
            "mbps": float(rng.choice([10.0, 1000.0])),
            "activations": bool(rng.random() < 0.5),
        },
        telemetry={"period_s": period, "age_s": float(rng.choice([0.0, 0.0, 0.3]))},
        dispatch={
            "reentry": str(rng.choice(["back", "oldest-item"])),
            "max_waiting_items": int(rng.choice([20, 1000])),
            "max_activation_mib": float(rng.choice([0.05, 100.0])),
            "heartbeat_timeout_s": 3 * period,
            "no_server_timeout_s": float(rng.uniform(0.5, 2.0)),
            "queue": str(rng.choice(["fifo", "shortest", "least-slack"])),
            "queue_bound_s": 0.3,
        },
        router={"groups": [1, 4, 8]},
        workload={"duration_s": DURATION},
    )


def _server(rng: Generator) -> dict[str, Any]:
    return {
        "slowdown": float(rng.uniform(0.2, 2.0)),
        "max_batch": int(rng.choice([2, 8])),
        "max_concurrent_batches": int(rng.integers(1, 3)),
        "credit_tasks": int(rng.choice([4, 16])),
        # The largest instance with all its variants is 256 KB: room for one, two, or all.
        "vram_budget_gib": float(rng.choice([300e3, 600e3, 4e6])) / 2**30,
        "idle_unload_s": float(rng.choice([0.2, 30.0])),
        "scale_queue_threshold": int(rng.choice([2, 16])),
        "utilization_block": float(rng.choice([0.3, 0.95, 2.0])),
        "batch_window_ms": (0.0, 30.0, "auto")[int(rng.integers(3))],
        "tile": (1, 4, "auto")[int(rng.integers(3))],
    }


def _requests(rng: Generator) -> list[Request]:
    requests: list[Request] = []
    now, item = 0.0, 0
    rate = float(rng.uniform(5.0, 40.0))
    while (now := now + float(rng.exponential(1 / rate))) < ARRIVALS_OVER:
        count = int(rng.integers(1, 5))
        deadline = now + float(rng.uniform(0.02, 2.0)) if rng.random() < 0.6 else None
        exact = tuple(float(w) for w in rng.choice(WIDTHS, SEGMENTS)) if rng.random() < 0.15 else None
        items = tuple(range(item, item + count))
        constraints = TaskConstraints(widths=exact) if exact else None
        requests.append(Request(len(requests), items, now, deadline, int(rng.integers(3)), constraints))
        item += count
    return requests
