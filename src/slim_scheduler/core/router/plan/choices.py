"""What can be done with an item: run it at one width tuple, or again at a second one where its margin is small.

Choices are the columns of the plan's program. Accuracy and share that goes again come from the table's items. All
tuples are choices; of the pairs only those stay that no mix of others beats at any server (the upper hull of accuracy
over device time), because nothing else is ever in an optimal plan of that server.

Which tuples pairs are made of is the caller's: the bound takes all that are efficient, a router that chooses on
held-out images the uniform ones alone, because the best of thousands of pairs on a few thousand images is mostly luck.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import tuple_seconds
from slim_scheduler.core.router.escalation import Choice
from slim_scheduler.core.types import WidthTuple

SHARES = tuple(i / 20 for i in range(1, 20))  # of a first tuple's items that go again: the grid of thresholds
MOST_EFFICIENT = 64  # tuples that pairs are made of, where more are efficient

Floats = npt.NDArray[np.float64]


def uniform(table: AccuracyTable) -> list[WidthTuple]:
    """The tuples of one width."""
    return [widths for widths in table.tuples if len(set(widths)) == 1]


def pair_of(table: AccuracyTable, first: WidthTuple, second: WidthTuple, threshold: float) -> Choice:
    """A given pair as a choice. Raises DataError without margins."""
    again = table.margin(first).astype(np.float64) < threshold
    right = np.where(again, table.correct(second), table.correct(first))
    return Choice(first, float(right.mean()), second, threshold, float(again.mean()))


def efficient(facts: RouterFacts, table: AccuracyTable) -> list[WidthTuple]:
    """Tuples that no other beats in accuracy at less time, evenly thinned where they are many."""
    costs = _costs(facts, table.tuples)
    by_cost = sorted(table.tuples, key=lambda t: (float(costs[t].sum()), -table.top1(t), t))
    best, kept = -1.0, []
    for widths in by_cost:
        if table.top1(widths) > best:
            best = table.top1(widths)
            kept.append(widths)
    places = np.linspace(0, len(kept) - 1, min(len(kept), MOST_EFFICIENT)).round().astype(int)
    return [kept[i] for i in places.tolist()]


def pairs(facts: RouterFacts, table: AccuracyTable, candidates: Sequence[WidthTuple]) -> list[Choice]:
    """The pairs of candidates worth knowing on these servers, cheapest first. Raises DataError without margins."""
    costs = _costs(facts, candidates)
    found: list[tuple[Floats, Choice]] = [(costs[t], Choice(t, table.top1(t))) for t in candidates]
    right = np.array([table.correct(t) for t in candidates], dtype=np.float32)  # (candidates, items)
    for i, first in enumerate(candidates):
        thresholds, shares, again = _grid(table.margin(first))  # (grid,), (grid,), (grid, items)
        # Right answers with each second tuple: the first's where the margin is enough, the second's elsewhere.
        accuracy = (again @ right.T + ((1 - again) @ right[i])[:, None]) / table.items  # (grid, candidates)
        for j, second in enumerate(candidates):
            if np.all(costs[second] <= costs[first]):
                continue
            found += [
                (
                    costs[first] + shares[k] * costs[second],
                    Choice(first, float(accuracy[k, j]), second, float(thresholds[k]), float(shares[k])),
                )
                for k in range(len(thresholds))
            ]
    points = np.array([(*cost, choice.accuracy) for cost, choice in found])
    kept: set[int] = set()
    for server in range(len(facts.servers)):
        kept |= set(_hull(points[:, server], points[:, -1]))
    return [found[i][1] for i in sorted(kept, key=lambda i: (points[i, 0], i)) if found[i][1].second is not None]


def _costs(facts: RouterFacts, tuples: Sequence[WidthTuple]) -> dict[WidthTuple, Floats]:
    """Device time of an item by tuple, (servers,)."""
    return {t: np.array([tuple_seconds(server, t) for server in facts.servers.values()]) for t in tuples}


def _grid(margins: npt.NDArray[np.float16]) -> tuple[Floats, Floats, npt.NDArray[np.float32]]:
    """Thresholds, the shares of items below them, and who those are: (grid,), (grid,), (grid, items)."""
    values = margins.astype(np.float64)
    thresholds = np.unique(np.quantile(values, SHARES))
    below = values < thresholds[:, None]
    shares = below.mean(axis=1)
    told_apart = (shares > 0) & (shares < 1)
    return thresholds[told_apart], shares[told_apart], below[told_apart].astype(np.float32)


def _hull(x: Floats, y: Floats) -> Sequence[int]:
    """Indices of the upper left hull: highest y at each x, concave, up to the highest y of all."""
    kept: list[int] = []
    for i in np.lexsort((-y, x)).tolist():
        if kept and y[i] <= y[kept[-1]]:
            continue
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) <= (y[i] - y[a]) * (x[b] - x[a]):
                kept.pop()
            else:
                break
        kept.append(i)
    return kept
