"""Every event and command of the loop: the vocabulary between the two machines and their hosts.

A host (simulator or live engine) delivers events to `Dispatcher.handle` and `ServerScheduler.handle` and performs
the commands that come back. `WakeAt` asks for a `TimerFired` at or after that time; a spare one does no harm.
"""

import msgspec

from slim_scheduler.core.types import (
    Batch,
    BatchId,
    Block,
    BlockId,
    Bytes,
    Decision,
    InstanceId,
    ItemOutcome,
    Joules,
    Outcome,
    Request,
    RequestId,
    Seconds,
    ServerName,
    TaskId,
    Watts,
    Width,
)
from slim_scheduler.core.view import ServerReport


class Message(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all events and commands; encodes with its type name."""


# ---- events to the dispatcher


class RequestArrived(Message, frozen=True, gc=False):
    """Taken or refused at once. Routing waits for `RouteNow`, which `RouteSoon` asks for, or for any other event."""

    request: Request


class RouteNow(Message, frozen=True, gc=False):
    """The requests that came at the same time as the one that asked with `RouteSoon` have all been told."""


class RequestOffered(Message, frozen=True, gc=False):
    """A front end has read a request: may it come in? If so it waits there until `OffersTaken` names it, or
    `OfferWithdrawn`. Its `arrival` is when it was read."""

    request: Request


class OfferRepeated(Message, frozen=True, gc=False):
    """A front end has read one more request like an offer that was refused. `RefusedAgain` answers where it is refused
    too; nothing where it has to be offered. Beyond the peak most are refused, and this is cheaper than an offer.
    """

    refused: RequestId


class RefusedAgain(Message, frozen=True, gc=False):
    """The request that was like a refused offer is refused for the same reason, and counted."""


class OfferWithdrawn(Message, frozen=True, gc=False):
    """A request that was offered will not come in. `cancelled`: its client went away, and it is counted so."""

    request_id: RequestId
    cancelled: bool = False


class FrontTurned(Message, frozen=True, gc=False):
    """The front end could take some of those that it offered. `load` is the share of the last while that its thread
    worked, in [0, 1]; `after_pause`: it has waited as long as it was asked to."""

    load: float
    after_pause: bool = False


class RequestCancelled(Message, frozen=True, gc=False):
    """The client went away or asked to stop. `stopping`: the engine ends; who has an answer gets it."""

    request_id: RequestId
    stopping: bool = False


class BatchReported(Message, frozen=True, gc=False):
    """A server's word that these tasks ran, at `width` (which may be wider than requested).

    `not_finite` are those of them whose output is NaN or infinite somewhere, told of the last segment. So are
    `margins`, of each of `tasks`, where items may run again; empty otherwise.
    """

    server: ServerName
    incarnation: int
    batch_id: BatchId
    segment: int
    width: Width
    tasks: tuple[TaskId, ...]
    started: Seconds
    finished: Seconds
    energy_j: Joules | None = None
    not_finite: tuple[TaskId, ...] = ()
    margins: tuple[float, ...] = ()


class TasksReturned(Message, frozen=True, gc=False):
    """Tasks that a server gives back unrun. `permanent`: it could not run them at any later time either.

    `activation_lost`: the home no longer holds their activations; a host says so instead of delivering the block.
    """

    server: ServerName
    incarnation: int
    tasks: tuple[TaskId, ...]
    reason: str
    permanent: bool = False
    activation_lost: bool = False


class ServerReported(Message, frozen=True, gc=False):
    report: ServerReport


class ServerJoined(Message, frozen=True, gc=False):
    server: ServerName
    credit_tasks: int
    incarnation: int = 0


class ServerDraining(Message, frozen=True, gc=False):
    """The server will be removed: it gets no new work and finishes what it has."""

    server: ServerName


class ServerLeft(Message, frozen=True, gc=False):
    """The host knows that this life of the server is over (its process died, its machine was lost).

    It is back with the first report of a later incarnation. `removed`: for good; routers no longer see it.
    """

    server: ServerName
    reason: str
    removed: bool = False


class RouterTooSlow(Message, frozen=True, gc=False):
    """The host measured a decision that took longer than allowed."""

    seconds: Seconds


class TimerFired(Message, frozen=True, gc=False):
    pass


# ---- commands of the dispatcher


class SendBlock(Message, frozen=True, gc=False):
    block: Block


class CancelTasks(Message, frozen=True, gc=False):
    """Drop these tasks if they still wait at the server; also the event the server receives."""

    server: ServerName
    tasks: tuple[TaskId, ...]


class Reply(Message, frozen=True, gc=False):
    """The one answer to a request. `retry_after` comes with a rejection that will pass."""

    request_id: RequestId
    outcome: Outcome
    items: tuple[ItemOutcome, ...]
    reason: str = ""
    retry_after: Seconds | None = None


class OffersTaken(Message, frozen=True, gc=False):
    """These requests have come in, as if they had arrived now. If others that were offered wait, the front end turns at
    `turn_at`: in its event loop's next turn, where that is now. None: no others wait."""

    requests: tuple[RequestId, ...]
    turn_at: Seconds | None = None


class BlockFinished(Message, frozen=True, gc=False):
    """All tasks of a block have been reported done or given up: the row that rewards and tables are made of.

    `latency` is eq. 7's L, the mean over its done tasks from entering the global FIFO to the result; `ran` pairs
    each done task's item with the width tuple that really ran so far. `fifo_length` and `completed` are what the
    decision saw; `lost` counts tasks that did not come back.
    """

    block_id: BlockId
    decision: Decision
    segment: int
    previous_width: Width | None
    size: int
    decided_at: Seconds
    finished_at: Seconds
    latency: Seconds
    ran: tuple[tuple[int, tuple[Width, ...]], ...]
    lost: int
    fifo_length: int
    completed: int
    router: str


class RouterFellBack(Message, frozen=True, gc=False):
    """The router's decision was replaced (`raised`: it raised an exception), or it was suspended until `until`."""

    reason: str
    until: Seconds | None = None
    raised: bool = False


class ServerChanged(Message, frozen=True, gc=False):
    """A server was taken out of or back into service; `requeued` tasks went back to the global FIFO."""

    server: ServerName
    up: bool
    reason: str
    requeued: int


class RouteSoon(Message, frozen=True, gc=False):
    """Deliver `RouteNow` once, after the requests that come at the same time: somebody has room for them."""


class WakeAt(Message, frozen=True, gc=False):
    at: Seconds


# ---- events to a server


class BlockArrived(Message, frozen=True, gc=False):
    block: Block


class BatchDone(Message, frozen=True, gc=False):
    batch_id: BatchId
    energy_j: Joules | None = None
    not_finite: tuple[TaskId, ...] = ()
    margins: tuple[float, ...] = ()


class BatchFailed(Message, frozen=True, gc=False):
    """The batch did not run. `out_of_memory` asks for smaller ones from now on."""

    batch_id: BatchId
    reason: str
    out_of_memory: bool = False


class InstanceReady(Message, frozen=True, gc=False):
    instance: InstanceId


class InstanceFailed(Message, frozen=True, gc=False):
    instance: InstanceId
    reason: str


class InstanceUnloaded(Message, frozen=True, gc=False):
    instance: InstanceId


class DeviceSampled(Message, frozen=True, gc=False):
    """A reading of the device, once per telemetry period. None where the device does not say."""

    utilization: float | None
    power_w: Watts | None = None
    energy_j: Joules | None = None
    energy_source: str = "none"


# ---- commands of a server


class StartBatch(Message, frozen=True, gc=False):
    """Run it; answer with `BatchDone` or `BatchFailed`. `build_variant`: the first layers must be built first."""

    batch: Batch
    build_variant: bool = False


class LoadInstance(Message, frozen=True, gc=False):
    """Allocate and warm up; answer with `InstanceReady` or `InstanceFailed`."""

    instance: InstanceId
    segment: int
    width: Width
    reserved: Bytes


class UnloadInstance(Message, frozen=True, gc=False):
    """Move to host memory and free the device's; answer with `InstanceUnloaded`."""

    instance: InstanceId


DispatcherEvent = (
    RequestArrived
    | RouteNow
    | RequestOffered
    | OfferRepeated
    | OfferWithdrawn
    | FrontTurned
    | RequestCancelled
    | BatchReported
    | TasksReturned
    | ServerReported
    | ServerJoined
    | ServerDraining
    | ServerLeft
    | RouterTooSlow
    | TimerFired
)
DispatcherCommand = (
    SendBlock
    | CancelTasks
    | Reply
    | RefusedAgain
    | OffersTaken
    | BlockFinished
    | RouterFellBack
    | ServerChanged
    | RouteSoon
    | WakeAt
)
ServerEvent = (
    BlockArrived
    | CancelTasks
    | BatchDone
    | BatchFailed
    | InstanceReady
    | InstanceFailed
    | InstanceUnloaded
    | DeviceSampled
    | TimerFired
)
FRONT_EVENTS = (RequestOffered, OfferRepeated, OfferWithdrawn, FrontTurned)  # about what waits at a front end, not here
# The host carries the middle three to the dispatcher as they are.
ServerCommand = StartBatch | LoadInstance | UnloadInstance | BatchReported | TasksReturned | ServerReported | WakeAt
