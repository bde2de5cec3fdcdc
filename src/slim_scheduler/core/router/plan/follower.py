"""The router `lp`: follows the linear program's plan for the load it measures, looked at again ten times a second.

As Proteus does, it takes the most accurate plan that carries the load, gives each server and width its share of every
kind of head, and sends the next block where the share is most behind. Plans are kept by load, in steps, and by the
servers in service. A learned router may see the same ledger (`planned.py`).
"""

import math
from collections.abc import Mapping, Sequence

from numpy.random import Generator

from slim_scheduler.core.errors import RouterError
from slim_scheduler.core.router.costs import choices_of, items_per_second, least_outstanding, server_costs
from slim_scheduler.core.router.escalation import Choice, is_wider
from slim_scheduler.core.router.heuristics import allowed
from slim_scheduler.core.router.plan.load import LOOK_EVERY, PatientLoad, PromptLoad
from slim_scheduler.core.router.plan.plans import Fleet, HeadKind, PlanKey, Plans, Shares, Target
from slim_scheduler.core.router.plan.program import Prices
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width, WidthTuple
from slim_scheduler.core.view import Head, ServerView, View

CATCH_UP: Seconds = 0.15  # in which what is too much should be worked off beside the new arrivals
SLOWER = 2.0  # steps in which servers differ in pace, for plans: those of a new fleet are made when needed
STAYS = 0.75  # of such a step that a server may be away from what is planned for
STEPS_ABOVE = 1  # so far below its own step the load may be before a plan goes: each change costs half-full batches


