"""The router `lp`: follows the linear program's plan for the load it measures, looked at again every second.

As Proteus does, it takes the most accurate plan that carries the load, gives each server and width its share of every
kind of head, and sends the next block where the share is most behind. Plans are kept by load, in steps, and by the
servers in service. A learned router may see the same ledger (`planned.py`).
"""

import math
from collections.abc import Mapping

from numpy.random import Generator

from slim_scheduler.core.admission import AccuracyPrior
from slim_scheduler.core.plan import Plan, PlanProgram
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.baselines import ServerCost, allowed
from slim_scheduler.core.telemetry import Head, View
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width

PLAN_EVERY: Seconds = 1.0
LOAD_STEPS = 50  # plans between no load and the highest
MEMORY = 0.5  # weight of the seconds before in the measured load
CATCH_UP: Seconds = 2.0  # in which what waits should be worked off beside the new arrivals
RHO = 0.9  # how busy the plan lets a device be: a plan knows nothing of queueing

Target = tuple[ServerName, Width]
PlanKey = tuple[tuple[ServerName, ...], int]  # servers in service, load step
Kind = tuple[int, Width | None, ServerName | None]  # segment, previous width, home (where moving costs)


class PlanLedger:
    """The plan for the measured load, and what was sent since it is followed. It is of one run.

    `rho`: how busy the plans let each device and link be.
    """

    def __init__(self, facts: RouterFacts, accuracy: AccuracyPrior, rho: float = RHO) -> None:
        self._facts = facts
        self._accuracy = accuracy
        self._rho = rho
        self._programs: dict[tuple[ServerName, ...], tuple[PlanProgram, float]] = {}
        self._plans: dict[PlanKey, Shares] = {}
        self._load: float | None = None
        self._looked_at: Seconds = 0.0
        self._seen = 0  # items that had arrived then
        self._current: PlanKey | None = None
        self._sent: dict[Kind, dict[Target, int]] = {}
        for step in range(1, LOAD_STEPS + 1):  # now, not while a request waits
            self._shares((tuple(facts.servers), step))

    @property
    def load(self) -> float:
        """The load that is planned for, as a share of the highest."""
        return self._current[1] / LOAD_STEPS if self._current is not None else 1.0

    def shares(self, view: View) -> Mapping[Target, float]:
        """The plan's shares of the head's kind, which sum to 1."""
        return self._shares(self._plan_for(view)).of(self._kind(view.head))

    def behind(self, view: View, shares: Mapping[Target, float]) -> dict[Target, float]:
        """By how many tasks each target is behind its share of what was sent of this kind and of what waits."""
        sent = self._sent.get(self._kind(view.head), {})
        total = sum(sent.values()) + view.head.waiting
        return {target: share * total - sent.get(target, 0) for target, share in shares.items()}

    def next(self, view: View, shares: Mapping[Target, float]) -> Target | None:
        """Of the targets with credit, the one that is most behind; None where all that the plan names are full."""
        open_targets = {t: share for t, share in shares.items() if view.servers[t[0]].available}
        behind = self.behind(view, open_targets)
        return max(behind, key=lambda target: (behind[target], target), default=None)

    def sent(self, head: Head, target: Target, count: int) -> None:
        """So many tasks of the head's kind were sent."""
        sent = self._sent.setdefault(self._kind(head), {})
        sent[target] = sent.get(target, 0) + count

    def _kind(self, head: Head) -> Kind:
        return head.segment, head.previous_width, head.home if self._facts.move_activations else None

    # ---- the load

    def _plan_for(self, view: View) -> PlanKey:
        """The plan that is followed: another one when a second has passed or a server came or went."""
        up = tuple(name for name, server in view.servers.items() if server.up)
        measured = self._measure(view)
        if measured or self._current is None or self._current[0] != up:
            key = (up, self._step(view, up))
            if key != self._current:
                self._current = key
                self._sent.clear()
        assert self._current is not None
        return self._current

    def _measure(self, view: View) -> bool:
        """Items per second since the last look, every second; whether it was time."""
        arrived = view.completed + view.fifo_length + sum(s.outstanding for s in view.servers.values())
        since = view.now - self._looked_at
        if since < PLAN_EVERY:
            return False
        rate = max(0, arrived - self._seen) / since
        self._load = rate if self._load is None else MEMORY * self._load + (1 - MEMORY) * rate
        self._looked_at, self._seen = view.now, arrived
        return True

    def _step(self, view: View, up: tuple[ServerName, ...]) -> int:
        """The load as a step, rounded up. Before anything was measured: the highest."""
        if self._load is None:
            return LOAD_STEPS
        segments = self._facts.shape.segments
        left = sum(count * (segments - segment) / segments for segment, count in enumerate(view.fifo_per_segment))
        _, most = self._program(up)
        return max(1, min(LOAD_STEPS, math.ceil(LOAD_STEPS * (self._load + left / CATCH_UP) / most)))

    # ---- plans

    def _program(self, up: tuple[ServerName, ...]) -> tuple[PlanProgram, float]:
        if up not in self._programs:
            servers = {name: self._facts.servers[name] for name in up}
            facts = RouterFacts(
                self._facts.shape, self._facts.groups, servers, self._facts.move_activations, self._facts.shared_link
            )
            program = PlanProgram(facts, self._accuracy, self._rho)
            self._programs[up] = (program, program.max_load())
        return self._programs[up]

    def _shares(self, key: PlanKey) -> "Shares":
        if key not in self._plans:
            program, most = self._program(key[0])
            plan = program.most_even(most * key[1] / LOAD_STEPS * (1 - 1e-6))
            assert plan is not None, "a load below the highest can be carried"
            self._plans[key] = Shares(plan)
        return self._plans[key]


