"""Training a router: ours against Stable-Baselines3's PPO on the same environment, with the same re-credited rewards.

Both run on this machine, two episodes side by side, with the same sizes of layers, rollouts and minibatches and the
same learning rate. Speed is decisions trained on per second, simulation included. The time to quality is until the mean
reward per task of an episode's updates has closed 95 % of the gap between random choices and the shipped policy.
Everything is simulated.
"""

import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slim_scheduler.core.router.base import Router
from slim_scheduler.setup.accuracy_files import TABLE_FILES, read_accuracy
from slim_scheduler.setup.config import Config, load_config, with_preset
from slim_scheduler.setup.machines import build_router, load_profiles, load_shape
from slim_scheduler.training.episode import Episode

CONFIG, PRESET, POLICY = Path("examples/demo/cluster.toml"), "balanced", "examples/demo/policies/balanced"
RATE = 300.0
DECISIONS = 40_000
ROLLOUT = 512
EPISODE = 4  # rollouts
CLOSED = 0.95
ENVS = 2


def run() -> dict[str, Any]:
    config = _config()
    low, high = (_reward(config, router) for router in ("random", f"ppo:{POLICY}"))
    goal = low + CLOSED * (high - low)
    ours_speed, ours_time = _ours(config, goal)
    theirs_speed, theirs_time = _theirs(config, goal)
    versions = {name: version(name) for name in ("slim-scheduler", "stable-baselines3", "torch", "numpy")}
    note = f"{CONFIG} at {RATE:g} items/s, {DECISIONS} decisions at most; reward {low:.5f} to {high:.5f}"
    return {
        "ppo_decisions_per_s": {
            "ratio": ours_speed / theirs_speed,
            "ours": round(ours_speed),
            "theirs": round(theirs_speed),
            "unit": "decisions/s",
            "versions": versions,
            "note": note,
        },
        "ppo_time_to_95_percent": {
            "ratio": theirs_time / ours_time if ours_time and theirs_time else None,
            "ours": ours_time and round(ours_time, 1),
            "theirs": theirs_time and round(theirs_time, 1),
            "unit": "s (none: not within the decisions)",
            "versions": versions,
            "note": note,
        },
    }


def _config() -> Config:
    config = with_preset(load_config(CONFIG, (f"workload.rate={RATE}",)), CONFIG.parent, PRESET)
    training = msgspec.structs.replace(
        config.training,
        loads=(1.0, 1.0),
        warm_start="",  # from nothing, as theirs
        horizon_s=0.05,  # about 100 decisions, as their discount of 0.99
        episode_rollouts=EPISODE,
        decisions=DECISIONS,
        workers=ENVS,
        rollout_decisions=ROLLOUT,
    )
    return msgspec.structs.replace(config, training=training)


def _reward(config: Config, router_name: str) -> float:
    """Mean reward per task of a router over one episode as long as a training episode."""
    shape = load_shape(config)
    router: Router = build_router(router_name, config, shape, load_profiles(config, shape))
    table = read_accuracy(Path(config.model.path) / TABLE_FILES["held-out"])
    episode, rng = Episode(config, table, 0, expected=True), np.random.default_rng(0)
    while episode.view is not None and episode.decisions < EPISODE * ROLLOUT:
        episode.decide(router.decide(episode.view, rng))
    episode.end()
    credits = episode.take_credits()
    return float(np.average([c.reward for c in credits], weights=[c.tasks for c in credits]))


def _ours(config: Config, goal: float) -> tuple[float, float | None]:
    from slim_scheduler.training.curves import UpdateReport
    from slim_scheduler.training.ppo import train

    began, reached = time.perf_counter(), _Reached(goal)
    speeds: list[float] = []

    def report(update: UpdateReport) -> None:
        reached.add(update.reward, time.perf_counter() - began)
        if not update.imitating and update.update:
            speeds.append(update.decisions_per_s)

    with tempfile.TemporaryDirectory() as out:
        train(config, Path(out), seed=1, report=report)
    return 1 / float(np.mean(1 / np.array(speeds))), reached.at


def _theirs(config: Config, goal: float) -> tuple[float, float | None]:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from slim_scheduler.training.environment import ClusterEnv
    from slim_scheduler.training.ppo import EPOCHS, GAE_LAMBDA, HIDDEN, MINIBATCH, MINIBATCHES

    training = config.training
    reached = _Reached(goal)

    class Recredit(BaseCallback):
        """Puts each reward at the decision that earned it, before SB3's update looks at it."""

        def __init__(self) -> None:
            super().__init__()
            self.began = time.perf_counter()

        def _on_rollout_start(self) -> None:
            self.earned = np.zeros((ROLLOUT, ENVS), np.float32)
            self.place: list[dict[int, int]] = [{} for _ in range(ENVS)]
            self.total, self.tasks = 0.0, 0

        def _on_step(self) -> bool:
            for env, info in enumerate(self.locals["infos"]):
                position = self.model.rollout_buffer.pos
                self.place[env][info["decision"]] = position
                self.tasks += info["tasks"]
                for decision, reward in info["credits"]:
                    self.total += reward
                    if decision in self.place[env]:
                        self.earned[self.place[env][decision], env] = reward
                if self.locals["dones"][env]:
                    self.place[env] = {}
            return True

        def _on_rollout_end(self) -> None:
            buffer = self.model.rollout_buffer
            spread = self.earned.std() + 1e-8
            buffer.rewards[:] = (self.earned - self.earned.mean()) / spread
            last = self.locals["values"]
            buffer.compute_returns_and_advantage(last_values=last, dones=self.locals["dones"])
            reached.add(self.total / max(1, self.tasks), time.perf_counter() - self.began)

    def learn(vector: type[DummyVecEnv] | type[SubprocVecEnv], decisions: int) -> float:
        """Decisions per second."""
        torch.manual_seed(1)
        envs = vector([lambda: ClusterEnv(config, max_decisions=EPISODE * ROLLOUT) for _ in range(ENVS)])
        model = PPO(
            "MlpPolicy",
            envs,
            n_steps=ROLLOUT,
            batch_size=min(MINIBATCH, ENVS * ROLLOUT // MINIBATCHES),
            n_epochs=EPOCHS,
            learning_rate=training.learning_rate,
            gae_lambda=GAE_LAMBDA,
            ent_coef=training.entropy_coef,
            policy_kwargs={"net_arch": [HIDDEN, HIDDEN]},
            seed=1,
            device="cpu",
        )
        began = time.perf_counter()
        model.learn(decisions, callback=Recredit())
        speed = model.num_timesteps / (time.perf_counter() - began)
        envs.close()
        return speed

    faster = max((DummyVecEnv, SubprocVecEnv), key=lambda vector: learn(vector, 4 * ENVS * ROLLOUT))
    reached = _Reached(goal)  # the callback's; what the trials reached does not count
    speed = learn(faster, DECISIONS)
    return speed, reached.at


class _Reached:
    """When the mean over one episode's updates first was at the goal."""

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self._rewards: list[float] = []
        self.at: float | None = None

    def add(self, reward: float, at: float) -> None:
        self._rewards.append(reward)
        if self.at is None and len(self._rewards) >= EPISODE and np.mean(self._rewards[-EPISODE:]) >= self._goal:
            self.at = at
