"""A router under steady load whose servers are killed, stopped, or lose their machine: the program of the ledger tests.

    python -m tests.cluster.ledger_run ADDRESS FAULT...

It runs in a process of its own, in the router's network namespace where there is one, and prints one line of JSON when
it is ready and one with what it saw. A FAULT is `kill`, `stop`, `remove-node`, `lossy:SECONDS` (1 % of the messages
each lost, doubled and delayed), `healthy:SECONDS`, or `wait`, which serves until it is killed itself.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import ray

from slim_scheduler.core.messages import Message, Reply, ServerChanged, StartBatch
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.cluster.fleet import ClusterFleet
from slim_scheduler.engine.cluster.remote_server import RemoteServer
from slim_scheduler.engine.engine import InferenceResult, SlimEngine
from tests.cluster.lossy_transport import LossyTransport
from tests.engine.live import NETWORK, SHAPE, TOLERANCE, Watch, config_of, expected, images
from tests.stalls import Stalls

RATE, SHARE = 60.0, 0.25  # items per second, but no more than so much of what the three servers carry on this machine
CALLERS, ASKED = 12, 16  # so many at a time, each so often, show what they carry
DEADLINE = 6.0
SETTLED = 2.0  # seconds of undisturbed load before and after a fault
STOPPED = 1.6  # a stopped server goes on after so long
RETURN_LIMIT = 90.0  # Ray gives up a lost machine and starts its servers elsewhere
WINDOW = 1.0  # throughput is taken over so long
FALL = 2.0  # seconds after a fault in which throughput may fall because of it; later, Ray starts processes on our cores
SLOW = {"slowdown": 12.0, "max_batch": 16, "resources": {"slot": 1}}  # they wait, so that the cores are not the limit


class Load:
    """Open-loop requests of one item each, and the answer to each, after a closed loop that finds the rate."""

    def __init__(self, engine: SlimEngine) -> None:
        self.images = images(256, seed=5)
        self.results: list[tuple[int, InferenceResult]] = []
        self.ended: list[float] = []
        self.late: list[tuple[float, float]] = []  # (deadline, when the answer came)
        self._engine = engine
        self.rate = RATE
        self._waiting: list[asyncio.Future[InferenceResult]] = []

    async def start(self) -> None:
        for _ in range(2):  # the first time loads every instance
            begin = self._engine.now()
            await asyncio.gather(*[self._call() for _ in range(CALLERS)])
            carried = CALLERS * ASKED / (self._engine.now() - begin)
        self.rate = min(RATE, SHARE * carried)
        self._task = asyncio.create_task(self._offer())

    async def _call(self) -> None:
        for _ in range(ASKED):
            await self._submit(self._engine.now())

    async def _offer(self) -> None:
        begin, i = self._engine.now(), 0
        while True:
            at = begin + i / self.rate
            await asyncio.sleep(max(0.0, at - self._engine.now()))
            self._submit(at)
            i += 1

    def _submit(self, at: float) -> "asyncio.Future[InferenceResult]":
        sample = self.submitted % len(self.images)
        future = self._engine.submit(self.images[sample : sample + 1], deadline_s=DEADLINE, arrival=at)
        future.add_done_callback(lambda done: self._note(sample, at, done.result()))
        self._waiting.append(future)
        return future

    def _note(self, sample: int, at: float, result: InferenceResult) -> None:
        now = self._engine.now()
        self.results.append((sample, result))
        self.late.append((at + DEADLINE, now))
        if result.outcome is Outcome.ANSWERED:
            self.ended.append(now)

    async def finish(self) -> None:
        self._task.cancel()
        await asyncio.wait(self._waiting, timeout=DEADLINE + 2)

    @property
    def submitted(self) -> int:
        return len(self._waiting)

    def back_after(self, fault: float) -> float | None:
        """Seconds from the fault to where throughput, over a window, is 90 % of the load again; 0 if it never fell."""
        ended = np.array(self.ended)
        begins = np.arange(fault, ended[-1] - WINDOW, 0.05)
        enough = np.array([np.sum((ended >= at) & (ended < at + WINDOW)) for at in begins]) >= 0.9 * self.rate * WINDOW
        fallen = np.flatnonzero(~enough[: round(FALL / 0.05)])
        if not len(fallen):
            return 0.0
        again = np.flatnonzero(enough[fallen[0] :])
        return round(0.05 * int(fallen[0] + again[0]), 2) if len(again) else None

    def latest(self, stalls: Stalls, clock: float) -> dict[str, float]:
        """The latest answer after its deadline, in all and beyond the stalls of this process since the deadline.

        `clock` is the event loop's time at the engine's time 0.
        """
        late = [(end, end - deadline, deadline) for deadline, end in self.late if end > deadline]
        beyond = [by - stalls.between(clock + deadline, clock + end) for end, by, deadline in late]
        return {"latest": max((by for _, by, _ in late), default=0.0), "beyond_stalls": max(beyond, default=0.0)}

    def wrong(self) -> int:
        """Answers that are not the network's own at the widths that ran."""
        by_widths: dict[tuple[float, ...], list[tuple[int, np.ndarray]]] = {}
        for sample, result in self.results:
            if result.logits is not None:
                by_widths.setdefault(result.items[0].widths, []).append((sample, result.logits[0]))
        wrong = 0
        for widths, answers in by_widths.items():
            truth = expected(self.images[[sample for sample, _ in answers]], widths)
            given = np.stack([logits for _, logits in answers])
            wrong += int(np.sum(np.abs(truth - given).max(axis=1) > TOLERANCE))
        return wrong


