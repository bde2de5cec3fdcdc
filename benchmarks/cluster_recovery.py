"""A server is killed: how throughput recovers live, on a Ray cluster, and what the simulator's fault model predicts.

Same configuration, arrivals and router; the simulated one lasts as long as the live server was away. Draws both
curves into docs/figures/cluster-recovery.svg, and measures how far they lie apart.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.core.messages import Message, Reply, ServerChanged, ServerReported
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.cluster.fleet import ClusterFleet
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.setup.config import Config, FaultConfig, config_from
from slim_scheduler.setup.machines import load_shape
from slim_scheduler.setup.workload import Arrivals
from slim_scheduler.sim.host import simulate

FIGURE = Path("docs/figures/cluster-recovery.svg")
KILLED, DURATION = 6.0, 16.0
NAMES = "abc"
SERVERS = len(NAMES)
RATE = 80.0  # items per second; two of the three servers carry it, unless the machine is too slow
BIN = 0.25
SEED = 3


class Answers:
    """A recorder that keeps when items were answered, when servers went and came, and how busy they said they were."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.changes: list[tuple[float, ServerChanged]] = []
        self.busy: list[tuple[float, float]] = []  # (when, share of one server's time)

    def step(self, machine: str, now: float, event: Message, commands: Sequence[Any]) -> None:
        if isinstance(event, ServerReported) and event.report.utilization is not None:
            self.busy.append((now, event.report.utilization))
        for command in commands:
            if isinstance(command, Reply) and command.outcome is Outcome.ANSWERED:
                self.times += [now] * len(command.items)
            elif isinstance(command, ServerChanged):
                self.changes.append((now, command))

    def rates(self, start: float) -> npt.NDArray[np.float64]:
        edges = np.arange(0.0, DURATION + BIN / 2, BIN)
        return np.histogram(np.array(self.times) - start, edges)[0] / BIN


def run() -> dict[str, dict[str, Any]]:
    config = _config()
    arrivals = _steady()
    live, start = asyncio.run(_live(config, arrivals))
    down, up = (at - start for at, _ in live.changes[:2])
    simulated = Answers()
    fault = FaultConfig(server="b", at_s=KILLED, kind="exit", duration_s=up - KILLED)
    simulate(
        msgspec.structs.replace(config, faults=(fault,)),
        config.router.name,
        SEED,
        recorder=simulated,
        arrivals=arrivals,
    )
    predicted = simulated.changes[0][0]
    curves = {"live": live.rates(start), "simulated": simulated.rates(0.0)}
    busy = SERVERS * float(np.mean([share for at, share in live.busy if start + 1.0 < at < start + KILLED]))
    if busy > SERVERS - 1:
        text = "servers were busy before the kill: those left cannot carry the load here, so recovery is not measured"
        print(f"{busy:.2f} of {SERVERS} {text}", file=sys.stderr)
    _draw(curves, up)
    lost = {name: float(RATE * BIN * np.sum(1 - _during_fault(rates) / RATE)) for name, rates in curves.items()}
    return {
        "cluster recovery": {
            "ratio": (down - KILLED) / (predicted - KILLED),
            "ours": round(down - KILLED, 3),
            "theirs": round(predicted - KILLED, 3),
            "unit": "s from the kill to its detection, live against simulated",
            "busy_servers_before": round(busy, 2),
            "returned_s": round(up - KILLED, 2),
            "back_at_90_percent_s": {name: _back(rates) for name, rates in curves.items()},
            "items_behind_after_2_s": {name: round(items, 1) for name, items in lost.items()},
        }
    }


def _steady() -> Arrivals:
    """Evenly spaced single items: a Poisson stream's own ups and downs are larger than what one server's loss does."""
    items = round(RATE * DURATION)
    return Arrivals(np.arange(items) / RATE, np.arange(items), np.ones(items, np.int64), np.zeros(items, np.int64))


async def _live(config: Config, arrivals: Arrivals) -> tuple[Answers, float]:
    answers = Answers()
    engine = SlimEngine.from_config(config, seed=SEED, recorder=answers)
    assert isinstance(engine.fleet, ClusterFleet)
    item = np.zeros((1, *load_shape(config).item_shape), np.float32)
    await engine.start()
    for _ in range(5):  # every server has its instances before the run begins, as the simulated ones soon do
        await asyncio.gather(*[engine.infer(item) for _ in range(64)])
    answers.times.clear()
    victim = engine.fleet.servers["b"].place.process
    start, killed = engine.now(), False
    waiting = []
    for time in arrivals.times.tolist():
        await asyncio.sleep(max(0.0, start + time - engine.now()))
        if not killed and time >= KILLED:
            os.kill(victim, signal.SIGKILL)
            killed = True
        waiting.append(engine.submit(item, arrival=start + time))
    await asyncio.wait(waiting)
    async with asyncio.timeout(60):
        while len(answers.changes) < 2:
            await asyncio.sleep(0.1)
    await engine.stop(grace_s=0)
    return answers, start


def _config() -> Config:
    servers = [{"name": n, "device": "cpu", "slowdown": 15.0, "vram_budget_gib": 1.0, "max_batch": 16} for n in NAMES]
    return config_from(
        {
            "model": {"path": "models/digits"},
            "cluster": {"address": "local"},
            "servers": servers,
            "network": {"latency_ms": 1.0},
            "router": {"name": "jsq:0.5", "fallback": "jsq:0.5"},
            "workload": {"rate": RATE, "duration_s": DURATION},
        }
    )


def _during_fault(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return rates[round(KILLED / BIN) : round((KILLED + 2.0) / BIN)]


def _back(rates: npt.NDArray[np.float64]) -> float | None:
    """Seconds after the kill from which on a second's throughput is 90 % of the load."""
    second = round(1.0 / BIN)
    sums = np.convolve(rates, np.ones(second) / second, "valid")
    after = sums[round(KILLED / BIN) :]
    low = np.flatnonzero(after < 0.9 * RATE)
    first = low[low < round(4.0 / BIN)]
    return 0.0 if not len(first) else float((first[-1] + 1) * BIN)


def _draw(curves: dict[str, npt.NDArray[np.float64]], returned: float) -> None:
    from slim_scheduler.report.theme import SOFT, drawing, series

    with drawing() as figure:
        axes = figure.subplots()
        for i, (name, rates) in enumerate(curves.items()):
            color, dash = series(i)
            axes.step(np.arange(len(rates)) * BIN, rates, where="post", color=color, ls=dash, label=name)
        axes.axvline(KILLED, color=SOFT, lw=0.8)
        axes.text(KILLED, axes.get_ylim()[1], "server killed ", color=SOFT, va="top", ha="right", fontsize=8)
        if returned < DURATION:
            axes.axvline(returned, color=SOFT, lw=0.8, ls=":")
            axes.text(returned, axes.get_ylim()[1], " back", color=SOFT, va="top", fontsize=8)
        axes.axhline(RATE, color=SOFT, lw=0.6, ls="--")
        axes.set_xlabel("time, s")
        axes.set_ylabel("items answered per second")
        axes.set_ylim(0)
        axes.legend(frameon=False, loc="lower right")
        FIGURE.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(FIGURE, facecolor="white")
