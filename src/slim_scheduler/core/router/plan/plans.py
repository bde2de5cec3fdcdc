"""Plans of one cluster by load, in steps, and by the servers in service: made once and kept for every run on it."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from slim_scheduler.core.accuracy import AccuracyPrior
from slim_scheduler.core.errors import InputError
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import seconds_per_item
from slim_scheduler.core.router.escalation import Choice
from slim_scheduler.core.router.plan.program import Plan, PlanProgram, Prices, mixed
from slim_scheduler.core.router.plan.waiting import Waiting, queues, slopes
from slim_scheduler.core.types import Seconds, ServerName, Width, WidthTuple

LOAD_STEPS = 50  # plans between no load and the highest, where nobody asks for others
RHO = 0.89  # how busy a plan lets a device be: it knows nothing of queueing
MOST_RHO = 2.0  # twice what can be done: nobody wants queues that grow faster
USUAL_PASSES = 3.0  # an item's time in the system, in passes through the network in full batches, beside its messages
LP_STEPS = 100  # of `lp` and `lp:RHO`
LP_PASSES = 0.5  # `lp`: instead of USUAL_PASSES. Its plans leave nothing over, so widths answer to any queue
LP_RHO_PASSES = 1.0  # `lp:RHO`: the same, where plans leave time over, in which a short queue is worked off
TWICE_PASSES = 2.0  # the same on plans of two passes, whose batches fill more slowly
LP_LINKS = 0.89  # `lp`: how busy its plans let links be: a narrower width does not work off what waits for one

Target = tuple[ServerName, Width]
Fleet = tuple[tuple[ServerName, float], ...]  # servers in service, and how many times slower than its profile each is
PlanKey = tuple[Fleet, int]  # and the load step
MOST_FLEETS = 32  # whose plans are kept, beside the whole one
PART_STEPS = 10  # of any other fleet, whose plans are made while a request waits; those between are mixed of two


class HeadKind(msgspec.Struct, frozen=True, gc=False):
    """What heads have in common that a plan tells apart. `home`: where moving costs; `again`: on the second pass."""

    segment: int
    previous_width: Width | None
    home: ServerName | None
    again: bool = False


def check_rho(rho: float) -> None:
    """Raises InputError for what is not in (0, 2]."""
    if not 0 < rho <= MOST_RHO:
        raise InputError(f"rho is {rho:g}; it must be above 0 and at most {MOST_RHO:g}")


class Plans:
    """`rho`: how busy the plans let each device and link be. Above 1 they send that many times what can be done, and
    the queue grows for as long as the load lasts. `steps`: plans between no load and the highest. `links`: how busy
    each link may be, where that is not the same. `usual_passes`: how long the queue usually is; for what is beyond it,
    whoever follows these plans takes one of a higher load. `waiting`: so long a queue may stand instead, and what a
    longer one costs. Raises InputError for a `rho` that is not in (0, 2], or is above 1 where a queue may stand."""

    def __init__(
        self,
        facts: RouterFacts,
        accuracy: AccuracyPrior,
        rho: float = RHO,
        pairs: Sequence[Choice] = (),
        steps: int = LOAD_STEPS,
        links: float | None = None,
        usual_passes: float = USUAL_PASSES,
        waiting: Waiting | None = None,
    ) -> None:
        check_rho(rho)
        if rho > 1 and waiting is not None:
            raise InputError(
                f"rho is {rho:g} and a queue of {waiting.queue:g} s may stand; above 1 it grows: choose one of the two"
            )
        self.facts = facts
        self.steps = steps
        self.overload = max(1.0, rho)
        self.overloaded = rho > 1
        self._accuracy = accuracy
        self.pairs = pairs
        self._rho = min(1.0, rho)
        self._links = links
        self._usual_passes = usual_passes
        self.waiting = waiting
        self._fleets: dict[Fleet, tuple[RouterFacts, PlanProgram, float]] = {}
        self.whole: Fleet = tuple((name, 1.0) for name in facts.servers)
        self._shares: dict[PlanKey, Shares] = {}
        self._prices: dict[PlanKey, Prices] = {}
        self._worth: dict[PlanKey, dict[WidthTuple, float]] = {}
        self._passes: dict[PlanKey, tuple[Seconds, Seconds]] = {}
        self._slopes: list[float] = []
        self._queues: dict[int, list[float]] = {}
        for step in range(1, steps + 1):  # now, not while a request waits
            self.shares((self.whole, step))

    def most(self, fleet: Fleet) -> float:
        """The highest load that is planned for, items per second: what these servers carry, times `overload`."""
        return self._fleet(fleet)[2] * self.overload

    def step(self, fleet: Fleet, steps: float, asked: dict[Fleet, set[int]]) -> int:
        """The step at which so many steps are planned for: the next one up. Where one run alone asks, at most one plan
        has to be made for it, so of a new fleet it is at first the next one up that is not mixed.

        `asked`: the steps of other fleets that one run asked for, as far as their plans are kept; those of this step
        are added. A run is the same whatever others on the same plans asked for.
        """
        step = max(1, min(self.steps, math.ceil(steps)))
        if fleet == self.whole:
            return step
        below, above = self._mixed_of(fleet, step)
        if fleet not in asked:
            if len(asked) == MOST_FLEETS:
                del asked[next(iter(asked))]  # as `_fleet` forgets them
            asked[fleet] = set()
        if above not in asked[fleet]:
            asked[fleet].add(above)
            return above
        if below:
            asked[fleet].add(below)
            self.shares((fleet, below))
        return step

    def _mixed_of(self, fleet: Fleet, step: int) -> tuple[int, int]:
        """The steps whose plans are mixed for this one's; its own where that is the program's."""
        every = 1 if fleet == self.whole else max(1, self.steps // PART_STEPS)
        return step // every * every, min(self.steps, -(-step // every) * every)

    def load(self, key: PlanKey) -> float:
        """The load of a step, items per second."""
        return self.most(key[0]) * key[1] / self.steps * (1 - 1e-6)

    def shares(self, key: PlanKey) -> "Shares":
        if key not in self._shares:
            fleet, step = key
            below, above = self._mixed_of(fleet, step)
            if below == step or above == step:
                plan = self._fleet(fleet)[1].most_even(self.load(key) / self.overload)
                assert plan is not None, "a load below the highest can be carried"
            elif not below:
                plan = self.shares((fleet, above)).plan
            else:
                low, high = (self.shares((fleet, end)).plan for end in (below, above))
                plan = mixed(low, high, self.load(key) / self.overload)
            self._shares[key] = Shares(plan)
        return self._shares[key]

    def usual_time(self, key: PlanKey, carried: float = 1.0) -> Seconds:
        """An item's usual time in the system by a plan: passes through the network in full batches, and messages.
        `carried`: what the servers carry, as a share of what the plan's fleet does."""
        if key not in self._passes:
            servers, plan = self._fleet(key[0])[0].servers, self.shares(key).plan
            time = messages = 0.0
            for (name, step), rate in plan.steps.items():
                server = servers[name]
                run = server.latency.seconds(step.segment, step.previous_width, step.width, server.max_batch)
                batch = server.slowdown * run
                time += rate / plan.load * batch
                messages += rate / plan.load * 2 * server.link_latency
            self._passes[key] = (time, messages)
        time, messages = self._passes[key]
        usual = self._usual_passes * time / carried + messages
        return max(self.waiting.queue, usual) if self.waiting is not None else usual

    def worked_off(self, fleet: Fleet, expected: float, queue: float) -> int:
        """The step at which so many items beyond the usual are best worked off, by what waiting costs, where
        `expected`, in steps, is to come. A fleet is taken for a smaller whole one: no plan has to be made for this."""
        at = max(1, min(self.steps, math.ceil(expected)))
        if at not in self._queues:
            self._queues[at] = self._worth_a_step(at)
        return bisect_right(self._queues[at], queue * self.most(self.whole) / self.most(fleet))

    def _worth_a_step(self, expected: int) -> list[float]:
        """For each step the queue from which on it is the best."""
        assert self.waiting is not None
        keys = [(self.whole, step) for step in range(1, self.steps + 1)]
        rates = [self.load(key) / self.overload for key in keys]
        if not self._slopes:
            self._slopes = slopes(rates, [self.shares(key).plan.accuracy for key in keys])
        power = self.shares((self.whole, expected)).plan.power / len(self.whole)
        return queues(rates, self._slopes, expected - 1, self.waiting.cost(self.facts.shape.segments, power))

    def prices(self, key: PlanKey) -> Prices:
        """At the load of the step, or of the next one up that is not mixed."""
        key = (key[0], self._mixed_of(*key)[1])
        if key not in self._prices:
            prices = self._fleet(key[0])[1].prices(self.load(key) / self.overload)
            assert prices is not None, "a load below the highest can be carried"
            self._prices[key] = prices
        return self._prices[key]

    def worth(self, key: PlanKey) -> Mapping[WidthTuple, float]:
        """Of widths that an item ran so far: the accuracy that it can still come to, less what the rest of the way
        costs at the plan's prices of device time, both by the best completion. What moving activations costs is left
        out. Where links have no price each width that the plan gives to an item adds as much as it costs, by the
        program's duality.
        """
        if key not in self._worth:
            facts, device = self._fleet(key[0])[0], self.prices(key).device
            shape, worth = facts.shape, {}
            for widths in itertools.product(shape.widths, repeat=shape.segments):
                worth[widths] = self._accuracy.top1(widths)
            for segment in reversed(range(shape.segments)):
                costs = {
                    previous: [
                        min(
                            device[name] * seconds_per_item(server, segment, previous, width)
                            for name, server in facts.servers.items()
                        )
                        for width in shape.widths
                    ]
                    for previous in (shape.widths if segment else (None,))
                }
                for ran in itertools.product(shape.widths, repeat=segment):
                    cost = costs[ran[-1] if ran else None]
                    worth[ran] = max(worth[*ran, width] - cost[i] for i, width in enumerate(shape.widths))
            self._worth[key] = worth
        return self._worth[key]

    def _fleet(self, fleet: Fleet) -> tuple[RouterFacts, PlanProgram, float]:
        """Its facts, its program and the most that it carries."""
        if fleet not in self._fleets:
            if len(self._fleets) > MOST_FLEETS:
                self._forget(next(known for known in self._fleets if known != self.whole))
            servers = {name: _slowed(self.facts.servers[name], factor) for name, factor in fleet}
            facts = RouterFacts(
                self.facts.shape, self.facts.groups, servers, self.facts.move_activations, self.facts.shared_link
            )
            program = PlanProgram(facts, self._accuracy, self._rho, self.pairs, links=self._links)
            self._fleets[fleet] = (facts, program, program.max_load())
        return self._fleets[fleet]

    def _forget(self, fleet: Fleet) -> None:
        del self._fleets[fleet]
        for kept in (self._shares, self._prices, self._worth, self._passes):
            for key in [key for key in kept if key[0] == fleet]:
                del kept[key]


