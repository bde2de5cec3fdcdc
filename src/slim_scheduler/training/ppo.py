"""Proximal policy optimisation as the paper has it, equation by equation: from rollouts to a better policy.

One factored policy (server, width, group), a server head mixed with the uniform distribution inside the likelihood
ratio, one-step returns, the clipped surrogate. Longer returns are options. Collecting is `rollout.py`'s business, the
loop, checkpoints and curves are `train.py`'s. Numbers of equations are the method's (docs/method.md).
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.router.learned.layout import Layout
from slim_scheduler.core.types import Seconds
from slim_scheduler.setup.config import TrainingConfig
from slim_scheduler.training.episode import Credit
from slim_scheduler.training.policy import Inputs, Outputs, PolicyNetwork
from slim_scheduler.training.rollout import Rollout, Steps

Reals = npt.NDArray[np.float64]

LARGEST_REWARD = 40.0  # normalised: one lost server must not outweigh a thousand ordinary blocks
SCALE_MEMORY = 0.9  # per update, of the reward's running mean and spread
SMALL = 1e-8


# ---- the policy


def mixed(p: Tensor, epsilon: Tensor, allowed: Tensor) -> Tensor:
    """Eq. 5: the server head with exploration, uniform over the servers that may be chosen. (B, N)"""
    uniform = allowed / allowed.sum(1, keepdim=True)
    return (1 - epsilon[:, None]) * p + epsilon[:, None] * uniform


def joint_log_prob(out: Outputs, action: Tensor, epsilon: Tensor, allowed: Tensor) -> Tensor:
    """Eq. 6: log p~(server) + log p(width) + log p(group), (B,). `action` is (B, 3)."""
    server = mixed(torch.softmax(out.server, 1), epsilon, allowed).gather(1, action[:, :1]).clamp_min(1e-12).log()
    width = torch.log_softmax(out.width, 1).gather(1, action[:, 1:2])
    group = torch.log_softmax(out.group, 1).gather(1, action[:, 2:])
    return (server + width + group)[:, 0]


def entropies(out: Outputs) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 12's three terms, (B,) each; the server head's is that of p, not of the mixture."""
    return _entropy(out.server), _entropy(out.width), _entropy(out.group)


def _entropy(logits: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, 1)
    return -(log_p.exp() * log_p).sum(1)


# ---- returns and advantages


class Horizon(NamedTuple):
    """How far a return looks. `seconds` is the discount's time constant, because decisions are not evenly spaced."""

    kind: str
    seconds: Seconds
    gae_lambda: float
    n_steps: int


def returns_and_advantages(
    rewards: Reals, values: Reals, next_values: Reals, gaps: Reals, over: npt.NDArray[np.bool_], horizon: Horizon
) -> tuple[Reals, Reals]:
    """Returns R and advantages A = R - V of consecutive decisions, (T,) each.

    `gaps` are the seconds to the next decision. A reward that is not known yet (nan) counts as what V expected.
    """
    if horizon.kind == "one-step":
        return rewards, rewards - values  # eq. 8
    discount = np.where(over, 0.0, np.exp(-gaps / horizon.seconds))
    surprise = np.nan_to_num(rewards + discount * next_values - values)
    advantages = np.zeros_like(surprise)
    if horizon.kind == "gae":
        ahead = 0.0
        for t in range(len(surprise) - 1, -1, -1):
            ahead = surprise[t] + horizon.gae_lambda * discount[t] * ahead
            advantages[t] = ahead
    else:  # n-step: the surprises of n decisions add up to r_t + ... + V(s_{t+n}) - V(s_t)
        reach = np.ones_like(surprise)
        for k in range(min(horizon.n_steps, len(surprise))):
            reached = len(surprise) - k
            advantages[:reached] += reach[:reached] * surprise[k:]
            reach[: reached - 1] *= discount[k : k + reached - 1]
    return advantages + values, advantages


def sums_tasks(horizon: Horizon, by_tasks: bool) -> bool:
    """Whether a decision's reward is the sum over its tasks (see `Trajectory`)."""
    return by_tasks and horizon.kind != "one-step"


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
        if horizon.kind != "one-step":
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


