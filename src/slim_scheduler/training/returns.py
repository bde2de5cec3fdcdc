"""What decisions come to: rewards as they arrive, scaled, and the returns and advantages that PPO learns from.

Rollouts go in, `Samples` come out (`Trajectory`). The networks and the update are `ppo.py`'s.
"""

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.core.types import Seconds
from slim_scheduler.training.episode import Credit
from slim_scheduler.training.rollout import Rollout, Steps

Reals = npt.NDArray[np.float64]

LARGEST_REWARD = 40.0  # normalised: one lost server must not outweigh a thousand ordinary blocks
SCALE_MEMORY = 0.9  # per update, of the reward's running mean and spread
SMALL = 1e-8  # what a spread is at least


class Horizon(NamedTuple):
    """How far a return looks. `seconds` is the discount's time constant, because decisions are not evenly spaced; None:
    a return is the decision's own reward (eq. 8)."""

    seconds: Seconds | None
    gae_lambda: float = 1.0


def returns_and_advantages(
    rewards: Reals, values: Reals, next_values: Reals, gaps: Reals, over: npt.NDArray[np.bool_], horizon: Horizon
) -> tuple[Reals, Reals]:
    """Returns R and advantages A = R - V of consecutive decisions, (T,) each.

    `gaps` are the seconds to the next decision. A reward that is not known yet (nan) counts as what V expected.
    """
    if horizon.seconds is None:
        return rewards, rewards - values  # eq. 8
    discount = np.where(over, 0.0, np.exp(-gaps / horizon.seconds))
    surprise = np.nan_to_num(rewards + discount * next_values - values)
    advantages = np.zeros_like(surprise)
    ahead = 0.0
    for t in range(len(surprise) - 1, -1, -1):
        ahead = surprise[t] + horizon.gae_lambda * discount[t] * ahead
        advantages[t] = ahead
    return advantages + values, advantages


def sums_tasks(horizon: Horizon, by_tasks: bool) -> bool:
    """Whether a decision's reward is the sum over its tasks (see `Trajectory`)."""
    return by_tasks and horizon.seconds is not None


class RewardScale(msgspec.Struct):
    """Running mean reward of a task, and the spread of the returns that decisions get around it.

    Subtracting the mean per task changes no policy's rank, because the tasks come whatever is decided. With returns of
    about 1, the value's gradient does not drown the policy's in the norm that both share.
    """

    mean: float = 0.0
    spread: float = 1.0
    updates: int = 0

    def learn(self, rollouts: list[Rollout], by_tasks: bool, horizon: Horizon) -> None:
        credits = [credit for rollout in rollouts for credit in rollout.credits]
        if not credits:
            return
        weights = [credit.tasks if by_tasks else 1 for credit in credits]
        keep = SCALE_MEMORY if self.updates else 0.0
        mean = float(np.average([credit.net for credit in credits], weights=weights))
        self.mean = keep * self.mean + (1 - keep) * mean
        sums = sums_tasks(horizon, by_tasks)
        returns = np.concatenate([self._returns(rollout, sums, horizon) for rollout in rollouts])
        spread = float(np.sqrt(np.mean(returns**2)))
        self.spread = keep * self.spread + (1 - keep) * max(spread, SMALL)
        self.updates += 1

    def _returns(self, rollout: Rollout, sums: bool, horizon: Horizon) -> Reals:
        """Of a rollout's own decisions, as far as their rewards are known."""
        steps = rollout.steps
        earned = np.zeros(len(steps))
        for credit in rollout.credits:
            i = credit.decision - int(steps.number[0])
            if 0 <= i < len(steps):
                earned[i] = (credit.tasks if sums else 1) * (credit.net - self.mean)
        if horizon.seconds is not None:
            ahead = 0.0
            discount = (
                np.exp(-np.maximum(np.diff(steps.at, append=rollout.next_at), 0.0) / horizon.seconds) * ~steps.over
            )
            for t in range(len(steps) - 1, -1, -1):
                ahead = earned[t] + discount[t] * ahead
                earned[t] = ahead
        return earned

    def apply(self, credit: Credit, sums: bool) -> float:
        tasks = credit.tasks if sums else 1
        normal = tasks * (credit.net - self.mean) / self.spread
        return max(-LARGEST_REWARD, min(LARGEST_REWARD, normal))


class Samples(NamedTuple):
    """Decisions whose blocks have finished, with what they came to. `weights`: how much each counts."""

    steps: Steps
    returns: Reals
    advantages: Reals
    weights: Reals

    @staticmethod
    def join(parts: "list[Samples]") -> "Samples":
        steps = parts[0].steps
        for part in parts[1:]:
            steps = part.steps.after(steps)
        return Samples(
            steps,
            np.concatenate([part.returns for part in parts]),
            np.concatenate([part.advantages for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )


class Trajectory:
    """One worker's decisions whose blocks may still run.

    Counted by tasks, a reward that is looked at on its own is one task's, and the decision weighs as many as it has:
    were it their sum, small groups would be the better ones wherever rewards are below the mean. Longer returns need
    the sum: who sends the other tasks earns the other rewards.

    A block unfinished at the end of a rollout is carried over with its stored log-probability into the next update, and
    dropped after that.
    """

    def __init__(self, horizon: Horizon, by_tasks: bool) -> None:
        self._horizon = horizon
        self._by_tasks = by_tasks
        self._sums = sums_tasks(horizon, by_tasks)
        self._steps: Steps | None = None
        self._rewards = np.zeros(0)
        self._weights = np.zeros(0)
        self._used = np.zeros(0, bool)

    def add(self, rollout: Rollout, scale: RewardScale) -> Samples:
        """Takes a rollout in, returns the decisions that are ready."""
        new = len(rollout.steps)
        steps = rollout.steps if self._steps is None else rollout.steps.after(self._steps)
        rewards = np.concatenate((self._rewards, np.full(new, np.nan)))
        weights = np.concatenate((self._weights, np.ones(new)))
        used = np.concatenate((self._used, np.zeros(new, bool)))
        place = {number: i for i, number in enumerate(steps.number.tolist())}
        for credit in rollout.credits:
            i = place.get(credit.decision)
            if i is not None:
                rewards[i] = scale.apply(credit, self._sums)
                if self._by_tasks and not self._sums:
                    weights[i] = credit.tasks
        values = steps.value.astype(float)
        next_values = np.append(values[1:], rollout.next_value)
        gaps = np.maximum(np.diff(np.append(steps.at, rollout.next_at)), 0.0)
        returns, advantages = returns_and_advantages(rewards, values, next_values, gaps, steps.over, self._horizon)
        known = ~np.isnan(rewards)
        ready = np.flatnonzero(known & ~used)
        waiting = np.flatnonzero(~known[-new:])
        if steps.cut[-1] or not len(waiting):
            self._steps, self._rewards, self._weights, self._used = None, np.zeros(0), np.zeros(0), np.zeros(0, bool)
        else:
            kept = slice(len(steps) - new + int(waiting[0]), None)
            self._steps, self._rewards, self._weights = steps.rows(kept), rewards[kept], weights[kept]
            self._used = (used | known)[kept]
        return Samples(steps.rows(ready), returns[ready], advantages[ready], weights[ready])
