"""The two ways to train a router: `paper`, the method's own, and `planned`, beside the linear program's plan.

A recipe fixes what belongs together. What `[training]` says otherwise (which figures are seen, how much is explored) is
for ablations.
"""

from typing import Literal

import msgspec

from slim_scheduler.core.router.learned.layout import Kind


class RouterRecipe(msgspec.Struct, frozen=True):
    """What is seen, what a reward is of, and how much is explored.

    `reward_weight`: a block counts once per task, or once. `accuracy`: a tuple's measured share of right answers, or
    each item's own. `epsilon_max` and `epsilon_min`: eq. 5, at the start and at the end.
    """

    observation: Kind
    reward_weight: Literal["tasks", "block"]
    accuracy: Literal["expected", "outcomes"]
    epsilon_max: float
    epsilon_min: float


RECIPES = {
    "paper": RouterRecipe("paper", "block", "outcomes", 0.1, 0.01),
    "planned": RouterRecipe(
        "planned", "tasks", "expected", 0.0, 0.0
    ),  # noise is load, and a queue, near a cluster's limit
}
