"""The bound that `slim frontier` prints and comparisons are measured against: the linear program, for many loads.

It puts a configuration's cluster and a measured accuracy table into the linear program and reads off points: the
highest mean accuracy at a load with the least energy there, the energy at lower accuracies, and how far a run is from
them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.plan.choices import pair_of, pairs
from slim_scheduler.core.router.plan.program import SLACK, Plan, PlanProgram
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Joules, ServerName
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import load_profiles, load_shape, router_facts

LOAD_STEPS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)  # of the highest load, where nobody names others


class FrontierPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What any router can hold at a load. Accuracy, energy and plan are None where the load cannot be carried.

    `again` is the most accurate plan where items may run again at a second width tuple, `again_same` the one of the
    least energy that is as accurate as `plan`; None where margins were not measured. `known` is what can be known of
    `plan` beforehand: the accuracy here of the plan that is best by another table, and `known_again` the same of
    `again`; None without another table.
    """

    load_items_s: float
    max_load_items_s: float
    plan: Plan | None
    again: Plan | None = None
    again_same: Plan | None = None
    known: float | None = None
    known_again: float | None = None

    @property
    def accuracy(self) -> float | None:
        return None if self.plan is None else self.plan.accuracy

    @property
    def energy_per_item_j(self) -> Joules | None:
        return None if self.plan is None else self.plan.energy_per_item

    def to_json(self) -> dict[str, Any]:
        """The point; its plan as shares of the items by segment, then by "server@width"."""
        shares = None
        if self.plan is not None:
            shares = [
                {f"{server}@{width:g}": round(share, 6) for (server, width), share in sorted(by.items())}
                for _, by in sorted(self.plan.shares().items())
            ]
        return {
            "load_items_s": self.load_items_s,
            "accuracy": self.accuracy,
            "known_accuracy": self.known,
            "energy_per_item_j": self.energy_per_item_j,
            "max_load_items_s": self.max_load_items_s,
            "second_pass": None
            if self.again is None or self.again_same is None
            else {
                "accuracy": self.again.accuracy,
                "known_accuracy": self.known_again,
                "energy_per_item_j": self.again.energy_per_item,
                "energy_per_item_at_same_accuracy_j": self.again_same.energy_per_item,
                "choices": {
                    choice.name: round(rate / self.again.load, 6) for choice, rate in self.again.choices.items()
                },
            },
            "shares": shares,
        }


def program(
    config: Config, shape: ModelShape, profiles: dict[ServerName, Profile], accuracy: AccuracyTable, rho: float = 1.0
) -> PlanProgram:
    """The linear program of a configured cluster. Raises InputError."""
    return PlanProgram(router_facts(config, shape, profiles), accuracy, rho)


def frontier(
    config: Config,
    shape: ModelShape,
    profiles: dict[ServerName, Profile],
    accuracy: AccuracyTable,
    loads: Sequence[float] = (),
    *,
    rho: float = 1.0,
    levels: int = 1,
    planned_on: AccuracyTable | None = None,
) -> list[FrontierPoint]:
    """Points at `loads` (items per second; none: shares of the highest), ascending in accuracy within a load.

    Every device and link is at most `rho` busy. `levels` above 1 adds the least energy at that many accuracies, evenly
    from what the least energy of all buys up to the best. `planned_on` is the other table, by which routers plan: what
    can be known of the best is its best plan, judged by `accuracy`. Raises ConfigError for a load that is not above 0.
    """
    asked = program(config, shape, profiles, accuracy, rho)
    most = asked.max_load()
    facts = router_facts(config, shape, profiles)
    twice = _twice(facts, accuracy, rho)
    known = None if planned_on is None else PlanProgram(facts, planned_on, rho)
    known_twice = None if planned_on is None or twice is None else _twice(facts, planned_on, rho)
    points = []
    for load in loads or [share * most for share in LOAD_STEPS]:
        if not load > 0:
            raise ConfigError(f"load {load:g} must be above 0 items per second; this cluster carries up to {most:.0f}")
        plans = list(_plans(asked, load, levels))
        found = [_point(load, most, plan, twice) for plan in plans] or [_point(load, most, None, None)]
        found[-1] = msgspec.structs.replace(
            found[-1], known=_judged(known, load, accuracy), known_again=_judged(known_twice, load, accuracy)
        )
        points += found
    return points


