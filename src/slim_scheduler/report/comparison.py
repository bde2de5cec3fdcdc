"""Routers on the same workloads: estimates per router and paired differences against the first one.

Owns `compare.json` and what the comparison's tables say; which runs were made, and in what order, is the command's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from slim_scheduler.core.errors import RecordError
from slim_scheduler.report.measures import (
    NOTHING,
    Estimate,
    Measure,
    aggregate,
    estimate,
    flatten,
    is_sure,
    keys_of,
    value_of,
)


class Comparison:
    """Summaries by router, in the order of the routers; `differences` pairs runs of the same seed."""

    def __init__(self, summaries: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        if not summaries:
            raise RecordError("no router to compare; give at least one with --routers")
        self.summaries = {router: list(runs) for router, runs in summaries.items()}
        self.first = next(iter(self.summaries))
        self.estimates: dict[str, dict[str, Estimate]] = {
            router: aggregate(runs) for router, runs in self.summaries.items()
        }
        self.differences: dict[str, dict[str, Estimate]] = {
            router: self.paired(router, self.first) for router in list(self.summaries)[1:]
        }

    def is_clearly_best(self, router: str, measure: Measure) -> bool:
        """Whether a router is better than every other one by more than the 95 % interval of their paired difference."""
        if measure.better is None or len(self.summaries) < 2:
            return False
        sign = 1.0 if measure.better == "high" else -1.0
        differences = [
            self.paired(router, other).get(measure.key, NOTHING) for other in self.summaries if other != router
        ]
        return all(is_sure(d) and sign * (d.mean or 0.0) > 0 for d in differences)

    def paired(self, router: str, other: str) -> dict[str, Estimate]:
        """Differences of a router to another, by the seeds that both ran."""
        base = {run["seed"]: flatten(run) for run in self.summaries[other]}
        pairs = [(flatten(run), base[run["seed"]]) for run in self.summaries[router] if run["seed"] in base]
        keys = keys_of(flat for pair in pairs for flat in pair)
        return {key: estimate([_minus(value_of(key, a), value_of(key, b)) for a, b in pairs]) for key in keys}

    def to_json(self) -> list[dict[str, Any]]:
        """`compare.json`: per router the metrics, and from the second on their paired difference to the first."""
        return [
            {
                "router": router,
                "metrics": {key: _plain(value) for key, value in estimates.items()},
                "against": None if router == self.first else self.first,
                "differences": {key: _plain(value) for key, value in self.differences.get(router, {}).items()},
            }
            for router, estimates in self.estimates.items()
        ]


def _minus(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine - theirs


def _plain(value: Estimate) -> dict[str, Any]:
    return {"mean": value.mean, "ci95": value.ci95, "runs": list(value.runs)}
