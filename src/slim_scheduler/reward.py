"""The reward of a block, eq. 7: what a user's weights make of accuracy, latency, energy and balance.

Pure arithmetic on floats or arrays; training, summaries and the greedy bound share it. Where its inputs come from
(priors, cumulated energy, sampled utilisation) is the caller's affair.
"""

from typing import TypeVar

import numpy as np

from slim_scheduler.config import RewardConfig

Values = TypeVar("Values", float, np.ndarray)


def block_reward(
    weights: RewardConfig, accuracy: Values, latency: Values, energy: Values, variance: Values, mean_top1: float = 0.0
) -> Values:
    """Reward per task of a block: accuracy in [0, 1], latency L in seconds, energy E in joules, variance of ratios.

    `mean_top1` is what accuracy is centred by where the weights ask for it.
    """
    return (  # eq. 7
        weights.alpha * (accuracy - _center(weights, mean_top1))
        - weights.beta * latency
        - weights.gamma * energy
        - weights.delta * variance
        + weights.bonus
    )


def undone_reward(weights: RewardConfig, segments: int, latency: Values, mean_top1: float = 0.0) -> Values:
    """Reward of an item that got no answer: accuracy 0 in every segment, and its latency charged once.

    It replaces what finished segments had earned; centred, giving up must not beat a wrong answer.
    """
    return -weights.alpha * segments * _center(weights, mean_top1) - weights.beta * latency


def _center(weights: RewardConfig, mean_top1: float) -> float:
    return mean_top1 if weights.center_accuracy else 0.0
