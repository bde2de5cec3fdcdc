"""A small made-up network and short ways to say what the stories need."""

from numpy.random import default_rng

from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.messages import (
    BatchReported,
    Reply,
    RequestArrived,
    RouteNow,
    RouteSoon,
    SendBlock,
    ServerJoined,
    ServerReported,
)
from slim_scheduler.core.router.base import Router
from slim_scheduler.core.router.heuristics import JoinShortestQueue, width_rule
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Block, Decision, Request, Task, TaskConstraints
from slim_scheduler.core.view import ServerReport, View

WIDTHS = (0.25, 0.5, 0.75, 1.0)
SEGMENTS = 3
WEIGHT = 1000  # bytes of an instance per quarter of width
VARIANT = 100
SHAPE = ModelShape(
    name="made-up",
    segments=SEGMENTS,
    widths=WIDTHS,
    classes=10,
    item_shape=(1, 8, 8),
    input_bytes=256,
    activation_bytes=((64, 128, 192, 256),) * SEGMENTS,
    weight_bytes=((WEIGHT, 2 * WEIGHT, 3 * WEIGHT, 4 * WEIGHT),) * SEGMENTS,
    variant_bytes=(((0,) * 4,) * 4, *(((VARIANT,) * 4,) * 4,) * (SEGMENTS - 1)),
    workspace_bytes=((0,) * 4,) * SEGMENTS,
    macs=(((1, 2, 3, 4),), *(((1, 2, 3, 4),) * 4,) * (SEGMENTS - 1)),
)


class Scripted:
    """A router that does as it is told: always the same decision, or an exception."""

    name = "scripted"
    chooses_full = False

    def __init__(self, decision: Decision | Exception) -> None:
        self.decision = decision

    def decide(self, view: View, rng: object) -> Decision:
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision


def jsq(width: str = "0.5") -> Router:
    return JoinShortestQueue(f"jsq:{width}", width_rule(width, SHAPE))


def dispatcher(
    router: Router | None = None,
    servers: tuple[str, ...] = ("a",),
    credit: int = 8,
    accuracy=None,
    escalation=None,
    calibration=None,
    order=None,
    fallback: Router | None = None,
    **limits,
) -> Dispatcher:
    made = Dispatcher(
        DispatchLimits(**limits),
        SHAPE,
        router or jsq(),
        fallback or jsq(),
        default_rng(0),
        accuracy,
        escalation,
        calibration,
        order,
    )
    for server in servers:
        made.handle(ServerJoined(server, credit), 0.0)
    return made


def request(
    request_id: int,
    items: int = 1,
    at: float = 0.0,
    deadline: float | None = None,
    priority: int = 0,
    confidence_floor: float | None = None,
    anytime: bool = True,
    **constraints,
) -> RequestArrived:
    ids = tuple(range(100 * request_id, 100 * request_id + items))
    asked = TaskConstraints(**constraints) if constraints else None
    return RequestArrived(Request(request_id, ids, at, deadline, priority, asked, confidence_floor, anytime))


def arrive(made: Dispatcher, event: RequestArrived, now: float):
    """A request that comes alone."""
    commands = made.handle(event, now)
    return commands + (made.handle(RouteNow(), now) if RouteSoon() in commands else [])


def report(server: str, at: float, incarnation: int = 0, open_blocks: tuple[int, ...] = ()) -> ServerReported:
    return ServerReported(
        ServerReport(server, incarnation, at, (0,) * SEGMENTS, 0, 0, 0, 1 << 30, (), open_blocks, utilization=0.5)
    )


def task(
    task_id: int,
    segment: int = 0,
    previous_width: float | None = None,
    deadline: float | None = None,
    priority: int = 0,
) -> Task:
    return Task(task_id, task_id, segment, previous_width, None, 0.0, deadline, priority)


def block(
    block_id: int,
    tasks: tuple[Task, ...],
    width: float = 0.5,
    exact: bool = False,
) -> Block:
    first = tasks[0]
    return Block(block_id, "a", first.segment, width, first.previous_width, exact, tasks, 0.0)


def only(commands, kind):
    """All commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def sent(commands) -> list[Block]:
    return [command.block for command in only(commands, SendBlock)]


def replies(commands) -> list[Reply]:
    return only(commands, Reply)


def done(block, at, width=None, server=None, margins=()):
    """The server's word that all of a block ran."""
    tasks = tuple(task.task_id for task in block.tasks)
    ran = width or block.width
    return BatchReported(server or block.server, 0, 1, block.segment, ran, tasks, at - 0.01, at, margins=margins)
