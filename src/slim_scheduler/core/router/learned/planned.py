"""Observation `planned`: the extended one, with the linear program's plan beside each choice.

A plan that mixes widths is no argmax of the state: it is kept by sending what is most behind. So each server's row also
has, per width, the plan's share of the head's kind and how many tasks it is behind that, and which server and width are
`lp`'s next; to follow the plan is then to copy these, and what is left to learn is where to depart from it.

Observation `escalating` is the same on plans of one pass and of two. It adds whether the head is on its second pass,
and the margin of the first; which items run again is the plan's to say.
"""

from collections.abc import Mapping

import numpy as np

from slim_scheduler.core.router.learned.layout import layout_of
from slim_scheduler.core.router.learned.observation import ExtendedEncoder, Observation
from slim_scheduler.core.router.plan.follower import FOLLOWED_TWICE, PlanLedger
from slim_scheduler.core.router.plan.plans import Plans, Target
from slim_scheduler.core.types import Decision, Seconds, WidthTuple
from slim_scheduler.core.view import View

MOST_BEHIND = 2.0  # full batches; further is all the same
NOT_PLANNED = -MOST_BEHIND


class PlannedEncoder:
    """It is of one run, and must be told each decision (`took`)."""

    def __init__(self, plans: Plans, batch_time: Seconds, ledger: PlanLedger | None = None) -> None:
        facts = plans.facts
        self._seen = ExtendedEncoder(facts, batch_time)
        self._ledger = ledger or PlanLedger(plans)
        self._widths = facts.shape.widths
        self._overloaded = plans.overloaded
        self._places = {
            (name, width): (row, column)
            for row, name in enumerate(facts.servers)
            for column, width in enumerate(self._widths)
        }
        self._units = {name: 1.0 / server.max_batch for name, server in facts.servers.items()}
        self.names = self._seen.names
        self.layout = layout_of("planned", facts.shape, len(self.names))

    def encode(self, view: View) -> Observation:
        seen = self._seen.encode(view)
        shares = self._ledger.shares(view)
        of_all, of_server = self.layout
        shared = np.zeros(of_all.size, np.float32)
        shared[: len(seen.shared)] = seen.shared
        servers = np.zeros((len(self.names), of_server.size), np.float32)
        servers[:, : seen.servers.shape[1]] = seen.servers
        # Views of these columns: what is written here stands there.
        share, behind = servers[:, of_server["planned_share"]], servers[:, of_server["behind"]]
        behind[:] = NOT_PLANNED
        for target, tasks in self._ledger.behind(view, shares).items():
            place = self._places[target]
            share[place] = shares[target]
            behind[place] = max(-MOST_BEHIND, min(MOST_BEHIND, tasks * self._units[target[0]]))
        shared[of_all["planned_load"]] = self._ledger.load
        next_server, next_width = self._next(view, shares)
        if next_server is not None:
            servers[next_server, of_server["next_server"]] = 1.0
        if next_width is not None:
            shared[of_all["next_width"]][next_width] = 1.0
        return seen._replace(shared=shared, servers=servers)

    def _next(self, view: View, shares: Mapping[Target, float]) -> tuple[int | None, int | None]:
        """Indices of the server and width that `lp` would take."""
        chosen = self._ledger.next(view, shares)
        if chosen is not None:
            return self._places[chosen]
        if self._overloaded:
            return None, self._widths.index(self._ledger.other_width(view, shares))
        return None, None

    def took(self, view: View, decision: Decision) -> None:
        """The decision about this view."""
        count = min(decision.group, view.servers[decision.server].takes(view.head.waiting))
        self._ledger.sent(view.head, (decision.server, decision.width), count)

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The width tuple at which the plan lets an item run again; None where it is answered."""
        return self._ledger.second(ran, margin)


class EscalatingEncoder:
    """The planned observation of heads on either pass, as `lp` follows its plans. It is the escalation of its run."""

    def __init__(self, plans: Plans, batch_time: Seconds) -> None:
        ledger = PlanLedger(plans, FOLLOWED_TWICE)
        self._planned = PlannedEncoder(plans, batch_time, ledger)
        self.pairs = plans.pairs
        self.names = self._planned.names
        self.layout = layout_of("escalating", plans.facts.shape, len(self.names))

    def encode(self, view: View) -> Observation:
        seen, columns = self._planned.encode(view), self.layout.shared
        shared = np.zeros(columns.size, np.float32)
        shared[: len(seen.shared)] = seen.shared
        shared[columns["again"]] = view.head.again
        shared[columns["margin"]] = view.head.margin or 0.0
        return seen._replace(shared=shared)

    def took(self, view: View, decision: Decision) -> None:
        self._planned.took(view, decision)

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The width tuple at which the plan lets an item run again; None where it is answered."""
        return self._planned.second(ran, margin)
