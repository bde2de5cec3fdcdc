"""Observation `planned`: the extended one, with the linear program's plan beside each choice.

A plan that mixes widths is no argmax of the state: it is kept by sending what is most behind. So each server's row also
has, per width, the plan's share of the head's kind and how many tasks it is behind that, and which server and width are
`lp`'s next; to follow the plan is then to copy these, and what is left to learn is where to depart from it.

Observation `escalating` is the same on plans of one pass and of two. It adds whether the head is on its second pass,
and the margin of the first; which items run again is the plan's to say.
"""

from collections.abc import Mapping

from slim_scheduler.core.router.learned.layout import layout_of
from slim_scheduler.core.router.learned.observation import ExtendedEncoder, Figures, Observation, observation
from slim_scheduler.core.router.plan.follower import PlanLedger
from slim_scheduler.core.router.plan.plans import Plans, Target
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width, WidthTuple
from slim_scheduler.core.view import View

MOST_BEHIND = 2.0  # full batches; further is all the same
NOT_PLANNED = -MOST_BEHIND


class PlannedEncoder:
    """It is of one run, and must be told each decision (`took`)."""

    def __init__(self, plans: Plans, batch_time: Seconds) -> None:
        facts = plans.facts
        self._seen = ExtendedEncoder(facts, batch_time)
        self._ledger = PlanLedger(plans)
        self._widths = widths = facts.shape.widths
        self._overloaded = plans.overloaded
        self.names = self._seen.names
        self._not_planned = [0.0] * len(widths) + [NOT_PLANNED] * len(widths)
        first = self._seen.layout.server.size
        self._columns = {  # of a target: its server's row, its share's column, and the unit of its tasks
            (name, width): (row, first + i, 1.0 / facts.servers[name].max_batch)
            for row, name in enumerate(self.names)
            for i, width in enumerate(widths)
        }
        self.layout = layout_of("planned", facts.shape, len(self.names))

    def encode(self, view: View) -> Observation:
        return observation(self.figures(view))

    def figures(self, view: View) -> Figures:
        figures = self._seen.figures(view)
        shares = self._ledger.shares(view)
        widths = self._widths
        behind = self._ledger.behind(view, shares)
        next_server, next_width = self._next(view, shares, behind)
        figures.shared.append(self._ledger.load)  # as `layout.py` names them
        figures.shared.extend([1.0 if width == next_width else 0.0 for width in widths])
        rows = figures.servers
        for row in rows:
            row += self._not_planned
        for target, share in shares.items():
            at, column, unit = self._columns[target]
            row = rows[at]
            row[column] = share
            row[column + len(widths)] = max(-MOST_BEHIND, min(MOST_BEHIND, behind[target] * unit))
        for name, row in zip(self.names, rows, strict=True):
            row.append(1.0 if name == next_server else 0.0)
        return figures

    def _next(
        self, view: View, shares: Mapping[Target, float], behind: Mapping[Target, float]
    ) -> tuple[ServerName | None, Width | None]:
        """The server and width that `lp` would take."""
        chosen = self._ledger.next(view, behind)
        if chosen is not None:
            return chosen
        return None, self._ledger.other_width(view, shares) if self._overloaded else None

    def took(self, view: View, decision: Decision) -> None:
        """The decision about this view."""
        count = min(decision.group, view.servers[decision.server].takes(view.head.waiting))
        self._ledger.sent(view.head, (decision.server, decision.width), count)

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The width tuple at which the plan lets an item run again; None where it is answered."""
        return self._ledger.second(ran, margin)

    def may_resume(self, ran: WidthTuple) -> bool:
        """Whether the plan lets second passes go on from there."""
        return self._ledger.may_resume(ran)


class EscalatingEncoder:
    """The planned observation of heads on either pass, as `lp` follows its plans. It is the escalation of its run."""

    def __init__(self, plans: Plans, batch_time: Seconds) -> None:
        self._planned = PlannedEncoder(plans, batch_time)
        self.pairs = plans.pairs
        self.names = self._planned.names
        self.layout = layout_of("escalating", plans.facts.shape, len(self.names))

    def encode(self, view: View) -> Observation:
        figures = self._planned.figures(view)
        figures.shared.extend((float(view.head.again), view.head.margin or 0.0))  # as `layout.py` names them
        return observation(figures)

    def took(self, view: View, decision: Decision) -> None:
        self._planned.took(view, decision)

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The width tuple at which the plan lets an item run again; None where it is answered."""
        return self._planned.second(ran, margin)

    def may_resume(self, ran: WidthTuple) -> bool:
        """Whether the plan lets second passes go on from there."""
        return self._planned.may_resume(ran)
