"""The cluster and load of one training episode: the configured ones, or others like them.

A policy that is to serve any cluster must have seen many: how many servers, how slow each, how much load. The load
follows the drawn servers' capacity, so that a factor of 1 means as busy as configured.
"""

import msgspec
from numpy.random import Generator

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import cluster_capacity
from slim_scheduler.core.router.learned.router import policy_plans
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.router.plan.waiting import waiting
from slim_scheduler.core.types import Seconds
from slim_scheduler.setup.config import Config, ServerConfig
from slim_scheduler.setup.machines import in_items_per_second, load_profiles, load_shape, router_facts


class Scenario(msgspec.Struct, frozen=True):
    """What an episode runs, and the facts its router knows. `backlog`: seconds of arrivals that wait at its start."""

    config: Config
    facts: RouterFacts
    backlog: Seconds


class PlansOf:
    """Plans of the cluster that was last asked for: episodes on one cluster share them."""

    def __init__(self, accuracy: AccuracyTable, config: Config) -> None:
        self._accuracy = accuracy
        self._training = config.training
        self._escalates = config.router.escalation
        self._waiting = waiting(config.training.plan_queue_s, config.reward)
        self._plans: Plans | None = None

    def __call__(self, facts: RouterFacts) -> Plans:
        if self._plans is None or self._plans.facts is not facts:
            training = self._training
            self._plans = policy_plans(facts, self._accuracy, training.plan_rho, self._escalates, self._waiting)
        return self._plans


class Scenarios:
    """Draws scenarios from what `[training]` allows. Raises InputError."""

    def __init__(self, config: Config) -> None:
        _check_trace(config)
        self._config = config = in_items_per_second(config)
        self._shape = load_shape(config)
        self.facts = self._facts(config)
        self._capacity = cluster_capacity(self.facts)

    def draw(self, rng: Generator) -> Scenario:
        training, config, facts = self._config.training, self._config, self.facts
        factor = float(rng.uniform(*training.loads))
        if training.servers is not None:
            fewest, most = training.servers
            config = msgspec.structs.replace(
                config, servers=self._servers(int(rng.integers(fewest, most + 1)), rng), faults=()
            )
            facts = self._facts(config)
            factor *= cluster_capacity(facts) / self._capacity
        kind = "poisson" if config.workload.kind == "steps" else config.workload.kind  # one load per episode
        workload = msgspec.structs.replace(config.workload, kind=kind, rate=factor * config.workload.rate)
        backlog = max(0.0, float(rng.uniform(-1.0, 1.0))) * training.backlog_s
        return Scenario(msgspec.structs.replace(config, workload=workload), facts, backlog)

    def _servers(self, count: int, rng: Generator) -> tuple[ServerConfig, ...]:
        """Copies of configured servers, each at a slowdown drawn evenly on a logarithmic scale."""
        models = self._config.servers
        return tuple(
            msgspec.structs.replace(
                models[int(rng.integers(len(models)))],
                name=f"{i}",
                slowdown=float(self._config.training.slowdown ** rng.random()),
            )
            for i in range(count)
        )

    def _facts(self, config: Config) -> RouterFacts:
        return router_facts(config, self._shape, load_profiles(config, self._shape))


def _check_trace(config: Config) -> None:
    """Raises ConfigError where loads are to be drawn, but arrivals are a trace's as recorded, whatever the rate."""
    workload, training = config.workload, config.training
    if workload.kind != "trace" or workload.trace_at_rate:
        return
    loads = None if training.loads == (1.0, 1.0) else training.loads
    for key, drawn in (("loads", loads), ("servers", training.servers)):
        if drawn is not None:
            raise ConfigError(
                f"training.{key} is {drawn[0]:g} to {drawn[1]:g}, but a trace as recorded has one load; "
                "set workload.trace_at_rate=true"
            )
