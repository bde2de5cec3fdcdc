"""The delay that a decision imposes on others, which its own block's latency does not show.

Work on a busy device, or bytes on a busy medium, make everything behind them later, until it has caught up. In eq. 7
that comes back as the latency of later blocks, decided by others: a return that is to see it has to look as far as the
queue lasts, and its noise drowns what one decision did. Perturbation analysis of a queue gives it at once: one more
second of work delays by a second as many tasks as come after it in the same busy period (Suri and Zazanis, Management
Science 34(1), 1988).
"""

from math import exp, inf

from slim_scheduler.core.plan import seconds_per_item
from slim_scheduler.core.reward import RewardWeights
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.observation import full_batch_time
from slim_scheduler.core.telemetry import Head, View
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width

MEMORY: Seconds = 0.5  # time constant of the measured rates
BUSIEST = 0.9  # of the time, beyond which the estimate is too noisy to be divided by


class ImposedDelay:
    """What each decision costs the tasks behind it, in rewards per task. It is of one run.

    A queue is worked off in full batches; a block is charged as a batch of its own, since small blocks of many kinds do
    not make full ones.

    `spread` is the accuracy between the best and the worst width tuple. A price that leaves only the slimmest width is
    as high as it gets: in a deep queue it would otherwise drown everything else. `share` is how much of it is charged,
    where a return that looks ahead sees some of it as well.
    """

    def __init__(self, facts: RouterFacts, weights: RewardWeights, spread: float, share: float = 1.0) -> None:
        shape = facts.shape
        self._facts = facts
        self._devices = {name: WorkQueue() for name in facts.servers}
        self._medium = WorkQueue() if facts.shared_link else None
        self._bytes_per_s = min(server.bytes_per_s for server in facts.servers.values())
        self._work: dict[tuple[ServerName, int, Width | None, Width], Seconds] = {
            (name, segment, previous, width): seconds_per_item(server, segment, previous, width)
            for name, server in facts.servers.items()
            for segment in range(shape.segments)
            for previous in (shape.widths if segment else (None,))
            for width in shape.widths
        }
        powers = [max(server.profile.power.y) for server in facts.servers.values()]
        self._per_second = share * (weights.beta + weights.gamma * sum(powers) / len(powers))  # E = P L
        slimmest, widest = shape.widths[0], shape.widths[-1]
        saved = [w - self._work[n, s, p, slimmest] for (n, s, p, width), w in self._work.items() if width == widest]
        affordable = weights.alpha * spread / self._per_second if self._per_second else 0.0
        self._most_behind = (affordable + full_batch_time(facts)) / min(saved) if min(saved) > 0 else inf

    def charge(self, view: View, decision: Decision) -> float:
        """Reward that others lose by one task of this block, whose tasks are waiting at the head."""
        head = view.head
        count = min(decision.group, head.waiting)
        held = max(0, view.fifo_length - count) / len(self._devices)  # these wait for the device too
        work = self._work[decision.server, head.segment, head.previous_width, decision.width]
        behind = min(self._most_behind, self._devices[decision.server].take(view.now, count, work, held))
        server = self._facts.servers[decision.server]
        batch = min(count, server.max_batch)
        alone = server.latency.seconds(head.segment, head.previous_width, decision.width, batch) / batch
        delay = max(work, server.slowdown * alone) * behind
        size = self._bytes_moved(head, decision.server)
        if self._medium is not None and size:
            work = size / self._bytes_per_s
            delay += work * min(self._most_behind, self._medium.take(view.now, count, work, 0.0))
        return self._per_second * delay

    def _bytes_moved(self, head: Head, server: ServerName) -> int:
        """What one task sends to `server`: its input, or the activation that is somewhere else."""
        shape = self._facts.shape
        if head.home is None or head.previous_width is None:
            return shape.input_bytes
        return shape.activation(head.segment - 1, head.previous_width) if head.home != server else 0


class WorkQueue:
    """A device or a medium as a queue of work."""

    def __init__(self) -> None:
        self._at: Seconds = 0.0
        self._work: Seconds = 0.0  # taken in and not yet done
        self._tasks = 0.0  # per second
        self._busy = 0.0  # seconds of work per second

    def take(self, now: Seconds, count: int, work: Seconds, held: float) -> float:
        """Takes in `count` tasks of `work` each. Returns how many tasks are behind them.

        They are those who come while what is here is worked off, and `held` more; and as the work grows, so does the
        time in which more come.
        """
        since = now - self._at
        fade = exp(-since / MEMORY)
        self._at = now
        self._tasks = fade * self._tasks + count / MEMORY
        self._busy = fade * self._busy + count * work / MEMORY
        self._work = max(0.0, self._work - since) + count * work
        return (self._tasks * self._work + held) / (1 - min(BUSIEST, self._busy))
