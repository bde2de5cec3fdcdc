"""`slim train`: collect, update, repeat; resumes where it stopped, and leaves a policy folder.

Everything that the result depends on follows from the configuration and the seed, so a run that was killed and resumed
ends in the same policy as one that was not.
"""

import hashlib
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.costs import full_batch_time
from slim_scheduler.core.router.learned.encoders import build_encoder
from slim_scheduler.core.router.learned.layout import LAYOUT, layout_of
from slim_scheduler.core.router.learned.policy import NetworkSizes
from slim_scheduler.core.router.learned.router import PolicyManifest
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.setup.accuracy_files import TABLE_FILES, read_accuracy
from slim_scheduler.setup.config import Config, config_from
from slim_scheduler.setup.interruption import deferred
from slim_scheduler.setup.policy_files import write_policy
from slim_scheduler.training.checkpoint import TrainingState, read_checkpoint, write_checkpoint
from slim_scheduler.training.curves import Curves, UpdateReport, describe
from slim_scheduler.training.policy import PolicyNetwork
from slim_scheduler.training.ppo import PPO, Batch, Horizon, RewardScale, Trajectory
from slim_scheduler.training.rollout import Order, Rollout
from slim_scheduler.training.scenario import Scenarios
from slim_scheduler.training.workers import Workers

HORIZON_BATCHES = 30  # full batches' time, where the configuration gives no horizon; 300 drowned rewards in V's errors


def train(
    config: Config, out: Path, seed: int = 0, report: Callable[[UpdateReport], None] | None = None
) -> PolicyManifest:
    """Trains a router for the configured cluster and writes its policy to `out`; resumes what is there.

    Interrupted, it writes the policy as far as it came and raises KeyboardInterrupt. Raises InputError.
    """
    torch.set_num_threads(1)
    training = config.training
    for name in ("plan_coef", "plan_server_coef"):
        if getattr(training, name) and training.observation != "planned":
            raise ConfigError(
                f"{name} needs the observation planned; this is {training.observation}, which sees no plan"
            )
    if not training.decisions and not (training.warm_start and training.warm_start_decisions):
        raise ConfigError("training.decisions is 0 and nothing is imitated; give decisions, or a warm_start alone")
    facts = Scenarios(config).facts
    manifest = _manifest(config, seed)
    layout = layout_of(training.observation, facts.shape, len(facts.servers))
    ppo = PPO(fresh_network(config, seed), training, layout)
    settings = _fingerprint(config, seed)
    state = read_checkpoint(out / "checkpoint", settings, ppo) or TrainingState(
        update=0, decided=0, scale=RewardScale(), settings=settings
    )
    per_update = training.workers * training.rollout_decisions
    warm = _whole_episodes(training.warm_start_decisions if training.warm_start else 0, per_update, config)
    last = warm + -(-training.decisions // per_update)
    every = _whole_episodes(training.checkpoint_updates, 1, config)
    scale, decided = state.scale, state.decided
    horizon = Horizon(
        training.returns,
        training.horizon_s or HORIZON_BATCHES * manifest.batch_time,
        training.gae_lambda,
        training.n_steps,
    )
    by_tasks = training.reward_weight == "tasks"
    trajectories = [Trajectory(horizon, by_tasks) for _ in range(training.workers)]
    curves = Curves(out, state.update)
    with deferred() as interruption, Workers(config, seed) as workers:
        for update in range(state.update, last):
            began = time.perf_counter()
            imitating = update < warm
            order = Order(
                parameters=ppo.network.arrays(),
                update=update,
                decided=decided,
                decisions=training.rollout_decisions,
                teacher=training.warm_start if imitating else "",
            )
            rollouts = workers.collect(order)
            scale.learn(rollouts, by_tasks, horizon)
            scales = [
                _own_scale(r, by_tasks, horizon) if training.reward_scale == "rollout" else scale for r in rollouts
            ]
            batch = Batch.join([t.add(r, s) for t, r, s in zip(trajectories, rollouts, scales, strict=True)])
            rng = np.random.default_rng([seed, update])
            if imitating:
                stats = ppo.imitate(batch, rng)
            else:
                stats = ppo.update(batch, rng, (update - warm) / (last - warm))
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
                write_checkpoint(out / "checkpoint", now, ppo)
            interruption.check()
    curves.close()
    return manifest


def fresh_network(config: Config, seed: int) -> PolicyNetwork:
    """The network that training with this configuration starts from."""
    return PolicyNetwork(_manifest(config, seed).sizes, torch.Generator().manual_seed(seed))


def with_preset(config: Config, folder: Path, preset: str) -> Config:
    """The configuration with the `[reward]` and `[training]` keys of a preset: a file, or PRESET.toml in `folder`."""
    path = Path(preset) if preset.endswith(".toml") else folder / f"{preset}.toml"
    try:
        tree = tomllib.loads(path.read_text())
    except OSError:
        found = ", ".join(sorted(file.stem for file in folder.glob("*.toml"))) or "none"
        raise ConfigError(f"preset {path} does not exist; files beside the configuration: {found}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"preset {path} is not valid TOML: {error}") from None
    if not set(tree) <= {"reward", "training"}:
        raise ConfigError(f"preset {path} may hold [reward] and [training]; it has {', '.join(tree)}")
    whole = msgspec.to_builtins(config)
    return config_from({**whole, **{name: {**whole[name], **keys} for name, keys in tree.items()}})


def _manifest(config: Config, seed: int) -> PolicyManifest:
    training = config.training
    facts = Scenarios(config).facts
    batch_time = full_batch_time(facts)
    folder = Path(config.model.path)

    def plans() -> Plans:
        return Plans(facts, read_accuracy(folder / TABLE_FILES["held-out"]), training.plan_rho)

    encoder = build_encoder(training.observation, facts, batch_time, plans)
    shape = facts.shape
    return PolicyManifest(
        layout=LAYOUT,
        kind=training.observation,
        network=shape.name,
        segments=shape.segments,
        widths=shape.widths,
        groups=facts.groups,
        sizes=NetworkSizes(
            kind=training.observation,
            shared=encoder.layout.shared.size,
            server=encoder.layout.server.size,
            servers=len(facts.servers) if training.observation == "paper" else None,
            widths=len(shape.widths),
            groups=len(facts.groups),
            hidden=training.hidden,
        ),
        batch_time=batch_time,
        plan_rho=training.plan_rho,
        reward=msgspec.to_builtins(config.reward),
        training={**msgspec.to_builtins(training), "seed": seed},
    )


def _trained(manifest: PolicyManifest, decided: int, updates: int) -> PolicyManifest:
    return msgspec.structs.replace(manifest, training={**manifest.training, "decided": decided, "updates": updates})


def _own_scale(rollout: Rollout, by_tasks: bool, horizon: Horizon) -> RewardScale:
    scale = RewardScale()
    scale.learn([rollout], by_tasks, horizon)
    return scale


def _whole_episodes(count: int, per_update: int, config: Config) -> int:
    """Updates that `count` needs, rounded up to whole episodes."""
    length = config.training.episode_rollouts
    return -(-count // (per_update * length)) * length


def _fingerprint(config: Config, seed: int) -> str:
    return hashlib.sha256(msgspec.json.encode([config, seed], order="deterministic")).hexdigest()
