"""`SlimScheduler/Cluster-v0`: the simulated cluster as a Gymnasium environment, for any reinforcement learner.

A step is one routing decision. Blocks finish later than they are decided, so `step` returns what was earned since the
last step, and `info["credits"]` says which decision earned how much. Importing this module registers the environment.
"""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import full_batch_time
from slim_scheduler.core.router.learned.encoders import build_encoder, escalation_of
from slim_scheduler.core.router.learned.observation import (
    UNKNOWN,
    Encoder,
    Floats,
    Observation,
)
from slim_scheduler.core.router.learned.planned import NOT_PLANNED
from slim_scheduler.core.types import Decision
from slim_scheduler.setup.config import Config, load_config
from slim_scheduler.setup.machines import router_accuracy
from slim_scheduler.training.episode import Credit, Episode, with_arrivals
from slim_scheduler.training.price import capacity_price
from slim_scheduler.training.scenario import PlansOf, Scenario, Scenarios

ENV_ID = "SlimScheduler/Cluster-v0"
LARGEST_SEED = 2**31
OBSERVED = (min(UNKNOWN, NOT_PLANNED), 100.0)  # ratios and logarithms: far below, whatever the load


class ClusterEnv(gymnasium.Env[Floats, np.ndarray]):
    """MultiDiscrete action (server, width, group), each an index into what the configuration lists.

    `info` holds `masks` (what may be chosen, one array per part of the action), `decision` (the number of the decision
    just taken, from 1), `credits`: pairs (decision number, reward), and the `tasks` that these are for. A reward is
    what `slim train` credits (`Credit.net`): eq. 7's, or with `training.target_delay_s` what docs/training.md says. An
    action that is masked is replaced by the fallback, as it would be live. The observation is the encoder's: the shared
    figures, then each server's.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, config: Config | str | Path, max_decisions: int | None = None) -> None:
        self._config = config if isinstance(config, Config) else load_config(Path(config))
        if self._config.training.servers is not None:
            raise ConfigError("an environment has a fixed number of servers; leave out training.servers")
        self._scenarios = Scenarios(self._config)
        facts = self._scenarios.facts
        self._batch_time = full_batch_time(facts)
        self._accuracy = router_accuracy(self._config)
        self._plans = PlansOf(self._accuracy, self._config)
        self._max_decisions = max_decisions
        self._by_tasks = self._config.training.resolved.reward_weight == "tasks"
        self._widths, self._groups = facts.shape.widths, facts.groups
        self._encoder = self._encoder_for(facts)
        self._episode: Episode | None = None
        self._observation: Observation | None = None
        layout = self._encoder.layout
        size = layout.shared.size + len(self._encoder.names) * layout.server.size
        self.observation_space = spaces.Box(*OBSERVED, (size,), np.float32)
        self.action_space = spaces.MultiDiscrete([len(self._encoder.names), len(self._widths), len(self._groups)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        episode = self._episode = with_arrivals(self._draw, self._config.workload)
        self._observe(episode)
        return self._flat(), {"masks": self._masks(), "decision": 0, "credits": [], "tasks": 0}

    def _draw(self) -> Episode:
        scenario: Scenario = self._scenarios.draw(self.np_random)
        self._encoder = self._encoder_for(scenario.facts)
        return Episode(
            scenario.config,
            self._accuracy,
            int(self.np_random.integers(LARGEST_SEED)),
            expected=self._config.training.resolved.accuracy == "expected",
            backlog=scenario.backlog,
            charges=capacity_price(self._config, partial(self._plans, scenario.facts)),
            escalation=escalation_of(self._encoder),
        )

    def _encoder_for(self, facts: RouterFacts) -> Encoder:
        return build_encoder(self._config.observation, facts, self._batch_time, partial(self._plans, facts))

    def step(self, action: np.ndarray) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        episode = self._episode
        assert episode is not None, "call reset first"
        server, width, group = (int(part) for part in action)
        decision = Decision(self._encoder.names[server], self._widths[width], self._groups[group])
        if episode.view is not None:
            self._encoder.took(episode.view, decision)
        number = episode.decide(decision)
        terminated = episode.view is None
        truncated = not terminated and self._max_decisions is not None and number >= self._max_decisions
        if terminated or truncated:
            episode.end()
        self._observe(episode)
        earned = episode.take_credits()
        credits = [(credit.decision, self._weighted(credit)) for credit in earned]
        tasks = sum([credit.tasks for credit in earned])
        info = {"masks": self._masks(), "decision": number, "credits": credits, "tasks": tasks}
        return self._flat(), float(sum([reward for _, reward in credits])), terminated, truncated, info

    def action_masks(self) -> np.ndarray:
        """The masks of the three parts, one after the other."""
        return np.concatenate(self._masks())

    def _weighted(self, credit: Credit) -> float:
        return credit.net * credit.tasks if self._by_tasks else credit.net

    def _observe(self, episode: Episode) -> None:
        if episode.view is not None:
            self._observation = self._encoder.encode(episode.view)

    def _flat(self) -> Floats:
        assert self._observation is not None, "a workload without arrivals has nothing to decide"
        return np.concatenate((self._observation.shared, self._observation.servers.ravel()))

    def _masks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._observation is not None
        _, _, servers, widths, groups = self._observation
        return servers.copy(), widths.copy(), groups.copy()  # the encoder shares its own


gymnasium.register(id=ENV_ID, entry_point=f"{__name__}:ClusterEnv")
