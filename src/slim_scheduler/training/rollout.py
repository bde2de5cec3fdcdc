"""Acting in the simulator with the NumPy policy: what one worker does, and the arrays it brings back.

Deterministic in (seed, worker, update): an episode begins at every update that is a multiple of `episode_rollouts`, so
that a run resumed there sees the same. What the decisions come to (returns, advantages) is `returns.py`'s business.
"""

from collections.abc import Mapping
from itertools import accumulate
from math import log
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

from slim_scheduler.core.router.base import Router
from slim_scheduler.core.router.costs import full_batch_time
from slim_scheduler.core.router.learned.encoders import build_encoder, escalation_of
from slim_scheduler.core.router.learned.observation import (
    Encoder,
    Floats,
    Observation,
)
from slim_scheduler.core.router.learned.policy import Network, build_network, softmax
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.types import Decision, Seconds
from slim_scheduler.core.view import View
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import build_router, router_accuracy
from slim_scheduler.training.episode import Credit, Episode, with_arrivals
from slim_scheduler.training.price import capacity_price
from slim_scheduler.training.scenario import PlansOf, Scenario, Scenarios

LARGEST_SEED = 2**31


class Steps(msgspec.Struct, frozen=True):
    """Consecutive decisions of one worker, one row each; server columns beyond a cluster's size are masked.

    `number` counts the worker's decisions on and on; `epsilon` is eq. 5's at that decision; `over` marks the last
    decision of a run that ended by itself; `cut` the last one before the episode was cut.
    """

    number: npt.NDArray[np.int64]  # (T,)
    at: npt.NDArray[np.float64]  # (T,) seconds
    shared: Floats  # (T, shared)
    servers: Floats  # (T, N, features)
    server_mask: npt.NDArray[np.bool_]  # (T, N)
    present: npt.NDArray[np.bool_]  # (T, N) rows that are servers and not padding
    width_mask: npt.NDArray[np.bool_]  # (T, W)
    group_mask: npt.NDArray[np.bool_]  # (T, G)
    action: npt.NDArray[np.int64]  # (T, 3)
    log_prob: Floats  # (T,)
    value: Floats  # (T,)
    epsilon: Floats  # (T,)
    over: npt.NDArray[np.bool_]  # (T,)
    cut: npt.NDArray[np.bool_]  # (T,)

    def __len__(self) -> int:
        return len(self.number)

    def rows(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> "Steps":
        return Steps(*[getattr(self, name)[index] for name in self.__struct_fields__])

    def after(self, earlier: "Steps") -> "Steps":
        names = self.__struct_fields__
        return Steps(*[np.concatenate((getattr(earlier, name), getattr(self, name))) for name in names])


class Rollout(NamedTuple):
    """`next_value` and `next_at` are of the state after the last step. Credits may be of earlier rollouts' steps."""

    steps: Steps
    next_value: float
    next_at: Seconds
    credits: list[Credit]
    memory: float  # largest share of a server's memory budget in use


class RolloutOrder(NamedTuple):
    """What a worker is asked for. `decided` counts the decisions before this update; `teacher` acts, if named."""

    parameters: Mapping[str, Floats]
    update: int
    decided: int
    decisions: int
    teacher: str = ""


class Actor:
    """One worker's episodes, one after the other."""

    def __init__(self, config: Config, seed: int, worker: int) -> None:
        self._config = config
        self._training = config.training
        self._kind = config.observation
        self._scenarios = Scenarios(config)
        self._batch_time = full_batch_time(self._scenarios.facts)
        self._accuracy = router_accuracy(config)
        self._plans = PlansOf(self._accuracy, config)
        self._seed, self._worker = seed, worker
        self._most_servers = config.training.servers[1] if config.training.servers else len(config.servers)
        self._rng: Generator
        self._scenario: Scenario
        self._episode: Episode
        self._encoder: Encoder
        self._teacher: tuple[str, Router] | None = None
        self._number = 0  # of the worker's last decision
        self._before = 0  # decisions of episodes before this one

    def collect(self, order: RolloutOrder) -> Rollout:
        training = self._training
        if order.update % training.episode_rollouts == 0:
            stream = (self._seed, self._worker, order.update, bool(order.teacher))
            self._rng = default_rng([int(part) for part in stream])
            self._begin()
        network = build_network(self._kind, order.parameters)
        steps = self._empty(order.decisions)
        credits: list[Credit] = []
        memory = 0.0
        for i in range(order.decisions):
            view = self._episode.view
            assert view is not None
            observation = self._encoder.encode(view)
            epsilon = self._epsilon(order.decided + i * training.workers)
            decision = self._teach(order.teacher, view) if order.teacher else None
            action, log_prob, value = self._act(network, observation, epsilon, decision)
            self._number += 1
            _fill(steps, i, self._number, view.now, observation, action, log_prob, value, epsilon)
            server, width, group = action
            scenario = self._scenario.facts
            taken = decision or Decision(
                self._encoder.names[server], scenario.shape.widths[width], scenario.groups[group]
            )
            self._encoder.took(view, taken)
            self._episode.decide(taken)
            if self._episode.view is None:
                steps.over[i] = True
                credits += self._end()
                self._begin()
        memory = self._memory()
        view = self._episode.view
        assert view is not None
        next_value = network.forward(self._encoder.encode(view)).value
        if (order.update + 1) % training.episode_rollouts == 0:
            steps.cut[-1] = True
            credits += self._end()
        else:
            credits += self._credits()
        return Rollout(steps, next_value, view.now, credits, memory)

    def _begin(self) -> None:
        self._episode = with_arrivals(self._draw, self._config.workload)
        self._teacher = None
        self._before = self._number

    def _draw(self) -> Episode:
        self._scenario = self._scenarios.draw(self._rng)
        facts, training = self._scenario.facts, self._training
        self._encoder = build_encoder(self._kind, facts, self._batch_time, self._plans_here)
        return Episode(
            self._scenario.config,
            self._accuracy,
            int(self._rng.integers(LARGEST_SEED)),
            expected=training.resolved.accuracy == "expected",
            backlog=self._scenario.backlog,
            charges=capacity_price(self._config, self._plans_here),
            escalation=escalation_of(self._encoder),
        )

    def _plans_here(self) -> Plans:
        return self._plans(self._scenario.facts)

    def _end(self) -> list[Credit]:
        self._episode.end()
        return self._credits()

    def _credits(self) -> list[Credit]:
        before = self._before
        return [credit._replace(decision=credit.decision + before) for credit in self._episode.take_credits()]

    def _act(
        self, network: Network, observation: Observation, epsilon: float, decision: Decision | None
    ) -> tuple[tuple[int, int, int], float, float]:
        """Draws from the mixture policy: action, joint log-probability, value. A given decision is only scored."""
        heads = network.forward(observation)
        _, _, server_mask, width_mask, group_mask = observation
        allowed = server_mask.tolist()
        floor = epsilon / sum(allowed)
        server_p = [  # eq. 5
            (1 - epsilon) * p + floor if free else 0.0
            for p, free in zip(softmax(heads.server, server_mask).tolist(), allowed, strict=True)
        ]
        width_p = softmax(heads.width, width_mask).tolist()
        group_p = softmax(heads.group, group_mask).tolist()
        if decision is None:
            a, b, c = self._rng.random(3).tolist()
            action = (_drawn(server_p, a), _drawn(width_p, b), _drawn(group_p, c))
        else:
            facts = self._scenario.facts
            action = (
                self._encoder.names.index(decision.server),
                facts.shape.index(decision.width),
                next((i for i, group in enumerate(facts.groups) if group >= decision.group), len(facts.groups) - 1),
            )
            last_group = int(np.flatnonzero(group_mask)[-1])
            action = (action[0], action[1], min(action[2], last_group))
        s, w, g = action
        tiny = 1e-12
        return action, log(max(server_p[s], tiny) * max(width_p[w], tiny) * max(group_p[g], tiny)), heads.value  # eq. 6

    def _teach(self, name: str, view: View) -> Decision:
        if self._teacher is None or self._teacher[0] != name:
            config, facts = self._scenario.config, self._scenario.facts
            profiles = {server.name: server.profile for server in facts.servers.values()}
            self._teacher = (name, build_router(name, config, facts.shape, profiles))
        return self._teacher[1].decide(view, self._rng)

    def _epsilon(self, decided: int) -> float:
        """Eq. 5's schedule; t counts decisions."""
        recipe = self._training.resolved
        span = self._training.decisions or 1  # none: imitation alone
        fallen = recipe.epsilon_max + decided / span * (recipe.epsilon_min - recipe.epsilon_max)
        return max(recipe.epsilon_min, fallen)

    def _memory(self) -> float:
        shares = [0.0]
        for name, server in self._episode.simulation.dispatcher.servers.items():
            if server.report is not None:
                shares.append(server.report.memory_used / self._scenario.facts.servers[name].vram_budget)
        return max(shares)

    def _empty(self, decisions: int) -> Steps:
        encoder, facts = self._encoder, self._scenario.facts
        n, most = decisions, self._most_servers
        return Steps(
            number=np.zeros(n, np.int64),
            at=np.zeros(n),
            shared=np.zeros((n, encoder.layout.shared.size), np.float32),
            servers=np.zeros((n, most, encoder.layout.server.size), np.float32),
            server_mask=np.zeros((n, most), bool),
            present=np.zeros((n, most), bool),
            width_mask=np.zeros((n, len(facts.shape.widths)), bool),
            group_mask=np.zeros((n, len(facts.groups)), bool),
            action=np.zeros((n, 3), np.int64),
            log_prob=np.zeros(n, np.float32),
            value=np.zeros(n, np.float32),
            epsilon=np.zeros(n, np.float32),
            over=np.zeros(n, bool),
            cut=np.zeros(n, bool),
        )


def _fill(
    steps: Steps,
    i: int,
    number: int,
    at: Seconds,
    observation: Observation,
    action: tuple[int, int, int],
    log_prob: float,
    value: float,
    epsilon: float,
) -> None:
    count = len(observation.server_mask)
    steps.number[i], steps.at[i] = number, at
    steps.shared[i] = observation.shared
    steps.servers[i, :count] = observation.servers
    steps.server_mask[i, :count] = observation.server_mask
    steps.present[i, :count] = True
    steps.width_mask[i] = observation.width_mask
    steps.group_mask[i] = observation.group_mask
    steps.action[i] = action
    steps.log_prob[i], steps.value[i], steps.epsilon[i] = log_prob, value, epsilon


def _drawn(probabilities: list[float], at: float) -> int:
    """The index in whose share of the whole `at` in [0, 1) falls; never one without a share."""
    edges = list(accumulate(probabilities))
    point = at * edges[-1]
    return next(i for i, edge in enumerate(edges) if point < edge)
