"""Clusters of made-up devices as a router knows them: every number is set by a short rule, so answers fit on paper."""

from collections.abc import Callable, Mapping
from itertools import product

from slim_scheduler.core.profile import Curve, Latency, LatencyTable, Profile
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Width, WidthTuple
from slim_scheduler.core.view import Head, InstanceCount, ServerReport, ServerView, View

Seconds = Callable[[int, Width | None, Width, int], float]
BATCH = 8
WIDTHS = (0.5, 1.0)
SEGMENTS = 2
SHAPE = ModelShape(
    name="made-up",
    segments=SEGMENTS,
    widths=WIDTHS,
    classes=10,
    item_shape=(1, 10, 10),
    input_bytes=100,
    activation_bytes=((200, 400),) * SEGMENTS,
    weight_bytes=((1000, 2000),) * SEGMENTS,
    variant_bytes=((((0,) * 2),) * 1, (((0,) * 2),) * 2),
    workspace_bytes=((0, 0),) * SEGMENTS,
    macs=((((1, 2)),), (((1, 2)),) * 2),
)


class Table:
    """An accuracy prior: 0.6, plus 0.1 for a wide first segment and 0.2 for a wide last one, unless told otherwise."""

    def __init__(self, known: dict[WidthTuple, float] | None = None) -> None:
        self._known = known or {t: 0.6 + 0.1 * (t[0] == 1.0) + 0.2 * (t[1] == 1.0) for t in product(WIDTHS, repeat=2)}

    def top1(self, widths: WidthTuple) -> float:
        return self._known[widths]


def ten_ms_per_item(segment: int, previous: Width | None, width: Width, batch: int) -> float:
    """10 ms per item at full width, half of that at half width, whatever the batch."""
    return 0.010 * width * batch


def server(
    name: str,
    seconds: Seconds = ten_ms_per_item,
    power: Curve = Curve((0.0, 1.0), (100.0, 200.0)),  # noqa: B008  frozen
    curve: Curve = Curve((0.0, 1.0), (1.0, 1.0)),  # noqa: B008
    **changes: object,
) -> ServerFacts:
    """`curve` is the profile's slowdown over utilisation; `changes` are fields of the facts."""
    sizes = tuple(range(1, BATCH + 1))
    rows = tuple(
        Latency(segment, previous, width, tuple(seconds(segment, previous, width, b) for b in sizes))
        for segment in range(SEGMENTS)
        for previous in (WIDTHS if segment else (None,))
        for width in WIDTHS
    )
    profile = Profile(
        device=name,
        model=SHAPE.name,
        source="made up",
        batches=sizes,
        latency_rows=rows,
        load_s=0.05,
        load_bytes_per_s=1e9,
        memory_bytes=1 << 30,
        power=power,
        slowdown=curve,
    )
    fields: dict[str, object] = {
        "name": name,
        "profile": profile,
        "latency": LatencyTable(profile, BATCH),
        "slowdown": 1.0,
        "max_batch": BATCH,
        "concurrency": 1,
        "vram_budget": 1 << 30,
        "link_latency": 0.0,
        "bytes_per_s": 1e9,
    }
    return ServerFacts(**{**fields, **changes})  # type: ignore[arg-type]


def cluster(*servers: ServerFacts, groups: tuple[int, ...] = (1, 2, 4, 8), **changes: object) -> RouterFacts:
    return RouterFacts(SHAPE, groups, {s.name: s for s in servers}, **{"move_activations": False, **changes})  # type: ignore[arg-type]


FACTS_OF_TWO = cluster(server("a"), server("b", lambda *kind: 3 * ten_ms_per_item(*kind)))


def seen(
    name: str,
    pending: dict[tuple[int, Width], int] | None = None,
    loaded: tuple[tuple[int, Width], ...] = tuple(product(range(SEGMENTS), WIDTHS)),
    utilization: float | None = 0.5,
    credit: int = 64,
) -> ServerView:
    """What the dispatcher knows of a server that has all instances loaded and no work, unless told otherwise."""
    view = ServerView(name, credit, 0, 0.0)
    view.pending = dict(pending or {})
    view.outstanding = sum(view.pending.values())
    instances = tuple(InstanceCount(segment, width, 1, 0, 0) for segment, width in loaded)
    view.report = ServerReport(name, 0, 0.0, (0,) * SEGMENTS, 0, 0, 0, 1 << 30, instances, (), utilization=utilization)
    return view


def view(
    *servers: ServerView,
    segment: int = 0,
    previous: Width | None = None,
    waiting: int = 8,
    now: float = 0.0,
    slack: float | None = None,
    age: float = 0.0,
    item_age: float = 0.0,
    home: str | None = None,
    widths: tuple[Width, ...] = WIDTHS,
    completed: int = 0,
) -> View:
    head = Head(segment, previous, home, waiting, age, slack, widths, None, item_age)
    per_segment = [waiting if s == segment else 0 for s in range(SEGMENTS)]
    views = {s.name: s for s in servers}
    received = completed + waiting + sum(s.outstanding for s in servers)
    return View(now, head, waiting, per_segment, completed, views, choices(views), received, received)


def choices(servers: Mapping[str, ServerView], full_too: bool = False) -> dict[str, ServerView]:
    """Whom the dispatcher lets a router choose."""
    return {name: s for name, s in servers.items() if s.available or (full_too and s.in_service)}
