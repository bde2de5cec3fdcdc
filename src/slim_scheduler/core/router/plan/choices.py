"""What can be done with an item: run it at one width tuple, or again at a second one where its margin is small.

Choices are the columns of the plan's program. Accuracy and share that goes again come from the table's items. All
tuples are choices; of the pairs only those stay that no mix of others beats at any server (the upper hull of accuracy
over device time).

A second pass goes on from the first's activation after the segments at which both tuples are alike, and costs the
others. So a good second tuple need not be efficient by itself: pairs are of an efficient tuple and any wider one that
is dearer somewhere. Pairs that begin with another tuple are not looked at.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import seconds_per_item, tuple_seconds
from slim_scheduler.core.router.escalation import Choice, is_wider, shared_segments
from slim_scheduler.core.types import Width, WidthTuple

SHARES = tuple(i / 20 for i in range(1, 20))  # of a first tuple's items that go again: the grid of thresholds
MOST_FIRST = 64  # tuples that pairs begin with, where more are efficient
MOST_SECOND = 1024  # tuples that pairs end with; where there are more, only the efficient ones

Floats = npt.NDArray[np.float64]


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
    places = np.linspace(0, len(kept) - 1, min(len(kept), MOST_FIRST)).round().astype(int)
    return [kept[i] for i in places.tolist()]


def pairs(facts: RouterFacts, table: AccuracyTable) -> list[Choice]:
    """The pairs worth knowing on these servers, cheapest first. Raises DataError without margins."""
    firsts = efficient(facts, table)
    tuples = list(table.tuples) if len(table.tuples) <= MOST_SECOND else firsts
    costs = {t: _segment_costs(facts, t) for t in tuples}
    whole = {t: cost.sum(axis=1) for t, cost in costs.items()}
    right = np.array([table.correct(t) for t in tuples], dtype=np.float32)  # (tuples, items)
    # A point is device time by server and accuracy, (points, servers + 1): first of tuples alone, then of pairs.
    points = [np.array([[*whole[t], table.top1(t)] for t in tuples])]
    named: list[tuple[WidthTuple, WidthTuple, float, float]] = []  # of pairs: tuples, threshold, share
    for first in firsts:
        wider = [
            j for j, second in enumerate(tuples) if is_wider(second, first) and np.any(whole[second] > whole[first])
        ]
        if not wider:
            continue
        thresholds, shares, again = _grid(table.margin(first))  # (grid,), (grid,), (grid, items)
        stays = (1 - again) @ table.correct(first).astype(np.float32)
        # Right answers with each second tuple: the first's where the margin is enough, the second's elsewhere.
        accuracy = (right[wider] @ again.T + stays) / table.items  # (wider, grid)
        rest = np.array([costs[tuples[j]][:, shared_segments(first, tuples[j]) :].sum(axis=1) for j in wider])
        time = whole[first] + shares[:, None] * rest[:, None]  # (wider, grid, servers)
        points.append(np.concatenate([time, accuracy[..., None]], axis=-1).reshape(-1, len(facts.servers) + 1))
        named += [
            (first, tuples[j], threshold, share)
            for j in wider
            for threshold, share in zip(thresholds.tolist(), shares.tolist(), strict=True)
        ]
    each = np.concatenate(points)
    kept: set[int] = set()
    for server in range(len(facts.servers)):
        kept |= set(_hull(each[:, server], each[:, -1]))
    found: list[Choice] = []
    for i in sorted(kept, key=lambda i: (each[i, 0], i)):
        if i >= len(tuples):
            first, second, threshold, share = named[i - len(tuples)]
            found.append(Choice(first, float(each[i, -1]), second, threshold, share))
    return found


def _segment_costs(facts: RouterFacts, widths: WidthTuple) -> Floats:
    """Device time of an item by server and segment, (servers, segments)."""
    before: tuple[Width | None, ...] = (None, *widths)
    return np.array(
        [
            [seconds_per_item(server, segment, before[segment], width) for segment, width in enumerate(widths)]
            for server in facts.servers.values()
        ]
    )


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
    order = np.lexsort((-y, x))
    best = np.maximum.accumulate(y[order])
    kept: list[int] = []
    for i in order[np.concatenate([[True], best[1:] > best[:-1]])].tolist():
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) <= (y[i] - y[a]) * (x[b] - x[a]):
                kept.pop()
            else:
                break
        kept.append(i)
    return kept