class Batch(NamedTuple):
    """Decisions whose blocks have finished, with what they came to. `weights`: how much each counts."""

    steps: Steps
    returns: Reals
    advantages: Reals
    weights: Reals

    @staticmethod
    def join(batches: "list[Batch]") -> "Batch":
        steps = batches[0].steps
        for batch in batches[1:]:
            steps = batch.steps.after(steps)
        return Batch(
            steps,
            np.concatenate([b.returns for b in batches]),
            np.concatenate([b.advantages for b in batches]),
            np.concatenate([b.weights for b in batches]),
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

    def add(self, rollout: Rollout, scale: RewardScale) -> Batch:
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
        return Batch(steps.rows(ready), returns[ready], advantages[ready], weights[ready])


# ---- the update


class UpdateStats(msgspec.Struct):
    """Means over an update, for the curves."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    clip_fraction: float = 0.0
    explained_variance: float = 0.0
    entropy_server: float = 0.0
    entropy_width: float = 0.0
    entropy_group: float = 0.0
    gradient_norm: float = 0.0


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_coef: float) -> Tensor:
    """Eqs. 9 and 10: mean of min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantage).mean()


def planned_server(out: Outputs, next_server: Tensor) -> Tensor:
    """Log-probability of the server that `lp` would take next, (B,); 0 where it names none. `next_server` is (B, N)."""
    return (next_server * torch.log_softmax(out.server, dim=1)).sum(dim=1)


def planned_width(out: Outputs, next_width: Tensor) -> Tensor:
    """Log-probability of the width that the plan would send next, (B,); 0 where it names none. `next_width` is (B, W).

    The plan's mixture of widths is worth more than any of them, which no reward of a single decision tells: among
    widths that are worth the same, noise would drift to one of them, and the load with it. (Kickstarting: Schmitt et
    al. 2018, arXiv 1803.03835.)
    """
    return (next_width * torch.log_softmax(out.width, dim=1)).sum(dim=1)