def lp_plans(
    facts: RouterFacts,
    accuracy: AccuracyPrior,
    rho: float | None = None,
    pairs: Sequence[Choice] = (),
    waiting: Waiting | None = None,
) -> Plans:
    """The plans that `lp` follows, with a `rho` `lp:RHO`, and where a queue may stand `lp@SECONDS`."""
    passes = TWICE_PASSES if pairs else LP_PASSES if rho is None else LP_RHO_PASSES
    if rho is None:
        return Plans(facts, accuracy, 1.0, pairs, LP_STEPS, LP_LINKS, passes, waiting)
    return Plans(facts, accuracy, rho, pairs, LP_STEPS, usual_passes=passes, waiting=waiting)


def _slowed(server: ServerFacts, factor: float) -> ServerFacts:
    return server if factor == 1.0 else msgspec.structs.replace(server, slowdown=factor * server.slowdown)


class Shares:
    """A plan as shares of each kind of head by (server, width); every kind sums to 1."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._of: dict[HeadKind, dict[Target, float]] = {}
        self._choices: dict[WidthTuple, list[Choice]] = {}
        self._resumed = {choice.first[: choice.shared] for choice in plan.choices if choice.shared}

    def of(self, kind: HeadKind) -> dict[Target, float]:
        """Kinds that the plan does not have (a wider instance ran) get the shares of their segment."""
        found = self._of.get(kind)
        if found is None:
            rates = self._rates(kind.segment, kind.previous_width, kind.again)
            if kind.home is not None and kind.previous_width is not None:
                rates = self._near(rates, kind.segment, kind.previous_width, kind.home, kind.again)
            total = sum(rates.values())
            found = self._of[kind] = {target: rate / total for target, rate in rates.items()}
        return found

    def choices(self, ran: WidthTuple) -> list[Choice]:
        """What the plan does with items whose first pass was `ran`, or the tuple of the plan that is nearest to it."""
        if ran not in self._choices:
            firsts = {choice.first for choice in self.plan.choices}
            nearest = min(firsts, key=lambda t: (sum(abs(a - b) for a, b in zip(t, ran, strict=True)), t))
            self._choices[ran] = sorted(choice for choice in self.plan.choices if choice.first == nearest)
        return self._choices[ran]

    def rate(self, choice: Choice) -> float:
        return self.plan.choices[choice]

    def may_resume(self, ran: WidthTuple) -> bool:
        """Whether second passes of the plan go on from the activation of who ran so."""
        return ran in self._resumed

    def _rates(self, segment: int, previous: Width | None, again: bool) -> dict[Target, float]:
        steps = [(server, step, rate) for (server, step), rate in self.plan.steps.items() if step.segment == segment]
        passes = [entry for entry in steps if entry[1].again == again] or steps
        exact = [entry for entry in passes if entry[1].previous_width == previous]
        rates: dict[Target, float] = {}
        for server, step, rate in exact or passes:
            rates[server, step.width] = rates.get((server, step.width), 0.0) + rate
        return rates

    def _near(
        self, rates: dict[Target, float], segment: int, previous: Width, home: ServerName, again: bool
    ) -> dict[Target, float]:
        """Shares of what lies at `home`: the plan's part of it stays, the rest goes where the plan wants it moved."""
        plan = self.plan
        here = plan.outputs.get((segment - 1, previous, home, again), 0.0)
        stays = {s: r for (k, w, s, a), r in plan.stays.items() if (k, w, a) == (segment - 1, previous, again)}
        into: dict[ServerName, float] = {}
        for (server, _), rate in rates.items():
            into[server] = into.get(server, 0.0) + rate
        staying = min(1.0, stays.get(home, 0.0) / here) if here > 0 else (1.0 if home in into else 0.0)
        moving = {s: max(0.0, rate - stays.get(s, 0.0)) for s, rate in into.items() if s != home}
        if not sum(moving.values()) or home not in into:
            staying = 1.0 if home in into else 0.0
        moved = sum(moving.values()) or 1.0
        goes = {s: (staying if s == home else (1 - staying) * moving[s] / moved) for s in into}
        if not sum(goes.values()):
            goes = into
        return {(s, w): goes[s] * rate / into[s] for (s, w), rate in rates.items() if goes[s] > 0}
