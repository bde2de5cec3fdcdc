"""Clusters of small devices, written to a folder as a user would have them, and an observer that remembers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slim_scheduler.core.messages import Message
from slim_scheduler.core.types import Request
from slim_scheduler.setup.config import Config, config_from
from slim_scheduler.setup.profiles import write_profile
from slim_scheduler.setup.workload import Arrivals
from slim_scheduler.sim.host import Simulation
from tests.sim.devices import small_profile, small_shape

NOBODY = Arrivals(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def small_cluster(folder: Path, servers: Sequence[dict[str, Any]] = ({},), **sections: Any) -> Config:
    """Servers a, b, c, ... on the small device; `servers` holds what differs, `sections` the rest of the TOML."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"shape": msgspec.to_builtins(small_shape())}))
    profile = folder / "small.json"
    if not profile.exists():
        write_profile(small_profile(), profile)
    common = {"device": "small", "profile": str(profile), "max_batch": 8, "max_concurrent_batches": 1}
    tree = {
        "model": {"path": str(folder)},
        "servers": [{"name": "abcdefgh"[i], **common, **changes} for i, changes in enumerate(servers)],
        "workload": {"duration_s": 3.0},
    }
    return config_from({**tree, **sections})


class Journal:
    """Every step of both machines, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float, Message, list[Message]]] = []

    def step(self, machine: str, now: float, event: Message, commands: Sequence[Message]) -> None:
        self.steps.append((machine, now, event, list(commands)))

    def commands(self, kind: type[Any]) -> Iterator[tuple[float, Any]]:
        return ((now, c) for _, now, _, commands in self.steps for c in commands if isinstance(c, kind))

    def events(self, machine: str, kind: type[Any]) -> Iterator[tuple[float, Any]]:
        return ((now, event) for m, now, event, _ in self.steps if m == machine and isinstance(event, kind))


def run_requests(config: Config, requests: Sequence[Request], router: str = "jsq:0.5", seed: int = 0) -> Journal:
    """Runs the cluster on these requests alone, to the end of the run."""
    journal = Journal()
    simulation = Simulation(config, router, seed, recorder=journal, arrivals=NOBODY)
    for request in requests:
        simulation.submit(request)
    simulation.run()
    return journal