class PlanLedger:
    """The plan for the measured load, and what was sent since it is followed. It is of one run; the plans are not."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._facts = plans.facts
        narrowest = self._facts.shape.widths[0]
        self._carries = {
            name: items_per_second(server, self._facts.shape, narrowest) for name, server in self._facts.servers.items()
        }
        patient = plans.waiting is not None
        self._load = PatientLoad(plans.most(plans.whole)) if patient else PromptLoad(falls=not plans.overloaded)
        self._looked_at: Seconds = 0.0
        self._current: PlanKey | None = None
        self._asked: dict[Fleet, set[int]] = {}  # steps of other fleets than the whole one
        self._paces: dict[ServerName, float] = {}  # of the servers in service
        self._fleet: Fleet = ()  # these, as plans know them
        self._carried = 1.0  # what they carry, as a share of what that fleet does
        self._shares: Shares  # of the current plan
        self._sent: dict[HeadKind, dict[Target, int]] = {}
        self._given: dict[WidthTuple, dict[Choice, int]] = {}  # finished first passes, by what they ran and got

    @property
    def load(self) -> float:
        """The load that is planned for, as a share of the highest."""
        return self._current[1] / self._plans.steps if self._current is not None else 1.0

    def shares(self, view: View) -> Mapping[Target, float]:
        """The plan's shares of the head's kind, which sum to 1; on a second pass, whose widths are fixed, of those
        targets that have the width, where the plan has any."""
        self._plan_for(view)
        shares = self._shares.of(self._kind(view.head))
        if not view.head.again:
            return shares
        fits = {target: share for target, share in shares.items() if target[1] in view.head.widths}
        total = sum(fits.values())
        return {target: share / total for target, share in fits.items()} if fits else shares

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The second tuple of the choice that is most behind among those that begin with `ran`, where the margin is
        below its threshold and not as much has run already."""
        if self._current is None:
            return None
        shares = self._shares
        choices = shares.choices(ran)
        given = self._given.setdefault(ran, dict.fromkeys(choices, 0))
        rates = {choice: shares.rate(choice) for choice in choices}
        done, total = sum(given.values()) + 1, sum(rates.values())
        choice = max(choices, key=lambda c: rates[c] / total * done - given[c])
        given[choice] += 1
        second = choice.second if margin < choice.threshold else None
        return second if second is not None and is_wider(second, ran) else None

    def may_resume(self, ran: WidthTuple) -> bool:
        """Whether the plan has a pair whose tuples both begin so."""
        return self._current is not None and self._shares.may_resume(ran)

    def prices(self, view: View) -> Prices:
        """What device time and links are worth at the load that is planned for."""
        return self._plans.prices(self._plan_for(view))

    def worth(self, view: View) -> Mapping[WidthTuple, float]:
        """What the widths that an item ran so far are worth then (`Plans.worth`)."""
        return self._plans.worth(self._plan_for(view))

    def rate(self, view: View) -> float:
        """The load that is planned for, or what of the expected one can be carried where that is more: items/s."""
        key = self._plan_for(view)
        planned, most = self._plans.load(key), self._plans.load((key[0], self._plans.steps))
        expected = (self._load.expected or 0.0) / self._carried
        return self._carried * max(planned, min(expected, most))

    def behind(self, view: View, shares: Mapping[Target, float]) -> dict[Target, float]:
        """By how many tasks each target is behind its share of what was sent of this kind and of what waits; on a
        second pass of what was sent to these targets, since other heads of its kind have other widths."""
        sent = self._sent.get(self._kind(view.head), {})
        counts = [sent.get(target, 0) for target in shares] if view.head.again else sent.values()
        total = sum(counts) + view.head.waiting
        return {target: share * total - sent.get(target, 0) for target, share in shares.items()}

    def next(self, view: View, behind: Mapping[Target, float]) -> Target | None:
        """Of the targets with credit, the one that is most behind; None where all that the plan names are full."""
        choices = view.choices
        able = [(tasks, target) for target, tasks in behind.items() if target[0] in choices]
        return max(able)[1] if able else None

    def other_width(self, view: View, shares: Mapping[Target, float]) -> Width:
        """For a head that goes where the plan does not send it: the narrowest, which works off the queue; where plans
        are for more than can be done, the one that is most behind."""
        if not self._plans.overloaded:
            return min(width for _, width in shares)
        return self.next_width(view, shares)

    def next_width(self, view: View, shares: Mapping[Target, float]) -> Width:
        """The width that is most behind, over all servers."""
        behind: dict[Width, float] = {}
        for (_, width), tasks in self.behind(view, shares).items():
            behind[width] = behind.get(width, 0.0) + tasks
        return max(behind, key=lambda width: (behind[width], width))

    def sent(self, head: Head, target: Target, count: int) -> None:
        """So many tasks of the head's kind were sent."""
        sent = self._sent.setdefault(self._kind(head), {})
        sent[target] = sent.get(target, 0) + count

    def _kind(self, head: Head) -> HeadKind:
        return HeadKind(
            head.segment, head.previous_width, head.home if self._facts.move_activations else None, head.again
        )

    # ---- the load

    def _plan_for(self, view: View) -> PlanKey:
        """The plan that is followed: another one after a while, or when a server came, went or changed its pace."""
        servers = view.servers
        known = [servers[name] for name in self._facts.servers if name in servers]
        paces = {server.name: server.pace for server in known if server.in_service}
        if not paces:
            raise RouterError("no server in service has a profile")
        if self._current is None or paces != self._paces or view.now - self._looked_at >= LOOK_EVERY:
            self._looked_at = view.now
            self._load.look(view)
            if paces != self._paces:
                self._paces = paces
                self._fleet = self._slowed(paces)
                self._carried = self._carry(paces) / self._carry(dict(self._fleet))
            key = (self._fleet, self._step(view, self._fleet))
            if key != self._current:
                self._current, self._shares = key, self._plans.shares(key)
                self._sent.clear()
                self._given.clear()
        assert self._current is not None
        return self._current

    def _slowed(self, paces: Mapping[ServerName, float]) -> Fleet:
        """The servers with how many times slower each is than the fastest by its profile, in large steps.

        What all have in common is load, not another plan.
        """
        before, least = dict(self._fleet), min(paces.values(), default=1.0)
        fleet = []
        for name, pace in paces.items():
            steps = math.log(pace / least) / math.log(SLOWER)
            told = math.log(before.get(name, 1.0)) / math.log(SLOWER)
            fleet.append((name, SLOWER ** round(steps if abs(steps - told) > STAYS else told)))
        return tuple(fleet)

    def _carry(self, paces: Mapping[ServerName, float]) -> float:
        """Items per second at the narrowest width."""
        return sum([self._carries[name] / pace for name, pace in paces.items()]) or 1.0

    def _step(self, view: View, fleet: Fleet) -> int:
        """The load as a step, rounded up. Before anything was measured: the highest."""
        most, expected, now = self._plans.steps, self._load.expected, self._load.now
        if expected is None or now is None:
            return self._plans.step(fleet, most, self._asked)
        excess = 0.0 if self._plans.overloaded else self._excess(view)
        carried = self._carried * self._plans.most(fleet)  # last: a new fleet may displace the current
        if self._plans.waiting is None:
            steps = most * (expected + excess / CATCH_UP) / carried
        elif excess:
            steps = self._plans.worked_off(fleet, most * expected / carried, excess / self._carried)
        else:
            steps = most * min(now, expected) / carried
        if self._current is not None and fleet == self._current[0] and 0 <= self._current[1] - steps < 1 + STEPS_ABOVE:
            return self._current[1]
        return self._plans.step(fleet, steps, self._asked)

    def _excess(self, view: View) -> float:
        """What is in the system beyond the usual, in whole items' work."""
        segments = self._facts.shape.segments
        tasks = list(view.fifo_per_segment)
        for server in view.servers.values():
            for (segment, _), count in server.pending.items():
                tasks[segment] += count
        there = sum(tasks)
        expected = self._load.expected
        if expected is None or not there:
            return 0.0
        plan = self._current or (self._plans.whole, self._plans.steps)
        usual = expected * self._plans.usual_time(plan, self._carried)
        left = sum([count * (segments - segment) / segments for segment, count in enumerate(tasks)])
        return left * max(0.0, 1 - usual / there)


class PlanFollower:
    """Sends where the plan is most behind; where all that it names are full, to whom the block is soonest done."""

    chooses_full = False

    def __init__(self, plans: Plans, name: str = "lp") -> None:
        self.name = name
        self._facts = facts = plans.facts
        self.pairs = plans.pairs
        self._ledger = PlanLedger(plans)
        self._costs = server_costs(facts)

    def decide(self, view: View, rng: Generator) -> Decision:
        head, shares = view.head, self._ledger.shares(view)
        target = self._ledger.next(view, self._ledger.behind(view, shares))
        if target is None:
            width = allowed(self._ledger.other_width(view, shares), head.widths)
            known = choices_of(self._costs, view)
            if not known:  # only servers that joined without a profile have credit
                return Decision(least_outstanding(view), width, head.waiting)
            target = self._soonest(width, head, known)
        server, width = target
        count = view.servers[server].takes(min(head.waiting, self._facts.servers[server].max_batch))
        self._ledger.sent(head, (server, width), count)
        return Decision(server, allowed(width, head.widths), count)

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        return self._ledger.second(ran, margin)

    def may_resume(self, ran: WidthTuple) -> bool:
        return self._ledger.may_resume(ran)

    def _soonest(self, width: Width, head: Head, servers: Sequence[ServerView]) -> Target:
        """Where a width is soonest done."""
        return min((self._costs[s.name].completion(s, head, width), s.name, width) for s in servers)[1:]
