"""A fourth server comes while three are busy: throughput rises by its share, without an error, as it does live."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slim_scheduler.core.messages import Message, Reply, TasksReturned
from slim_scheduler.core.types import Outcome, Request
from slim_scheduler.sim.host import Simulation
from tests.sim.clusters import NOBODY, small_cluster

CLIENTS = 480  # as in tests/cluster/test_membership.py
JOINS, SEEN, SETTLED = 40.0, 30.0, 2.0  # seconds; the newcomer loads its instances before its throughput counts


class Crowd:
    """Clients that each send the next item when the last is answered; sees every step."""

    def __init__(self) -> None:
        self.simulation: Simulation
        self.answered: list[float] = []
        self.others: list[Message] = []
        self._sent = 0

    def send(self, now: float) -> None:
        self.simulation.submit(Request(self._sent, (self._sent,), now))
        self._sent += 1

    def step(self, machine: str, now: float, event: Message, commands: Sequence[Any]) -> None:
        for command in commands:
            if isinstance(command, Reply) and command.outcome is Outcome.ANSWERED:
                self.answered.append(now)
                self.send(now)
            elif isinstance(command, Reply | TasksReturned):
                self.others.append(command)

    def throughput(self, begin: float) -> float:
        times = np.array(self.answered)
        return float(np.sum((times >= begin) & (times < begin + SEEN))) / SEEN


def test_fourth_server_raises_throughput_by_at_least_80_percent_of_its_share_without_an_error(tmp_path: Path) -> None:
    duration = JOINS + SETTLED + SEEN
    config = small_cluster(tmp_path, [{"slowdown": 5.0}] * 4, workload={"duration_s": duration, "end": "cut"})
    crowd = Crowd()
    crowd.simulation = Simulation(config, "jsq:0.5", 0, recorder=crowd, arrivals=NOBODY, joins={"d": JOINS})
    for _ in range(CLIENTS):
        crowd.send(0.0)
    crowd.simulation.run()
    before, after = crowd.throughput(JOINS - SEEN), crowd.throughput(JOINS + SETTLED)
    assert not crowd.others
    assert after >= before * (1 + 0.8 / 3), f"{before:.0f} items/s with three servers, {after:.0f} with four"
