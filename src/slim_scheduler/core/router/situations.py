"""Decisions that were just made, for the same situation again.

On a quiet cluster heads come one at a time and find what the one before them found: the servers' last reports, the same
credit, nobody else waiting. A learned decision is a function of that, but for how long ago things were and how fast
items were completed lately, and takes several times longer than to see that nothing has changed.
"""

from collections.abc import Hashable
from math import log1p

from slim_scheduler.core.telemetry import View
from slim_scheduler.core.types import Decision, Seconds

KEPT: Seconds = 0.1  # a telemetry period: then everything is looked at again
MOST_KEPT = 1024
STEPS = 4.0  # per unit of log1p(time / batch time): times within a step count as the same


class Situations:
    """Situations since the last report of any server, and what was decided. `batch_time` is the policy's unit of time.

    Equal are: the head's kind, count and choices, the tasks that wait by segment, every server's credit and pending
    tasks, and the steps of the head's age and slack. It is of one run.
    """

    def __init__(self, batch_time: Seconds) -> None:
        self._unit = 1.0 / batch_time
        self._reports: list[Seconds | None] = []
        self._since: Seconds = float("-inf")
        self._decided: dict[Hashable, Decision] = {}

    def key(self, view: View) -> Hashable:
        """Names the situation, and forgets all others where a server has reported since, or time has passed."""
        head, servers = view.head, view.servers.values()
        reports = [None if s.report is None else s.report.made_at for s in servers]
        decided = self._decided
        if reports != self._reports or view.now - self._since >= KEPT or len(decided) >= MOST_KEPT:
            decided.clear()
            self._reports, self._since = reports, view.now
        slack = head.slack
        return (
            head.segment,
            head.previous_width,
            head.home,
            head.waiting,
            head.widths,
            int(STEPS * log1p(head.age * self._unit)),
            None if slack is None else int(STEPS * log1p(max(0.0, slack) * self._unit)),
            tuple(view.fifo_per_segment),
            *[(s.name, s.up, s.limit, s.outstanding, tuple(s.pending.items())) for s in servers],
        )

    def decided(self, key: Hashable) -> Decision | None:
        return self._decided.get(key)

    def keep(self, key: Hashable, decision: Decision) -> None:
        self._decided[key] = decision
