"""Proximal policy optimisation as the paper has it, equation by equation: the loop, and the update of a policy.

One factored policy (server, width, group), a server head mixed with the uniform distribution inside the likelihood
ratio, the clipped surrogate. `train` collects, updates and repeats; it resumes where it stopped and leaves a policy
folder. All that the result depends on follows from the configuration and the seed. Acting is `rollout.py`'s business,
what decisions come to `returns.py`'s. Numbers of equations are the method's (docs/method.md).
"""

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.errors import ConfigError, WorkerLostError
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import full_batch_time
from slim_scheduler.core.router.learned.layout import LAYOUT, Layout, layout_of
from slim_scheduler.core.router.learned.policy import NetworkSizes
from slim_scheduler.core.router.learned.router import PolicyManifest
from slim_scheduler.setup.config import Config, TrainingConfig
from slim_scheduler.setup.interruption import deferred
from slim_scheduler.setup.machines import load_profiles, load_shape, router_accuracy_path
from slim_scheduler.setup.policy_files import write_policy
from slim_scheduler.setup.routers import parse_router
from slim_scheduler.setup.workload import read_trace
from slim_scheduler.training.checkpoint import TrainingState, read_checkpoint, write_checkpoint
from slim_scheduler.training.curves import Curves, UpdateReport, UpdateStats, describe
from slim_scheduler.training.policy import Inputs, Outputs, PolicyNetwork
from slim_scheduler.training.returns import SMALL, Horizon, Reals, RewardScale, Samples, Trajectory
from slim_scheduler.training.rollout import RolloutOrder, Steps
from slim_scheduler.training.scenario import Scenarios
from slim_scheduler.training.workers import RolloutWorkers

HIDDEN = 64  # units of a hidden layer
EPOCHS = 3  # passes over the samples per update (K)
CLIP_COEF = 0.2  # epsilon of eqs. 9 and 10
VALUE_COEF = 0.5  # c_v of eq. 13
MAX_GRAD_NORM = 0.5
MINIBATCHES = 4  # gradient steps per epoch, at least: with one, 40 updates of 1,024 samples learn a third less
MINIBATCH = 1024  # samples per gradient step, at most
GAE_LAMBDA = 0.95  # how far returns with a horizon look ahead


# ---- the loop


