"""The reward of a block, eq. 7: what a user's weights make of accuracy, latency, energy and balance.

Pure arithmetic on floats or arrays; training, summaries and the greedy router share it. Where its inputs come from
(priors, cumulated energy, sampled utilisation) is the caller's affair.
"""

from typing import Protocol, TypeVar

import numpy as np

Values = TypeVar("Values", float, np.ndarray)


class RewardWeights(Protocol):
    """The weights of eq. 7; `config.RewardConfig` is one."""

    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def gamma(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def bonus(self) -> float: ...
    @property
    def center_accuracy(self) -> bool: ...


def block_reward(
    weights: RewardWeights, accuracy: Values, latency: Values, energy: Values, variance: Values, mean_top1: float = 0.0
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


def undone_reward(weights: RewardWeights, segments: int, latency: Values, mean_top1: float = 0.0) -> Values:
    """Reward of an item that got no answer: accuracy 0 in every segment, and its latency charged once.

    It replaces what finished segments had earned; centred, giving up must not beat a wrong answer.
    """
    return -weights.alpha * segments * _center(weights, mean_top1) - weights.beta * latency


def _center(weights: RewardWeights, mean_top1: float) -> float:
    return mean_top1 if weights.center_accuracy else 0.0
