"""The method's equations by hand-computed numbers, gradients by finite differences, and a toy that must be solved."""

import math

import numpy as np
import pytest
import torch

from slim_scheduler.core.router.learned.layout import Features, Layout
from slim_scheduler.core.router.learned.policy import NetworkSizes
from slim_scheduler.setup.config import TrainingConfig
from slim_scheduler.training.episode import Credit
from slim_scheduler.training.policy import Outputs, PolicyNetwork
from slim_scheduler.training.ppo import (
    PPO,
    clipped_surrogate,
    entropies,
    joint_log_prob,
    minibatches,
    mixed,
    planned_server,
    planned_width,
)
from slim_scheduler.training.returns import Horizon, RewardScale, Samples, Trajectory, returns_and_advantages
from slim_scheduler.training.rollout import Rollout, Steps

NO_PLAN = Layout(Features({}), Features({}))
ONE_STEP = Horizon(None)


def outputs(server: list[float], width: list[float], group: list[float]) -> Outputs:
    """Heads with these probabilities, for one decision."""
    heads = [torch.tensor([probabilities], dtype=torch.float64).log() for probabilities in (server, width, group)]
    return Outputs(*heads, torch.zeros(1, dtype=torch.float64))


def test_eq_5_mixes_the_server_head_with_the_uniform_distribution():
    p = torch.tensor([[0.7, 0.2, 0.1]])
    explored = mixed(p, torch.tensor([0.3]), torch.ones(1, 3))
    torch.testing.assert_close(explored, torch.tensor([[0.59, 0.24, 0.17]]))  # 0.7 x 0.7 + 0.3 / 3, ...


def test_eq_5_explores_only_servers_that_may_be_chosen():
    p = torch.tensor([[0.75, 0.25, 0.0]])
    explored = mixed(p, torch.tensor([0.2]), torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(explored, torch.tensor([[0.7, 0.3, 0.0]]))


def test_eq_6_adds_the_logarithms_with_the_mixture_inside():
    out = outputs([0.7, 0.2, 0.1], [0.25, 0.75], [0.5, 0.5])
    log_prob = joint_log_prob(
        out, torch.tensor([[1, 1, 0]]), torch.tensor([0.3], dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    )
    assert log_prob.item() == pytest.approx(math.log(0.24) + math.log(0.75) + math.log(0.5))


def test_eq_8_is_the_reward_and_what_it_is_above_the_value():
    rewards, values = np.array([1.0, -2.0]), np.array([0.25, 0.5])
    returns, advantages = returns_and_advantages(rewards, values, np.zeros(2), np.ones(2), np.zeros(2, bool), ONE_STEP)
    assert returns.tolist() == [1.0, -2.0]
    assert advantages.tolist() == [0.75, -2.5]


def test_eq_9_clips_gains_and_not_losses():
    ratio, advantage = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([2.0, -2.0, 2.0, -2.0])
    # min(3, 2.4), min(-3, -2.4), min(1, 1.6), min(-1, -1.6)
    assert clipped_surrogate(ratio, advantage, 0.2).item() == pytest.approx((2.4 - 3.0 + 1.0 - 1.6) / 4)


def test_eq_12_takes_the_entropy_of_the_unmixed_head():
    server, width, group = entropies(outputs([0.5, 0.5], [1.0, 1e-30], [0.25] * 4))
    assert server.item() == pytest.approx(math.log(2))
    assert width.item() == pytest.approx(0.0, abs=1e-9)
    assert group.item() == pytest.approx(math.log(4))


def test_the_plans_next_width_is_what_the_width_head_is_held_to():
    out = outputs([1.0], [0.1, 0.7, 0.2], [1.0])
    torch.testing.assert_close(planned_width(out, torch.tensor([[0.0, 1.0, 0.0]])).item(), math.log(0.7))
    assert planned_width(out, torch.zeros(1, 3)).item() == 0.0, "it names none"


def test_the_server_of_lp_is_what_the_server_head_is_held_to():
    out = outputs([0.1, 0.7, 0.2], [1.0], [1.0])
    torch.testing.assert_close(planned_server(out, torch.tensor([[0.0, 1.0, 0.0]])).item(), math.log(0.7))
    assert planned_server(out, torch.zeros(1, 3)).item() == 0.0, "it names none"


def test_gradient_of_the_mixture_likelihood_matches_finite_differences():
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(4, n, generator=generator, dtype=torch.float64, requires_grad=True) for n in (3, 2, 5)]
    action = torch.tensor([[0, 1, 4], [2, 0, 0], [1, 1, 2], [1, 0, 3]])
    epsilon = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64)
    allowed = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.float64)

    def likelihood(*heads: torch.Tensor) -> torch.Tensor:
        return joint_log_prob(Outputs(*heads, torch.zeros(4)), action, epsilon, allowed)

    assert torch.autograd.gradcheck(likelihood, logits)