class Story:
    """Faults one after the other under load, and what the router noticed of each."""

    def __init__(self, engine: SlimEngine, watch: Watch, load: Load, transport: LossyTransport, stalls: Stalls) -> None:
        self.faults: list[dict[str, Any]] = []
        self._engine = engine
        self._stalls = stalls
        self._watch = watch
        self._load = load
        self._transport = transport

    async def tell(self, fault: str) -> None:
        kind, _, seconds = fault.partition(":")
        if kind == "wait":
            await asyncio.Event().wait()
        elif kind in ("lossy", "healthy"):
            self._transport.share = 0.01 if kind == "lossy" else 0.0
            await asyncio.sleep(float(seconds))
            self._transport.share = 0.0
        else:
            await self._strike(kind)
            await asyncio.sleep(SETTLED)

    async def _strike(self, kind: str) -> None:
        """Strikes a server in mid-batch, and waits until it has been taken out of service and is back."""
        victim = self._victim()
        down = asyncio.ensure_future(self._watch.until(changed(victim.name, up=False)))
        await self._watch.until(lambda machine, m: machine == victim.name and isinstance(m, StartBatch))
        at = self._engine.now()
        FAULTS[kind](victim)
        noticed = await down
        await self._stalls.settled()
        stalled = self._stalls.longest(self._engine.now() - at)
        self.faults.append({"kind": kind, "at": at, "detected": noticed - at, "stalled": stalled})
        if kind == "stop":
            await asyncio.sleep(STOPPED - (self._engine.now() - at))
            os.kill(victim.place.process, signal.SIGCONT)
        await self._all_up()

    async def _all_up(self) -> None:
        async with asyncio.timeout(RETURN_LIMIT):
            while not all(view.up for view in self._engine.servers.values()):
                await asyncio.sleep(0.1)

    def _victim(self) -> RemoteServer:
        """A server that is not on the router's own machine, or any where all are."""
        here = ray.get_runtime_context().get_node_id()
        servers = [s for s in self._engine.fleet.servers.values() if self._engine.servers[s.name].up]
        return next((s for s in servers if s.place.node != here), servers[-1])


def changed(name: str, up: bool) -> Callable[[str, Message], bool]:
    return lambda _, m: isinstance(m, ServerChanged) and m.server == name and m.up is up


def remove_node(victim: RemoteServer) -> None:
    """The machine is gone: its Ray daemon and all its processes at once."""
    daemon = psutil.Process(victim.place.process).parent()
    assert daemon is not None
    for process in (daemon, *daemon.children(recursive=True)):
        process.kill()


FAULTS: dict[str, Callable[[RemoteServer], None]] = {
    "kill": lambda victim: os.kill(victim.place.process, signal.SIGKILL),
    "stop": lambda victim: os.kill(victim.place.process, signal.SIGSTOP),
    "remove-node": remove_node,
}


async def run(address: str, faults: list[str]) -> dict[str, Any]:
    watch, transport = Watch(), LossyTransport(np.random.default_rng(11))
    config = config_of(
        (SLOW, SLOW, SLOW),
        cluster={"address": address},
        dispatch={"no_server_timeout_s": 10.0},
        router={"name": "jsq:random+1@0.016", "fallback": "jsq:0.5"},  # about half of the items run again
    )
    engine = SlimEngine(config, NETWORK, SHAPE, recorder=watch, fleet=partial(ClusterFleet, transport=transport))
    await engine.start()
    print(json.dumps({name: server.place.process for name, server in engine.fleet.servers.items()}), flush=True)
    load = Load(engine)
    await load.start()
    stalls = Stalls()
    story = Story(engine, watch, load, transport, stalls)
    await asyncio.sleep(SETTLED)
    for fault in faults:
        await story.tell(fault)
    await load.finish()
    await stalls.settled()
    clock = asyncio.get_running_loop().time() - engine.now()
    lateness = load.latest(stalls, clock)
    counts, ledger = engine.counts["items"], engine.fleet.items
    await engine.stop(grace_s=0)
    return {
        "submitted": load.submitted,
        "rate": load.rate,
        "answers": len(load.results),
        "replies": len(watch.seen(Reply)),
        "outcomes": Counter(result.outcome for _, result in load.results),
        "unexplained": [result.outcome for _, result in load.results if result.logits is None and not result.reason],
        "wrong": load.wrong(),
        **lateness,
        "latency_s": {p: float(np.percentile([end - at for at, end in load.late], p)) + DEADLINE for p in (50, 95, 99)},
        "faults": [fault | {"back": load.back_after(fault["at"])} for fault in story.faults],
        "changes": [(m.server, m.up, m.reason) for m in watch.seen(ServerChanged)],
        "counts": counts,
        "held": len(ledger) + len(ledger._locations) + len(ledger._attempts),
        "transport": dict(transport.done),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2:]))), flush=True)