class PPO:
    """A network, its optimiser, and how both change by one batch."""

    def __init__(self, network: PolicyNetwork, settings: TrainingConfig, layout: Layout) -> None:
        self.network = network
        self.settings = settings
        self._layout = layout
        self.optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate, eps=1e-5)

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> UpdateStats:
        """K epochs of minibatches over one batch. `progress` in [0, 1] is where the learning rate's schedule stands."""
        settings = self.settings
        self._set_rate(progress)
        inputs, action, epsilon, allowed = tensors(batch.steps)
        old_log_prob = torch.from_numpy(batch.steps.log_prob)
        returns = torch.from_numpy(batch.returns.astype(np.float32))
        weights = batch.weights / batch.weights.mean()
        weighted = weights * batch.advantages
        advantage = torch.from_numpy(((weighted - weighted.mean()) / (weighted.std() + SMALL)).astype(np.float32))
        weight = torch.from_numpy(weights.astype(np.float32))
        stats = UpdateStats(explained_variance=_explained(batch.returns, batch.steps.value))
        parts = 0
        for _ in range(settings.epochs):
            for rows in _minibatches(len(returns), settings.minibatch, rng):
                out = self.network(Inputs(*[part[rows] for part in inputs]))
                log_ratio = joint_log_prob(out, action[rows], epsilon[rows], allowed[rows]) - old_log_prob[rows]
                ratio = log_ratio.exp()
                surrogate = clipped_surrogate(ratio, advantage[rows], settings.clip_coef)
                value_loss = (0.5 * weight[rows] * (returns[rows] - out.value) ** 2).mean()  # eq. 11
                parts_of_entropy = entropies(out)
                entropy = torch.stack(parts_of_entropy).sum(0).mean()  # eq. 12
                loss = -surrogate + settings.value_coef * value_loss - settings.entropy_coef * entropy  # eq. 13
                if settings.plan_coef:
                    next_width = inputs.shared[rows][:, self._layout.shared["next_width"]]
                    loss = loss - settings.plan_coef * planned_width(out, next_width).mean()
                if settings.plan_server_coef:
                    next_server = inputs.servers[rows][:, :, self._layout.server["next_server"]][..., 0]
                    loss = loss - settings.plan_server_coef * planned_server(out, next_server).mean()
                norm = self._step(loss)
                with torch.no_grad():
                    stats.policy_loss -= float(surrogate)
                    stats.value_loss += float(value_loss)
                    stats.kl += float((ratio - 1 - log_ratio).mean())
                    stats.clip_fraction += float(((ratio - 1).abs() > settings.clip_coef).float().mean())
                    stats.entropy_server += float(parts_of_entropy[0].mean())
                    stats.entropy_width += float(parts_of_entropy[1].mean())
                    stats.entropy_group += float(parts_of_entropy[2].mean())
                    stats.gradient_norm += norm
                parts += 1
        for name in stats.__struct_fields__:
            if name != "explained_variance":
                setattr(stats, name, getattr(stats, name) / max(parts, 1))
        return stats

    def imitate(self, batch: Batch, rng: np.random.Generator) -> UpdateStats:
        """The same over a teacher's decisions: likelihood instead of the surrogate, and the value of its states.

        Of widths and groups the policy keeps doubts: one that is sure of its teacher never finds out what is better.
        """
        settings = self.settings
        self._set_rate(0.0)
        inputs, action, _, allowed = tensors(batch.steps)
        nothing = torch.zeros(len(action))
        returns = torch.from_numpy(batch.returns.astype(np.float32))
        stats = UpdateStats(explained_variance=_explained(batch.returns, batch.steps.value))
        parts = 0
        for _ in range(settings.epochs):
            for rows in _minibatches(len(returns), settings.minibatch // 4 + 1, rng):
                out = self.network(Inputs(*[part[rows] for part in inputs]))
                likelihood = joint_log_prob(out, action[rows], nothing[rows], allowed[rows]).mean()
                value_loss = (0.5 * (returns[rows] - out.value) ** 2).mean()
                doubt = settings.warm_start_doubt
                learned = (1 - doubt) * likelihood + doubt * _evenness(out, inputs, rows)
                stats.gradient_norm += self._step(settings.value_coef * value_loss - learned)
                stats.policy_loss -= float(likelihood.detach())
                stats.value_loss += float(value_loss.detach())
                parts += 1
        for name in ("gradient_norm", "policy_loss", "value_loss"):
            setattr(stats, name, getattr(stats, name) / max(parts, 1))
        return stats

    def _set_rate(self, progress: float) -> None:
        settings = self.settings
        factor = {
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "linear": 1 - progress,
            "constant": 1.0,
        }[settings.learning_rate_schedule]
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * max(factor, 0.02)  # the last updates are not quite for nothing

    def _step(self, loss: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        return float(norm)


def _evenness(out: Outputs, inputs: Inputs, rows: Tensor) -> Tensor:
    """Mean log-likelihood of widths and groups drawn evenly from what may be chosen."""
    total = torch.zeros(())
    for logits, mask in ((out.width, inputs.width_mask[rows]), (out.group, inputs.group_mask[rows])):
        log_p = torch.where(mask, torch.log_softmax(logits, 1), 0.0)
        total = total + (log_p.sum(1) / mask.sum(1)).mean()
    return total


def tensors(steps: Steps) -> tuple[Inputs, Tensor, Tensor, Tensor]:
    """The network's inputs, the actions (B, 3), eq. 5's epsilon (B,), and which servers may be chosen (B, N)."""
    inputs = Inputs(
        shared=torch.from_numpy(steps.shared),
        servers=torch.from_numpy(steps.servers),
        present=torch.from_numpy(steps.present),
        server_mask=torch.from_numpy(steps.server_mask),
        width_mask=torch.from_numpy(steps.width_mask),
        group_mask=torch.from_numpy(steps.group_mask),
    )
    return inputs, torch.from_numpy(steps.action), torch.from_numpy(steps.epsilon), inputs.server_mask.float()


def _minibatches(count: int, size: int, rng: np.random.Generator) -> list[Tensor]:
    order = torch.from_numpy(rng.permutation(count))
    return list(order.tensor_split(max(1, round(count / size))))


def _explained(returns: Reals, values: npt.NDArray[np.float32]) -> float:
    variance = float(np.var(returns))
    return 0.0 if variance < SMALL else 1.0 - float(np.var(returns - values)) / variance
