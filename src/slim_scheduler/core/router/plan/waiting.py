"""How fast a queue is worked off where waiting is cheap, and accuracy is given up for it.

An item that goes now lets all behind it go sooner, until the queue is gone. So one more is worth, beyond what it is
worth without a queue, what waiting costs times the time until then: the costate of Pontryagin's principle where
f(rate) = rate * accuracy(rate) is to be the highest and each second of an item's waiting costs `cost`. With the load
that is `expected` to come, and `left` seconds until the queue is gone

    f'(rate) = f'(expected) - cost * left,    queue = the integral of (rate - expected) over these seconds.

Where f bends evenly that is rate - expected = sqrt(2 * cost * queue / |f''|): a short queue is worked off gently, a
long one not in proportion, and no queue at any price.
"""

import math
from collections.abc import Sequence

import msgspec

from slim_scheduler.core.reward import RewardWeights
from slim_scheduler.core.types import Seconds, Watts

SMOOTHED = 0.1  # of the highest load, to either side: f is made of straight lines, and chance would jump along them


class Waiting(msgspec.Struct, frozen=True):
    """A queue of so many seconds may stand, at no cost; the weights of eq. 7 say what a longer one costs."""

    queue: Seconds
    alpha: float
    beta: float
    gamma: float

    def cost(self, segments: int, power: Watts) -> float:
        """Accuracy that a second of one item's waiting costs, at this mean power of a server.

        Eq. 7 charges beta for the second and gamma for its joules. It pays alpha for the accuracy after each segment by
        the widths so far, which a choice of all widths moves (segments + 1) / 2 times on average.
        """
        paid = self.alpha * (segments + 1) / 2
        return (self.beta + self.gamma * power) / paid if paid else math.inf


def waiting(queue: Seconds, weights: RewardWeights) -> Waiting | None:
    """None: no queue may stand."""
    return Waiting(queue, weights.alpha, weights.beta, weights.gamma) if queue else None


def slopes(rates: Sequence[float], accuracies: Sequence[float]) -> list[float]:
    """f' at each of these rates, ascending and evenly spaced from 0 (not among them), smoothed. It never ascends."""
    served = [0.0, *[rate * accuracy for rate, accuracy in zip(rates, accuracies, strict=True)]]
    at, last = [0.0, *rates], len(rates)
    reach = max(1, round(SMOOTHED * last))
    found: list[float] = []
    for i in range(1, last + 1):
        low, high = max(0, i - 1 - reach), min(last, i + reach)
        slope = (served[high] - served[low]) / (at[high] - at[low])
        found.append(min(slope, found[-1]) if found else slope)
    return found


def queues(rates: Sequence[float], slopes: Sequence[float], at: int, cost: float) -> list[float]:
    """Items from which on each of the rates is the best, where `rates[at]` is expected to come; for those up to it 0.

    Infinite where no queue is worth so fast a rate.
    """
    found = [0.0] * (at + 1)
    queue = left = 0.0
    for i in range(at + 1, len(rates)):
        gain = slopes[at] - slopes[i]
        begins = gain / cost if cost else (math.inf if gain > 0 else 0.0)
        if math.isinf(begins):
            queue = math.inf
        elif begins > left:
            queue += (rates[i - 1] - rates[at]) * (begins - left)
            left = begins
        found.append(queue)
    return found