def test_gae_with_full_trace_is_the_discounted_sum_minus_the_value():
    horizon = Horizon(2.0)
    rewards, values = np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.6, 0.7])
    gaps = np.array([1.0, 0.5, 0.25])
    _, advantages = returns_and_advantages(rewards, values, np.array([0.6, 0.7, 0.9]), gaps, np.zeros(3, bool), horizon)
    discount = np.exp(-gaps / 2.0)
    whole = 1.0 + discount[0] * (2.0 + discount[1] * (3.0 + discount[2] * 0.9))
    assert advantages[0] == pytest.approx(whole - 0.5)


def test_nothing_is_looked_ahead_beyond_a_run_that_is_over():
    horizon = Horizon(1e9)
    over = np.array([True, False])
    _, advantages = returns_and_advantages(
        np.array([1.0, 5.0]), np.zeros(2), np.array([9.0, 0.0]), np.ones(2), over, horizon
    )
    assert advantages.tolist() == [1.0, 5.0]


def steps(first: int, count: int, cut: bool = False) -> Steps:
    flags = np.zeros(count, bool)
    ends = flags.copy()
    ends[-1] = cut
    return Steps(
        number=np.arange(first, first + count),
        at=np.arange(first, first + count) * 0.1,
        shared=np.zeros((count, 2), np.float32),
        servers=np.zeros((count, 2, 3), np.float32),
        server_mask=np.ones((count, 2), bool),
        present=np.ones((count, 2), bool),
        width_mask=np.ones((count, 1), bool),
        group_mask=np.ones((count, 1), bool),
        action=np.zeros((count, 3), np.int64),
        log_prob=np.arange(first, first + count).astype(np.float32),
        value=np.zeros(count, np.float32),
        epsilon=np.zeros(count, np.float32),
        over=flags,
        cut=ends,
    )


def credit(decision: int, reward: float = 1.0) -> Credit:
    return Credit(decision, 1, reward, 0.0, 0.0, 0.0, 0.0)


def test_an_unfinished_block_is_carried_over_once_with_its_log_probability():
    trajectory, scale = Trajectory(ONE_STEP, by_tasks=True), RewardScale()
    first = trajectory.add(Rollout(steps(1, 4), 0.0, 0.5, [credit(1), credit(3)], 0.0), scale)
    assert first.steps.number.tolist() == [1, 3]
    second = trajectory.add(Rollout(steps(5, 4), 0.0, 0.9, [credit(2, 7.0), credit(6)], 0.0), scale)
    assert second.steps.number.tolist() == [2, 6]
    assert second.steps.log_prob.tolist() == [2.0, 6.0]  # what it was when decision 2 was taken
    assert second.returns.tolist() == [7.0, 1.0]
    third = trajectory.add(Rollout(steps(9, 4, cut=True), 0.0, 1.3, [credit(4), credit(5), credit(9)], 0.0), scale)
    assert third.steps.number.tolist() == [5, 9]  # decision 4 had its one update


def test_a_return_that_looks_ahead_sums_the_tasks_around_the_running_mean():
    scale = RewardScale()
    ahead = Horizon(seconds=1.0, gae_lambda=0.9)
    credits = [Credit(1, 3, 1.0, *[0.0] * 4), Credit(2, 1, 5.0, *[0.0] * 4)]
    rollout = Rollout(steps(1, 2), 0.0, 0.3, credits, 0.0)
    scale.learn([rollout], True, ahead)
    assert scale.mean == 2.0  # (3 x 1 + 1 x 5) / 4
    scale.spread = 3.0
    assert scale.apply(Credit(3, 2, 3.5, *[0.0] * 4), sums=True) == 1.0
    batch = Trajectory(ahead, by_tasks=True).add(rollout, scale)
    assert batch.weights.tolist() == [1.0, 1.0]
    assert batch.returns[1] == 1.0  # 1 task, 3 above the mean


