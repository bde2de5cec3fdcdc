"""Observation `planned`: the extended one, with the linear program's plan beside each choice.

A plan that mixes widths is no argmax of the state: it is kept by sending what is most behind. So each server's row also
has, per width, the plan's share of the head's kind and how many tasks it is behind that, and which server and width are
`lp`'s next; to follow the plan is then to copy these, and what is left to learn is where to depart from it.
"""

from collections.abc import Mapping

import numpy as np

from slim_scheduler.core.router.learned.observation import ExtendedEncoder, Observation
from slim_scheduler.core.router.plan.follower import PlanLedger
from slim_scheduler.core.router.plan.plans import Plans, Target
from slim_scheduler.core.types import Decision, Seconds
from slim_scheduler.core.view import View

MOST_BEHIND = 2.0  # full batches; further is all the same
NOT_PLANNED = -MOST_BEHIND


class PlannedEncoder:
    """It is of one run, and must be told each decision (`took`)."""

    def __init__(self, plans: Plans, batch_time: Seconds) -> None:
        facts = plans.facts
        self._seen = ExtendedEncoder(facts, batch_time)
        self._ledger = PlanLedger(plans)
        self._widths = facts.shape.widths
        self._overloaded = plans.overloaded
        self._places = {
            (name, width): (row, column)
            for row, name in enumerate(facts.servers)
            for column, width in enumerate(self._widths)
        }
        self._units = {name: 1.0 / server.max_batch for name, server in facts.servers.items()}
        self.names = self._seen.names
        self.shared_size = self._seen.shared_size + 1 + len(self._widths)
        self.server_size = self._seen.server_size + 2 * len(self._widths) + 1

    def encode(self, view: View) -> Observation:
        seen = self._seen.encode(view)
        shares = self._ledger.shares(view)
        count = len(self._widths)
        figures = np.zeros((len(self.names), 2 * count + 1), np.float32)
        figures[:, count:-1] = NOT_PLANNED
        for target, behind in self._ledger.behind(view, shares).items():
            row, column = self._places[target]
            figures[row, column] = shares[target]
            figures[row, count + column] = max(-MOST_BEHIND, min(MOST_BEHIND, behind * self._units[target[0]]))
        shared = np.zeros(1 + count, np.float32)
        shared[0] = self._ledger.load
        next_server, next_width = self._next(view, shares)
        if next_server is not None:
            figures[next_server, -1] = 1.0
        if next_width is not None:
            shared[1 + next_width] = 1.0
        return seen._replace(
            shared=np.concatenate((seen.shared, shared)),
            servers=np.concatenate((seen.servers, figures), axis=1),
        )

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