class PlanFollower:
    """Sends where the plan is most behind."""

    holds = False

    def __init__(self, facts: RouterFacts, accuracy: AccuracyPrior, rho: float = RHO, name: str = "lp") -> None:
        self.name = name
        self._facts = facts
        self._ledger = PlanLedger(facts, accuracy, rho)
        self._costs = {n: ServerCost(server, facts) for n, server in facts.servers.items()}

    def decide(self, view: View, rng: Generator) -> Decision:
        head, shares = view.head, self._ledger.shares(view)
        server, width = self._ledger.next(view, shares) or self._soonest(shares, head, view)
        count = min(head.waiting, self._facts.servers[server].max_batch, view.servers[server].credit)
        self._ledger.sent(head, (server, width), count)
        return Decision(server, allowed(width, head.widths), count)

    def _soonest(self, shares: Mapping[Target, float], head: Head, view: View) -> Target:
        """Where the plan's narrowest width is soonest done."""
        width = allowed(min((w for _, w in shares), default=head.widths[0]), head.widths)
        available = [s for s in view.servers.values() if s.available]
        return min((self._costs[s.name].completion(s, head, width), s.name, width) for s in available)[1:]


class Shares:
    """A plan as shares of each kind of head by (server, width); every kind sums to 1."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._of: dict[Kind, dict[Target, float]] = {}

    def of(self, kind: Kind) -> dict[Target, float]:
        """Kinds that the plan does not have (a wider instance ran) get the shares of their segment."""
        if kind not in self._of:
            segment, previous, home = kind
            rates = self._rates(segment, previous)
            if home is not None and previous is not None:
                rates = self._near(rates, segment, previous, home)
            total = sum(rates.values())
            self._of[kind] = {target: rate / total for target, rate in rates.items()}
        return self._of[kind]

    def _rates(self, segment: int, previous: Width | None) -> dict[Target, float]:
        steps = [(server, step, rate) for (server, step), rate in self._plan.steps.items() if step[0] == segment]
        exact = [entry for entry in steps if entry[1][1] == previous]
        rates: dict[Target, float] = {}
        for server, (_, _, width), rate in exact or steps:
            rates[server, width] = rates.get((server, width), 0.0) + rate
        return rates

    def _near(self, rates: dict[Target, float], segment: int, previous: Width, home: ServerName) -> dict[Target, float]:
        """Shares of what lies at `home`: the plan's part of it stays, the rest goes where the plan wants it moved."""
        plan = self._plan
        here = sum(r for (s, (k, _, w)), r in plan.steps.items() if s == home and (k, w) == (segment - 1, previous))
        stays = {s: r for (k, w, s), r in plan.stays.items() if (k, w) == (segment - 1, previous)}
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
