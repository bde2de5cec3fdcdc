"""The values that travel through the loop: requests, tasks, blocks, batches, decisions, outcomes.

Seconds, bytes, joules and ratios in [0, 1] throughout. Times are points on the host's monotonic clock (or simulated
time). Values are frozen msgspec structs: they cost a tenth of a frozen dataclass to make and encode themselves into
the record (docs/decisions.md).
"""

from enum import StrEnum

import msgspec

Seconds = float
Bytes = int
Joules = float
Watts = float
Width = float
WidthTuple = tuple[float, ...]

ItemId = int
RequestId = int
TaskId = int
BlockId = int
BatchId = int
InstanceId = int
ServerName = str


# The reason of items that ran and have no answer: another try would end the same.
NOT_FINITE = "the output is not finite"


class Outcome(StrEnum):
    """How an item, or a whole request, ended. Every accepted item gets exactly one."""

    ANSWERED = "answered"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TaskConstraints(msgspec.Struct, frozen=True, gc=False):
    """What the client asked for beyond an answer.

    `widths` fixes the width of every segment exactly (no wider instance may serve it); `accuracy_floor` is the least
    expected top-1 accuracy, in [0, 1].
    """

    widths: WidthTuple | None = None
    accuracy_floor: float | None = None


class Request(msgspec.Struct, frozen=True, gc=False):
    """One or more items that arrive together and are answered together.

    `arrival` is the intended arrival; `deadline` a point in time, not a duration. Priority 0 is the most urgent. An
    item whose answer is less sure than `confidence_floor`, in [0, 1], runs again at the widest. Where that does not
    come to its end, or would hardly, its first answer is given if `anytime`.
    """

    request_id: RequestId
    items: tuple[ItemId, ...]
    arrival: Seconds
    deadline: Seconds | None = None
    priority: int = 0
    constraints: TaskConstraints | None = None
    confidence_floor: float | None = None
    anytime: bool = True


class Task(msgspec.Struct, frozen=True, gc=False):
    """One segment of one item, ready to run.

    `task_id` is new for every attempt, so an answer to an attempt that was given up is recognised and dropped.
    `home` is the server that holds the activation (None: the input, at the dispatcher). `arrival`, where given, is when
    it counts as having come, in every queue. `again`: it is of its item's second pass. `keep`: what it reads is still
    needed when it has run, because a second pass may go on from there.
    """

    task_id: TaskId
    item: ItemId
    segment: int
    previous_width: Width | None
    home: ServerName | None
    entered: Seconds
    deadline: Seconds | None
    priority: int
    arrival: Seconds | None = None
    again: bool = False
    keep: bool = False


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A router's choice: where, how wide, and how many tasks at most."""

    server: ServerName
    width: Width
    group: int


class Block(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The tasks that one decision sends to one server; all share segment, previous width and requested width.

    `exact` forbids a wider instance. `more`: how many others of this key may follow soon, as far as is known where it
    was sent; the server need not wait for company where there are none.
    """

    block_id: BlockId
    server: ServerName
    segment: int
    width: Width
    previous_width: Width | None
    exact: bool
    tasks: tuple[Task, ...]
    sent_at: Seconds
    more: int = 0


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Up to `max_batch` queued tasks of one key on one instance. `width` is the instance's, which is what runs."""

    batch_id: BatchId
    instance: InstanceId
    segment: int
    width: Width
    requested_width: Width
    previous_width: Width | None
    tasks: tuple[Task, ...]
    started: Seconds


class ItemOutcome(msgspec.Struct, frozen=True, gc=False):
    """The end of one item: what ran where, and where its time went.

    `queue_s` is everything between arrival and end that was not `compute_s` (the durations of its batches).
    `energy_j` is its share of its batches' energy, 0 where none ran, None where a part is unknown. Times and energy are
    of all passes; `widths` and `servers` of the pass that answered, the `passes`-th, and `margin` is its answer's,
    where it was told. What begins with `other_` is of the pass that did not answer, where there was one.
    """

    item: ItemId
    outcome: Outcome
    widths: WidthTuple
    servers: tuple[ServerName, ...]
    queue_s: Seconds
    compute_s: Seconds
    energy_j: Joules | None = None
    reason: str = ""
    passes: int = 1
    margin: float | None = None
    other_widths: WidthTuple = ()
    other_compute_s: Seconds = 0.0
    other_energy_j: Joules | None = None
    other_margin: float | None = None
