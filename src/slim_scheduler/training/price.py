"""What a decision uses up, at the plan's price: the constraint that the cluster has, instead of a weight.

Near the limit the cost of a wide block is not its own latency, but the widths that others can no longer have. The dual
of the linear program says what a second of a device, or a byte of a link, is worth at the measured load: at these
prices the widths that the best plan mixes are worth the same, and every other is worth less. A multiplier that follows
the queue, as in dual ascent, keeps it short: at the target delay the price is the dual, beyond it more, below it less.

With a target, a block of recipe `planned` then earns what its widths add to the best that they can become, not eq. 7's
accuracy: a mean over all completions, most of which no plan would ever take, pays for wide first segments that lead
nowhere. Policies of second passes, whose plans have pairs, earn eq. 7's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from slim_scheduler.core.router.costs import moved_bytes, seconds_per_item, server_costs
from slim_scheduler.core.router.plan.follower import PlanLedger
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.types import Batch, Block, Decision, Seconds, ServerName, TaskId, Width, WidthTuple
from slim_scheduler.core.view import View
from slim_scheduler.setup.config import Config

RESTED = 0.05  # of the time: the step in which a device's curve is looked at
MOST_DELAYED = 8.0  # targets; from there on a longer queue is no dearer, or it would drown all other rewards


class _Bill(NamedTuple):
    """What a task of a block costs others: per second of its device, and for links. `alone`: seconds, in a batch of the
    block's own. `worth`: of widths that an item has run (`Plans.worth`)."""

    per_second: float
    links: float
    alone: Seconds
    shared: bool
    worth: Mapping[WidthTuple, float]


class CapacityPrice:
    """What each decision is charged, in rewards per task. It is of one run.

    `alpha` is what accuracy is worth in eq. 7; `target` the mean time of a task in the system, waiting included. None:
    the price is the dual, however long the queue is. `shared`: a task is charged with its share of the batch in which
    it ran, so that joining others is cheaper than a batch of one's own; but a block that leaves behind tasks which it
    could have taken, like every block without `shared`, with its share of a batch of its own. `adds`: what widths add
    by plans of one pass counts instead of eq. 7's accuracy.
    """

    def __init__(
        self, plans: Plans, alpha: float, target: Seconds | None, shared: bool = False, adds: bool = False
    ) -> None:
        facts = self._facts = plans.facts
        self._adds = adds and not plans.pairs
        self._ledger = PlanLedger(plans)
        self._alpha = alpha
        self._costs = server_costs(facts)
        self._target = target
        self._shared = shared
        self._open: dict[int, _Bill] = {}
        self._ran: dict[TaskId, Seconds] = {}
        shape = facts.shape
        self._work: dict[tuple[ServerName, int, Width | None, Width], Seconds] = {
            (name, segment, previous, width): seconds_per_item(server, segment, previous, width)
            for name, server in facts.servers.items()
            for segment in range(shape.segments)
            for previous in (shape.widths if segment else (None,))
            for width in shape.widths
        }

    def decided(self, number: int, view: View, decision: Decision) -> None:
        """The decision of this number, about the tasks that wait at the head."""
        head, prices = view.head, self._ledger.prices(view)
        name = decision.server
        size = moved_bytes(self._facts, head, name)
        links = size * prices.into.get(name, 0.0)
        if head.home is not None:
            links += size * prices.out_of.get(head.home, 0.0)
        delay_factor = 1.0 if self._target is None else min(MOST_DELAYED, self._delay(view) / self._target)
        worth = self._alpha * delay_factor
        count, server = min(head.waiting, self._facts.servers[name].max_batch), view.servers[name]
        sent = server.takes(min(decision.group, count))
        seconds = self._seconds(name, head.segment, head.previous_width, decision.width, sent)
        whole = decision.group >= server.takes(count)
        shared = self._shared and whole
        earns = self._ledger.worth(view) if self._adds else {}
        self._open[number] = _Bill(worth * prices.device.get(name, 0.0), worth * links, seconds, shared, earns)

    def started(self, server: ServerName, batch: Batch) -> None:
        """A batch began to run."""
        if self._shared:
            segment, previous, width = batch.segment, batch.previous_width, batch.width
            seconds = self._seconds(server, segment, previous, width, len(batch.tasks))
            self._ran.update(dict.fromkeys([task.task_id for task in batch.tasks], seconds))

    def worth(self, number: int, ran: Sequence[WidthTuple]) -> float | None:
        """Accuracy that the last segment of these widths added, the mean over items; None: as eq. 7 has it."""
        bill = self._open.get(number)
        if bill is None or not bill.worth or not ran:
            return None
        return sum([bill.worth[widths] - bill.worth[widths[:-1]] for widths in ran]) / len(ran)

    def charged(self, number: int, block: Block) -> float:
        """Reward that others lost by one task of this block, which is over. 0 for one that nobody decided."""
        ran = [self._ran.pop(task.task_id, None) for task in block.tasks]
        bill = self._open.pop(number, None)
        if bill is None:
            return 0.0
        seconds = bill.alone
        if bill.shared:
            seconds = sum([bill.alone if own is None else own for own in ran]) / len(ran)
        return bill.per_second * seconds + bill.links

    def _seconds(self, server: ServerName, segment: int, previous: Width | None, width: Width, size: int) -> Seconds:
        """Device time of one task in a batch of so many."""
        run = self._costs[server].runs(segment, previous)[size][self._facts.shape.index(width)]
        return max(self._work[server, segment, previous, width], run / size)

    def _delay(self, view: View) -> Seconds:
        """Mean time of a task in the system, by Little's law: tasks there, over tasks per second."""
        tasks = view.fifo_length + sum(server.outstanding for server in view.servers.values())
        return tasks / (self._ledger.rate(view) * self._facts.shape.segments)


def capacity_price(config: Config, plans: Callable[[], Plans]) -> CapacityPrice | None:
    """What `[training]` charges the decisions of a run with, beyond eq. 7; None: nothing. `plans`: of its cluster."""
    training = config.training
    queue_grows = training.plan_rho != "lp" and training.plan_rho > 1
    if training.target_delay_s is None and not queue_grows:
        return None
    shared = training.charged_batch == "shared"
    # An outcome is each item's own, and an accuracy that is not centred has another zero for what is left undone.
    adds = (
        training.target_delay_s is not None
        and training.resolved.accuracy == "expected"
        and config.reward.center_accuracy
    )
    return CapacityPrice(plans(), config.reward.alpha, training.target_delay_s, shared, adds)