def _twice(facts: RouterFacts, table: AccuracyTable, rho: float) -> PlanProgram | None:
    """The program with second passes, where margins were measured."""
    return PlanProgram(facts, table, rho, pairs(facts, table)) if table.has_margins else None


def _judged(asked: PlanProgram | None, load: float, accuracy: AccuracyTable) -> float | None:
    """The accuracy, by another table, of the most accurate plan."""
    plan = None if asked is None else asked.most_accurate(load)
    if plan is None:
        return None
    of = {
        choice: accuracy.top1(choice.first)
        if choice.second is None
        else pair_of(accuracy, choice.first, choice.second, choice.threshold).accuracy
        for choice in plan.choices
    }
    return sum(rate * of[choice] for choice, rate in plan.choices.items()) / plan.load


def _plans(asked: PlanProgram, load: float, levels: int) -> Iterable[Plan]:
    best = asked.most_accurate(load)
    if best is None:
        return
    cheapest = asked.least_power(load, 0.0) if levels > 1 else None
    if cheapest is not None and best.accuracy - cheapest.accuracy > 1e-6:
        yield cheapest
        for step in range(1, levels - 1):
            at = cheapest.accuracy + (best.accuracy - cheapest.accuracy) * step / (levels - 1)
            plan = asked.least_power(load, at)
            if plan is not None:
                yield plan
    yield best


def _point(load: float, most: float, plan: Plan | None, twice: PlanProgram | None) -> FrontierPoint:
    point = FrontierPoint(load_items_s=load, max_load_items_s=most, plan=plan)
    if plan is None or twice is None:
        return point
    same = twice.least_power(load, plan.accuracy * (1 - SLACK))
    return msgspec.structs.replace(point, again=twice.most_accurate(load), again_same=same)


def hulls(config: Config, load: float, levels: int = 9) -> dict[str, list[tuple[Joules, float]]]:
    """What accuracy costs at a load, at the bound: (joules per item, accuracy) of one pass, and of one or two where
    margins were measured; ascending, empty where the load cannot be carried. Raises InputError without profiles or
    accuracy table."""
    from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy

    shape = load_shape(config)
    accuracy = read_accuracy(accuracy_path(config))
    facts = router_facts(config, shape, load_profiles(config, shape))
    programs = {"one pass": PlanProgram(facts, accuracy, 1.0), "one or two passes": _twice(facts, accuracy, 1.0)}
    return {
        name: [(plan.energy_per_item, plan.accuracy) for plan in _plans(asked, load, levels)]
        for name, asked in programs.items()
        if asked is not None
    }


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is from the bound at the load it carried. None where the bound says nothing, because nothing was
    answered, or the load is `beyond` it.

    `accuracy`: points below the best that could have been held; `energy`: its energy per item over the least at the
    accuracy it had, minus 1.
    """

    load_items_s: float
    accuracy: float | None
    energy: float | None
    beyond: bool = False


def distance(asked: PlanProgram, summary: dict[str, Any]) -> Distance:
    """A run's distance from the bound, by its summary: at its throughput, not its arrivals."""
    load = summary["throughput_items_s"] or 0.0
    best = asked.most_accurate(load) if load > 0 else None
    had, used = summary["accuracy"], summary["energy_per_item_j"]
    if best is None or had is None:
        return Distance(load_items_s=load, accuracy=None, energy=None, beyond=load > 0 and best is None)
    cheapest = asked.least_power(load, min(had, best.accuracy)) if used is not None else None
    return Distance(
        load_items_s=load,
        accuracy=best.accuracy - had,
        energy=None if cheapest is None else used / cheapest.energy_per_item - 1,
    )


def distances(config: Config, summaries: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Distance]:
    """Every router's distance, by the means of its runs: of one that runs items again, from the bound that may do so.

    Raises InputError without profiles or accuracy table.
    """
    from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy

    shape = load_shape(config)
    accuracy = read_accuracy(accuracy_path(config))
    facts = router_facts(config, shape, load_profiles(config, shape))
    again = {router for router, runs in summaries.items() if any(run.get("second_pass_share") for run in runs)}
    once, twice = PlanProgram(facts, accuracy, 1.0), _twice(facts, accuracy, 1.0) if again else None
    keys = ("throughput_items_s", "accuracy", "energy_per_item_j")
    return {
        router: distance(
            twice if twice is not None and router in again else once,
            {key: _mean([run[key] for run in runs]) for key in keys},
        )
        for router, runs in summaries.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