def test_a_return_that_does_not_is_one_tasks_and_weighs_as_many_as_there_are():
    scale = RewardScale()
    credits = [Credit(1, 3, 1.0, *[0.0] * 4), Credit(2, 1, 5.0, *[0.0] * 4)]
    rollout = Rollout(steps(1, 2), 0.0, 0.3, credits, 0.0)
    scale.learn([rollout], True, ONE_STEP)
    assert scale.mean == 2.0
    assert scale.spread == pytest.approx(math.sqrt((1 + 9) / 2))  # of single tasks: 1 and 3 away from it
    batch = Trajectory(ONE_STEP, by_tasks=True).add(rollout, scale)
    assert batch.weights.tolist() == [3.0, 1.0]
    assert batch.returns.tolist() == pytest.approx([-1 / scale.spread, 3 / scale.spread])
    block = Trajectory(ONE_STEP, by_tasks=False).add(rollout, scale)
    assert block.weights.tolist() == [1.0, 1.0]  # the paper's: a block counts once


def test_what_a_decision_imposes_is_taken_from_what_it_earned():
    scale = RewardScale()
    assert scale.apply(Credit(1, 1, 1.0, *[0.0] * 4, charged=0.25), sums=True) == 0.75


@pytest.mark.parametrize("kind", ["paper", "extended"])
def test_a_two_armed_bandit_is_solved(kind: str):
    """Server 1, the second of three widths and the first of two groups pay; nothing else does."""
    sizes = NetworkSizes(kind, 2, 3, 2 if kind == "paper" else None, 3, 2, 16)
    settings = TrainingConfig(learning_rate=1e-2, entropy_coef=0.0)
    ppo = PPO(PolicyNetwork(sizes, torch.Generator().manual_seed(0)), settings, NO_PLAN)
    rng = np.random.default_rng(0)
    blank = steps(0, 256)
    rows = np.zeros((256, 2, 3), np.float32)
    rows[:, 1, 0] = 1.0  # how a policy without names tells the servers apart
    for _ in range(25):
        inputs_of = Steps(
            **{
                **{name: getattr(blank, name) for name in blank.__struct_fields__},
                "servers": rows,
                "width_mask": np.ones((256, 3), bool),
                "group_mask": np.ones((256, 2), bool),
                "epsilon": np.full(256, 0.1, np.float32),
                "action": np.stack([rng.integers(n, size=256) for n in (2, 3, 2)], 1),
            }
        )
        from slim_scheduler.training.ppo import tensors

        inputs, action, epsilon, allowed = tensors(inputs_of)
        with torch.no_grad():
            out = ppo.network(inputs)
            explored = mixed(torch.softmax(out.server, 1), epsilon, allowed)
            heads = (explored, torch.softmax(out.width, 1), torch.softmax(out.group, 1))
            drawn = [[rng.choice(h.shape[1], p=row / row.sum()) for row in h.double().numpy()] for h in heads]
            action = torch.tensor(np.stack(drawn, 1))
            log_prob = joint_log_prob(out, action, epsilon, allowed)
        taken = action.numpy()
        rewards = (taken[:, 0] == 1) + 0.5 * (taken[:, 1] == 1) + 0.5 * (taken[:, 2] == 0).astype(float)
        values = out.value.numpy().astype(float)
        import msgspec

        acted = msgspec.structs.replace(inputs_of, action=taken, log_prob=log_prob.numpy(), value=out.value.numpy())
        ppo.update(Samples(acted, rewards, rewards - values, np.ones(len(taken))), rng, 0.0)
    with torch.no_grad():
        out = ppo.network(inputs)
    best = [int(head[0].argmax()) for head in out[:3]]
    assert best == [1, 1, 0]
    assert torch.softmax(out.server, 1)[0, 1] > 0.9


@pytest.mark.parametrize(("count", "parts"), [(3, 3), (1024, 4), (4096, 4), (8192, 8)])
def test_small_updates_have_several_gradient_steps_per_epoch(count: int, parts: int) -> None:
    rows = minibatches(count, 1024, np.random.default_rng(0))
    assert len(rows) == parts
    assert sorted(torch.cat(rows).tolist()) == list(range(count))