def train(
    config: Config, out: Path, seed: int = 0, report: Callable[[UpdateReport], None] | None = None
) -> PolicyManifest:
    """Trains a router for the configured cluster and writes its policy to `out`; resumes what is there.

    Interrupted, it writes the policy as far as it came and raises KeyboardInterrupt. Raises InputError and
    WorkerLostError.
    """
    torch.set_num_threads(1)
    training = config.training
    if not training.decisions and not (training.warm_start and training.warm_start_decisions):
        raise ConfigError("training.decisions is 0 and nothing is imitated; give decisions, or a warm_start alone")
    _check_sources(config, out)
    facts = Scenarios(config).facts
    manifest = _manifest(config, facts, seed)
    ppo = PPO(fresh_network(config, seed), training, _layout(config, facts))
    settings = _fingerprint(config, seed)
    state = read_checkpoint(out / "checkpoint", settings, ppo.network, ppo.optimizer) or TrainingState(
        update=0, decided=0, scale=RewardScale(), settings=settings
    )
    per_update = training.workers * training.rollout_decisions
    warm = _whole_episodes(training.warm_start_decisions if training.warm_start else 0, per_update, config)
    last = warm + -(-training.decisions // per_update)
    every = training.episode_rollouts  # no episode is open then
    scale, decided = state.scale, state.decided
    manifest = _trained(manifest, decided, state.update)
    horizon = Horizon(training.horizon_s, GAE_LAMBDA)
    by_tasks = training.resolved.reward_weight == "tasks"
    trajectories = [Trajectory(horizon, by_tasks) for _ in range(training.workers)]
    curves = Curves(out, state.update)
    with deferred() as interruption, RolloutWorkers(config, seed) as workers:
        for update in range(state.update, last):
            began = time.perf_counter()
            imitating = update < warm
            order = RolloutOrder(
                parameters=ppo.network.arrays(),
                update=update,
                decided=decided,
                decisions=training.rollout_decisions,
                teacher=training.warm_start if imitating else "",
            )
            try:
                rollouts = workers.collect(order)
            except WorkerLostError:
                if not interruption.wanted:
                    raise
                if update > state.update:  # who asked this process to stop ended the worker as well
                    write_policy(out, _trained(manifest, decided, update), ppo.network.arrays())
                raise KeyboardInterrupt from None
            scale.learn(rollouts, by_tasks, horizon)
            samples = Samples.join([t.add(r, scale) for t, r in zip(trajectories, rollouts, strict=True)])
            rng = np.random.default_rng([seed, update])
            if imitating:
                stats = ppo.imitate(samples, rng)
            else:
                stats = ppo.update(samples, rng, (update - warm) / (last - warm))
                decided += per_update
            seconds = time.perf_counter() - began
            shown = describe(
                rollouts,
                facts.groups,
                stats,
                len(facts.shape.widths),
                update=update,
                updates=last,
                decided=decided,
                seconds=seconds,
                decisions_per_s=per_update / seconds,
                imitating=imitating,
            )
            curves.add(shown)
            if report is not None:
                report(shown)
            if (update + 1) % every == 0 or update + 1 == last or interruption.wanted:
                manifest = _trained(manifest, decided, update + 1)
                write_policy(out, manifest, ppo.network.arrays())
            if (update + 1) % every == 0:
                now = TrainingState(update=update + 1, decided=decided, scale=scale, settings=settings)
                write_checkpoint(out / "checkpoint", now, ppo.network, ppo.optimizer)
            interruption.check()
    curves.close()
    return manifest


def fresh_network(config: Config, seed: int) -> PolicyNetwork:
    """The network that training with this configuration starts from."""
    return PolicyNetwork(_sizes(config, Scenarios(config).facts), torch.Generator().manual_seed(seed))


def _layout(config: Config, facts: RouterFacts) -> Layout:
    return layout_of(config.observation, facts.shape, len(facts.servers))


def _sizes(config: Config, facts: RouterFacts) -> NetworkSizes:
    kind, layout = config.observation, _layout(config, facts)
    return NetworkSizes(
        kind=kind,
        shared=layout.shared.size,
        server=layout.server.size,
        servers=len(facts.servers) if kind == "paper" else None,
        widths=len(facts.shape.widths),
        groups=len(facts.groups),
        hidden=HIDDEN,
    )


def _manifest(config: Config, facts: RouterFacts, seed: int) -> PolicyManifest:
    training, shape = config.training, facts.shape
    return PolicyManifest(
        layout=LAYOUT,
        kind=config.observation,
        network=shape.name,
        segments=shape.segments,
        widths=shape.widths,
        groups=facts.groups,
        sizes=_sizes(config, facts),
        batch_time=full_batch_time(facts),
        plan_rho=training.plan_rho,
        plan_queue=training.plan_queue_s,
        reward=msgspec.to_builtins(config.reward),
        training={**msgspec.to_builtins(training), **msgspec.to_builtins(training.resolved), "seed": seed},
    )


def _trained(manifest: PolicyManifest, decided: int, updates: int) -> PolicyManifest:
    return msgspec.structs.replace(manifest, training={**manifest.training, "decided": decided, "updates": updates})


def _whole_episodes(count: int, per_update: int, config: Config) -> int:
    """Updates that `count` needs, rounded up to whole episodes."""
    length = config.training.episode_rollouts
    return -(-count // (per_update * length)) * length


def _check_sources(config: Config, out: Path) -> None:
    """Raises ConfigError where a policy that the training depends on is the one that it writes: it could not resume."""
    for key, name in (("training.warm_start", config.training.warm_start), ("router.fallback", config.router.fallback)):
        router = parse_router(name) if name else None
        if router is not None and router.kind == "ppo" and router.argument.resolve() == out.resolve():
            raise ConfigError(f"{key} is {name}, which the training would overwrite; give another --out")


def _fingerprint(config: Config, seed: int) -> str:
    """Of all that the policy depends on: what is configured, and what the files hold that are named there."""
    shape, training = load_shape(config), config.training
    table = router_accuracy_path(config)
    file = config.workload.trace if config.workload.kind == "trace" else None
    trace = None if file is None else read_trace(Path(file)).tolist()
    routers = [parse_router(name) for name in (training.warm_start, config.router.fallback) if name]
    files = [file for router in routers for file in router.files]
    if table is not None:
        files.append(table)
    held = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    parts = [config, seed, shape, load_profiles(config, shape), trace, held]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


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


# ---- the update


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
    """A network, its optimiser, and how both change by one update."""

    def __init__(self, network: PolicyNetwork, settings: TrainingConfig, layout: Layout) -> None:
        self.network = network
        self.settings = settings
        self._layout = layout
        self.optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate, eps=1e-5)

    def update(self, samples: Samples, rng: np.random.Generator, progress: float) -> UpdateStats:
        """K epochs of minibatches over the samples. `progress` in [0, 1]: the learning rate falls along a cosine."""
        settings = self.settings
        self._set_rate(progress)
        inputs, action, epsilon, allowed = tensors(samples.steps)
        old_log_prob = torch.from_numpy(samples.steps.log_prob)
        returns = torch.from_numpy(samples.returns.astype(np.float32))
        weights = samples.weights / samples.weights.mean()
        weighted = weights * samples.advantages
        advantage = torch.from_numpy(((weighted - weighted.mean()) / (weighted.std() + SMALL)).astype(np.float32))
        weight = torch.from_numpy(weights.astype(np.float32))
        stats = UpdateStats(explained_variance=_explained(samples.returns, samples.steps.value))
        parts = 0
        for _ in range(EPOCHS):
            for rows in minibatches(len(returns), MINIBATCH, rng):
                out = self.network(Inputs(*[part[rows] for part in inputs]))
                log_ratio = joint_log_prob(out, action[rows], epsilon[rows], allowed[rows]) - old_log_prob[rows]
                ratio = log_ratio.exp()
                surrogate = clipped_surrogate(ratio, advantage[rows], CLIP_COEF)
                value_loss = (0.5 * weight[rows] * (returns[rows] - out.value) ** 2).mean()  # eq. 11
                parts_of_entropy = entropies(out)
                entropy = torch.stack(parts_of_entropy).sum(0).mean()  # eq. 12
                loss = -surrogate + VALUE_COEF * value_loss - settings.entropy_coef * entropy  # eq. 13
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
                    stats.clip_fraction += float(((ratio - 1).abs() > CLIP_COEF).float().mean())
                    stats.entropy_server += float(parts_of_entropy[0].mean())
                    stats.entropy_width += float(parts_of_entropy[1].mean())
                    stats.entropy_group += float(parts_of_entropy[2].mean())
                    stats.gradient_norm += norm
                parts += 1
        for name in stats.__struct_fields__:
            if name != "explained_variance":
                setattr(stats, name, getattr(stats, name) / max(parts, 1))
        return stats

    def imitate(self, samples: Samples, rng: np.random.Generator) -> UpdateStats:
        """The same over a teacher's decisions: likelihood instead of the surrogate, and the value of its states.

        Of widths and groups the policy keeps doubts: one that is sure of its teacher never finds out what is better.
        """
        settings = self.settings
        self._set_rate(0.0)
        inputs, action, _, allowed = tensors(samples.steps)
        nothing = torch.zeros(len(action))
        returns = torch.from_numpy(samples.returns.astype(np.float32))
        stats = UpdateStats(explained_variance=_explained(samples.returns, samples.steps.value))
        parts = 0
        for _ in range(EPOCHS):
            for rows in minibatches(len(returns), MINIBATCH // 4 + 1, rng):
                out = self.network(Inputs(*[part[rows] for part in inputs]))
                likelihood = joint_log_prob(out, action[rows], nothing[rows], allowed[rows]).mean()
                value_loss = (0.5 * (returns[rows] - out.value) ** 2).mean()
                doubt = settings.warm_start_doubt
                learned = (1 - doubt) * likelihood + doubt * _evenness(out, inputs, rows)
                stats.gradient_norm += self._step(VALUE_COEF * value_loss - learned)
                stats.policy_loss -= float(likelihood.detach())
                stats.value_loss += float(value_loss.detach())
                parts += 1
        for name in ("gradient_norm", "policy_loss", "value_loss"):
            setattr(stats, name, getattr(stats, name) / max(parts, 1))
        return stats

    def _set_rate(self, progress: float) -> None:
        factor = max(0.5 * (1 + math.cos(math.pi * progress)), 0.02)  # the last updates are not quite for nothing
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor

    def _step(self, loss: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRAD_NORM)
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


def minibatches(count: int, size: int, rng: np.random.Generator) -> list[Tensor]:
    """The rows of one epoch in random order, in parts of about `size`, and in `MINIBATCHES` parts at least."""
    order = torch.from_numpy(rng.permutation(count))
    return list(order.tensor_split(min(max(MINIBATCHES, round(count / size)), max(count, 1))))


def _explained(returns: Reals, values: npt.NDArray[np.float32]) -> float:
    variance = float(np.var(returns))
    return 0.0 if variance < SMALL else 1.0 - float(np.var(returns - values)) / variance
