"""What servers report and what the router sees of it.

A `ServerReport` is one server's own word with the time at which it was made. A `ServerView` joins the last report
that arrived with what the dispatcher itself knows (credit, tasks sent and not yet done). A figure that nobody has
reported is None: unknown is not zero. The dispatcher owns and changes the `ServerView`s; routers only read them.
"""

from collections.abc import Mapping, Sequence

import msgspec

from slim_scheduler.core.types import BlockId, Bytes, Joules, Seconds, ServerName, TaskConstraints, Watts, Width


class InstanceCount(msgspec.Struct, frozen=True, gc=False):
    """How many instances of one (segment, width) a server holds, by state."""

    segment: int
    width: Width
    free: int
    busy: int
    loading: int

    @property
    def count(self) -> int:
        """Those that can run a batch now or soon: none where the last one is being unloaded."""
        return self.free + self.busy + self.loading


class ServerReport(msgspec.Struct, frozen=True, gc=False):
    """One server's telemetry at `made_at`.

    `made_at` is on the dispatcher's clock; `incarnation` grows when the server lost its state (a restart).
    `open_blocks` are the blocks of which it still holds unfinished tasks: the dispatcher finds lost messages by
    comparing. `batch_p50` and `batch_p99` are percentiles over recent batches of the time from a task's arrival at the
    server (where it counts as having come at another time, from that) to its result. `pace`: how many times as long as
    its profile says its batches took of late.
    """

    server: ServerName
    incarnation: int
    made_at: Seconds
    queue_per_segment: tuple[int, ...]
    running_tasks: int
    running_batches: int
    memory_used: Bytes
    memory_total: Bytes
    instances: tuple[InstanceCount, ...]
    open_blocks: tuple[BlockId, ...]
    utilization: float | None = None
    power_w: Watts | None = None
    energy_j: Joules | None = None
    energy_source: str = "none"
    batch_p50: Seconds | None = None
    batch_p99: Seconds | None = None
    pace: float = 1.0

    @property
    def queue_length(self) -> int:
        return sum(self.queue_per_segment)


class ServerView:
    """What the dispatcher knows of one server. Routers read it; only the dispatcher writes.

    `outstanding` counts tasks sent and not yet reported done, `pending` the same by (segment, requested width).
    `limit` is how many may be outstanding: `credit_tasks`, a few while the server is on probation, none while it is
    ejected or draining.
    """

    __slots__ = (
        "credit_tasks",
        "draining",
        "heard_at",
        "incarnation",
        "limit",
        "name",
        "outstanding",
        "pending",
        "report",
        "up",
    )

    def __init__(self, name: ServerName, credit_tasks: int, incarnation: int, now: Seconds) -> None:
        self.name = name
        self.incarnation = incarnation
        self.up = True
        self.draining = False
        self.credit_tasks = credit_tasks
        self.limit = credit_tasks
        self.outstanding = 0
        self.pending: dict[tuple[int, Width], int] = {}
        self.report: ServerReport | None = None
        self.heard_at = now

    @property
    def credit(self) -> int:
        return self.limit - self.outstanding

    @property
    def pace(self) -> float:
        """What the profile's times are multiplied by, by the last report."""
        return 1.0 if self.report is None else self.report.pace

    @property
    def in_service(self) -> bool:
        return self.up and self.limit > 0

    @property
    def available(self) -> bool:
        return self.up and self.outstanding < self.limit

    def takes(self, waiting: int) -> int:
        """How many of the waiting tasks a block for this server can have; of a full one, nobody knows yet: all."""
        return min(waiting, self.credit) if self.credit > 0 else waiting


class Head(msgspec.Struct, frozen=True, gc=False):
    """The oldest task's key, which the next decision is about, and how much of that key waits.

    `widths` are the widths a decision may choose; `slack` is the time to the deadline, None without one. `age` counts
    from the task's entry to the FIFO, `item_age` from its request's arrival. `again`: its items are on their second
    pass, whose width tuple is among the constraints, and `margin` is the oldest one's after the first.
    """

    segment: int
    previous_width: Width | None
    home: ServerName | None
    waiting: int
    age: Seconds
    slack: Seconds | None
    widths: tuple[Width, ...]
    constraints: TaskConstraints | None = None
    item_age: Seconds = 0.0
    again: bool = False
    margin: float | None = None


class View(msgspec.Struct, frozen=True, gc=False):
    """All that a router may look at for one decision, which is among `choices`. There is at least one.

    `received` are the items that ever arrived, also those that were refused: what is offered, not what was let in.
    `squares` are those of the requests' items, summed: over `received`, how many items a mean item came with.
    """

    now: Seconds
    head: Head
    fifo_length: int
    fifo_per_segment: Sequence[int]
    completed: int
    servers: Mapping[ServerName, ServerView]
    choices: Mapping[ServerName, ServerView]
    received: int = 0
    squares: int = 0
