"""What a decision uses up, at the plan's price: the constraint that the cluster has, instead of a weight.

Near the limit the cost of a wide block is not its own latency, but the widths that others can no longer have. The dual
of the linear program says what a second of a device, or a byte of a link, is worth at the measured load: at these
prices the widths that the best plan mixes are worth the same, and every other is worth less. A multiplier that follows
the queue, as in dual ascent, keeps it short: at the target delay the price is the dual, beyond it more, below it less.
"""

from slim_scheduler.core.plan import seconds_per_item
from slim_scheduler.core.router.links import moved_bytes
from slim_scheduler.core.router.plan import PlanLedger
from slim_scheduler.core.router.plans import Plans
from slim_scheduler.core.telemetry import View
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width

MOST_DELAYED = 8.0  # targets; from there on a longer queue is no dearer, or it would drown all other rewards


class CapacityPrice:
    """What each decision is charged, in rewards per task. It is of one run.

    `alpha` is what accuracy is worth in eq. 7; `target` the mean time of a task in the system, waiting included. None:
    the price is the dual, however long the queue is.
    """

    def __init__(self, plans: Plans, alpha: float, target: Seconds | None) -> None:
        facts = self._facts = plans.facts
        self._ledger = PlanLedger(plans)
        self._alpha = alpha
        self._target = target
        shape = facts.shape
        self._work: dict[tuple[ServerName, int, Width | None, Width], Seconds] = {
            (name, segment, previous, width): seconds_per_item(server, segment, previous, width)
            for name, server in facts.servers.items()
            for segment in range(shape.segments)
            for previous in (shape.widths if segment else (None,))
            for width in shape.widths
        }

    def charge(self, view: View, decision: Decision) -> float:
        """Reward that others lose by one task of this block, whose tasks are waiting at the head."""
        head, prices = view.head, self._ledger.prices(view)
        name = decision.server
        cost = self._seconds(view, decision) * prices.device.get(name, 0.0)
        size = moved_bytes(self._facts, head, name)
        cost += size * prices.into.get(name, 0.0)
        if head.home is not None:
            cost += size * prices.out_of.get(head.home, 0.0)
        delay_factor = 1.0 if self._target is None else min(MOST_DELAYED, self._delay(view) / self._target)
        return self._alpha * cost * delay_factor

    def _seconds(self, view: View, decision: Decision) -> Seconds:
        """Device time of one task. A block is a batch of its own: small blocks of many kinds make no full one."""
        head, server = view.head, self._facts.servers[decision.server]
        best = self._work[decision.server, head.segment, head.previous_width, decision.width]
        batch = min(decision.group, head.waiting, server.max_batch)
        alone = server.latency.seconds(head.segment, head.previous_width, decision.width, batch) / batch
        return max(best, server.slowdown * alone)

    def _delay(self, view: View) -> Seconds:
        """Mean time of a task in the system, by Little's law: tasks there, over tasks per second."""
        tasks = view.fifo_length + sum(server.outstanding for server in view.servers.values())
        return tasks / (self._ledger.rate(view) * self._facts.shape.segments)
