"""Decisions that were just made, for the same situation again.

On a quiet cluster heads come one at a time and find what the one before them found: the same credit, nobody else
waiting, reports that say nothing new. A learned decision is a function of that, but for small differences and for how
long ago things were, and takes several times longer than to see that nothing has changed.
"""

from collections.abc import Hashable
from math import log1p

from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.types import Decision, Seconds
from slim_scheduler.core.view import ServerReport, ServerView, View

KEPT: Seconds = 5.0  # then everything is looked at again
MOST_KEPT = 1024  # far more than come in that time on a quiet cluster
LOOKING = 8.0  # what looking costs, in namings of a situation
# Within a step figures count as the same: steps that left 8,000 decisions on the demo as they were.
TIME_STEPS = 4.0  # per unit of log1p(time / batch time)
SHARE_STEPS = 8.0  # of a device's utilisation, most power and memory


class Situations:
    """The situations of the last seconds, and what was decided. `batch_time` is the policy's unit of time. Servers that
    joined after the run began are none of a policy's choices, and of no situation.

    Equal are: the head's kind, count and choices, the tasks that wait by segment, every server's
    credit, pending tasks, reported queues and instances; and the steps of the head's age and slack, and of what devices
    report. It is of one run. On a busy cluster hardly anything comes again: once too few did, none is kept until the
    time is over.
    """

    def __init__(self, facts: RouterFacts, batch_time: Seconds) -> None:
        self._unit = 1.0 / batch_time
        self._facts = facts.servers
        self._since: Seconds = float("-inf")
        self._again = 0  # decisions that were known
        self._rests = False
        self._decided: dict[Hashable, Decision] = {}
        self._reported: dict[str, tuple[ServerReport | None, int]] = {}  # the last report and its class
        self._classes: dict[Hashable, int] = {}  # reports with the same steps

    def key(self, view: View) -> Hashable | None:
        """Names the situation; forgets all of them where it is time. None while nothing is kept."""
        head = view.head
        if view.now - self._since >= KEPT:
            self._forget()
            self._since, self._rests = view.now, False
        elif max(len(self._decided), len(self._classes)) >= MOST_KEPT:
            self._rests = self._again < MOST_KEPT / LOOKING
            self._forget()
        if self._rests:
            return None
        slack = head.slack
        return (
            head.segment,
            head.previous_width,
            head.home,
            head.waiting,
            head.widths,
            int(TIME_STEPS * log1p(head.age * self._unit)),
            None if slack is None else int(TIME_STEPS * log1p(max(0.0, slack) * self._unit)),
            tuple(view.fifo_per_segment),
            *[
                (s.name, s.up, s.limit, s.outstanding, self._report_class(s), frozenset(s.pending.items()))
                for s in view.servers.values()
                if s.name in self._facts
            ],
        )

    def decided(self, key: Hashable) -> Decision | None:
        decision = self._decided.get(key)
        if decision is not None:
            self._again += 1
        return decision

    def keep(self, key: Hashable, decision: Decision) -> None:
        self._decided[key] = decision

    def _forget(self) -> None:
        self._again = 0
        self._decided.clear()
        self._reported.clear()
        self._classes.clear()

    def _report_class(self, server: ServerView) -> int:
        """Stands for what the server reported last: looked at once per report, and short to compare."""
        known = self._reported.get(server.name)
        if known is None or known[0] is not server.report:
            steps = _steps(server.report, self._facts[server.name])
            known = server.report, self._classes.setdefault(steps, len(self._classes))
            self._reported[server.name] = known
        return known[1]


def _steps(report: ServerReport | None, facts: ServerFacts) -> Hashable:
    if report is None:
        return None
    utilization, power = report.utilization, report.power_w
    return (
        report.queue_per_segment,
        tuple((i.segment, i.width, i.free + i.busy, i.loading) for i in report.instances),
        None if utilization is None else int(SHARE_STEPS * utilization),
        None if power is None else int(SHARE_STEPS * power / max(facts.profile.power.y)),
        int(SHARE_STEPS * report.memory_used / facts.vram_budget),
        report.pace,
    )
