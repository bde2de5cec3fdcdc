"""What the engine costs: a saturated live server against a bare loop over the same slices, batch and threads.

Both sides take turns in one process and run. The engine serves single-item requests from a closed loop that always
has several full batches waiting; the bare loop runs the four segments one after the other on one fixed batch. Rates are
medians over the rounds. The CPU time that the pure machines take is reported as a share of the whole process's.
"""

import asyncio
import platform
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.model.presets import preset_named
from slim_scheduler.model.shape import shape_of
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.setup.config import Config, config_from

PRESET = "cifar100"  # the paper's size; weights are random, which costs the same
BATCH = 32
THREADS = 1
OUTSTANDING = 4 * BATCH
ROUNDS = 5
BATCHES_PER_ROUND = {1.0: 4, 0.25: 40}  # about as long for either width
WARM_BATCHES = 2
TARGETS = {1.0: 0.92, 0.25: 0.70}


class Stopwatch:
    """A machine whose `handle` is timed in CPU seconds of the event loop's thread."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self.seconds = 0.0

    def handle(self, event: Any, now: float) -> Any:
        begin = time.thread_time()
        commands = self._machine.handle(event, now)
        self.seconds += time.thread_time() - begin
        return commands

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def run() -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    model = SlimResNet(preset_named(PRESET).architecture, PRESET).eval().requires_grad_(False)
    results = {}
    for width in (1.0, 0.25):
        results |= asyncio.run(_compare(model, width))
    return results


async def _compare(model: SlimResNet, width: float) -> dict[str, dict[str, Any]]:
    shape = shape_of(model)
    images = np.random.default_rng(0).standard_normal((BATCH, *shape.item_shape), dtype=np.float32)
    bare = BareLoop(model, width, images)
    batches = BATCHES_PER_ROUND[width]
    ours, theirs, core, tasks, cpu = [], [], 0.0, 0, 0.0
    async with SlimEngine(_config(width), model, shape) as engine:
        machines = _timed(engine)
        await _serve(engine, images, WARM_BATCHES, 0)
        await asyncio.to_thread(bare.rate, 2)
        for i in range(ROUNDS):
            for machine in machines:
                machine.seconds = 0.0
            before = time.process_time()
            ours.append(await _serve(engine, images, batches, WARM_BATCHES))
            cpu += time.process_time() - before
            core += sum(machine.seconds for machine in machines)
            tasks += (batches + WARM_BATCHES) * BATCH * shape.segments
            theirs.append(await asyncio.to_thread(bare.rate, batches))
            _say(f"width {width:g}: round {i + 1} of {ROUNDS}: {ours[-1]:.1f} against {theirs[-1]:.1f} items/s")
    versions = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": device_name("cpu"),
        "network": f"{PRESET}, random weights, batch {BATCH}, {THREADS} thread",
    }
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        f"engine_overhead_width_{width:g}": {
            "ratio": round(float(np.median(ratios)), 4),
            "ours": round(float(np.median(ours)), 1),
            "theirs": round(float(np.median(theirs)), 1),
            "unit": "items/s",
            "target": TARGETS[width],
            "rounds": [round(ratio, 4) for ratio in ratios],
            "versions": versions,
        },
        f"core_time_share_width_{width:g}": {
            "ratio": round(core / cpu, 5),
            "ours": round(core / tasks * 1e6, 2),
            "theirs": round(cpu / tasks * 1e6, 1),
            "unit": "CPU microseconds per task: the pure machines, against the whole process",
            "target": 0.05 if width == 1.0 else None,
            "versions": versions,
        },
    }


class BareLoop:
    """The four segments in sequence on one thread, and nothing else."""

    def __init__(self, model: SlimResNet, width: float, images: np.ndarray) -> None:
        self._width = width
        self._images = torch.from_numpy(images)
        self._slices = [model.slice(segment, width, "cpu") for segment in range(model.segments)]
        for segment in self._slices[1:]:
            segment.build_variant(width)

    def rate(self, batches: int) -> float:
        """Items per second over so many batches, after one more to warm up. Runs in a thread of its own."""
        seconds: list[float] = []
        thread = threading.Thread(target=lambda: seconds.append(self._run(batches)))
        thread.start()
        thread.join()
        return batches * BATCH / seconds[0]

    def _run(self, batches: int) -> float:
        torch.get_num_threads()  # see CpuDevice.thread
        torch.set_num_threads(THREADS)
        with torch.inference_mode():
            self._once()
            begin = time.perf_counter()
            for _ in range(batches):
                self._once()
            return time.perf_counter() - begin

    def _once(self) -> torch.Tensor:
        x, previous = self._images, None
        for segment in self._slices:
            x = segment.run(x, previous)
            previous = self._width
        return x


async def _serve(engine: SlimEngine, images: np.ndarray, batches: int, warm: int) -> float:
    """Items per second from a closed loop: between the answers that end the warm-up and those that end the round."""
    total, first = (warm + batches) * BATCH, warm * BATCH
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    ended = loop.create_future()
    sent = answered = 0

    def send() -> None:
        nonlocal sent
        sent += 1
        engine.submit(images[sent % BATCH][None]).add_done_callback(receive)

    def receive(done: asyncio.Future) -> None:
        nonlocal answered, begun
        assert done.result().logits is not None, done.result().reason
        answered += 1
        if answered == first:
            begun = time.perf_counter()
        if answered == total:
            ended.set_result(time.perf_counter())
        if sent < total + OUTSTANDING:  # the queue stays full to the end
            send()

    for _ in range(OUTSTANDING):
        send()
    rate = (total - first) / (await ended - begun)
    while engine.counts["items"]["in_flight"]:
        await asyncio.sleep(0.005)
    return rate


def _config(width: float) -> Config:
    return config_from(
        {
            "servers": [{"name": "a", "device": "cpu", "max_batch": BATCH, "threads": THREADS}],
            "router": {"name": f"jsq:{width:g}", "fallback": f"jsq:{width:g}"},
        }
    )


def _timed(engine: SlimEngine) -> list[Stopwatch]:
    host = engine._host
    host.dispatcher = Stopwatch(host.dispatcher)
    watches = [host.dispatcher]
    for server in engine.fleet.servers.values():
        server.scheduler = Stopwatch(server.scheduler)
        watches.append(server.scheduler)
    return watches


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
