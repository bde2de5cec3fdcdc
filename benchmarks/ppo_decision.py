"""A decision of the learned router against a bare NumPy forward of the same network, on three servers: the observation
`extended` on the demo's, `planned` on the reference cluster's.

Both are timed in turn on the same views of one simulated run, so that a busy machine slows both alike. "Theirs" is the
bare forward.
"""

import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from slim_scheduler.core.messages import Message
from slim_scheduler.core.router.learned.encoders import build_encoder
from slim_scheduler.core.router.learned.policy import build_network
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.setup.accuracy_files import read_accuracy
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import load_profiles, load_shape, router_facts
from slim_scheduler.setup.policy_files import load_router, read_policy
from slim_scheduler.sim.host import Simulation

CASES = {  # configuration, policy, items per second
    "ppo_decision": (Path("examples/demo/cluster.toml"), Path("examples/demo/policies/balanced"), 900.0),
    "ppo_decision_planned": (
        Path("examples/reference/below.toml"),
        Path("examples/reference/policies/responsive"),
        6094.0,
    ),
}
DECISIONS = 5_000


class _Nobody:
    def step(self, machine: str, now: float, event: Message, commands: list[Any]) -> None: ...


def run() -> dict[str, Any]:
    return {name: _measured(*case) for name, case in CASES.items()}


def _measured(file: Path, policy: Path, rate: float) -> dict[str, Any]:
    config = load_config(file, (f"workload.rate={rate}",))
    shape = load_shape(config)
    facts = router_facts(config, shape, load_profiles(config, shape))
    manifest, parameters = read_policy(policy)
    accuracy = partial(read_accuracy, config.model.path)
    router = load_router(policy, facts, accuracy)
    network = build_network(manifest.kind, parameters)
    encoder = build_encoder(manifest.kind, facts, manifest.batch_time, lambda: Plans(facts, accuracy()))
    rng = np.random.default_rng(0)
    simulation = Simulation(config, "ppo", 0, recorder=_Nobody(), router=router)
    decisions, forwards = [], []
    while len(decisions) < DECISIONS and (view := simulation.run_until_decision()) is not None:
        observation = encoder.encode(view)
        began = time.perf_counter()
        network.forward(observation)
        between = time.perf_counter()
        router.decide(view, rng)
        ended = time.perf_counter()
        forwards.append(between - began)
        decisions.append(ended - between)
        simulation.decide()
    ours, theirs = (float(np.median(times)) * 1e6 for times in (decisions, forwards))
    return {
        "ratio": ours / theirs,
        "ours": round(ours, 1),
        "theirs": round(theirs, 1),
        "unit": "us per decision (median)",
        "versions": {"slim-scheduler": version("slim-scheduler"), "numpy": version("numpy")},
    }
