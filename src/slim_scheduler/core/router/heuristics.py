"""The heuristic routers: random (the paper's baseline), round-robin, join-shortest-queue, power of two, cost model.

Each takes a width rule: a fixed width, a tuple with one width per segment, `random`, or the width shares of another
run. All but `random` see only servers with credit and send as large a group as there is.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from numpy.random import Generator

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import transfer_time
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Decision, Seconds, ServerName, Width, WidthTuple
from slim_scheduler.core.view import Head, ServerView, View

WidthRule = Callable[[Head, Generator], Width]


def width_rule(text: str, shape: ModelShape) -> WidthRule:
    """`0.25`, `0.25/0.5/0.75/1` or `random`. Raises ConfigError, InputError for what is not served."""
    if text == "random":
        return lambda head, rng: head.widths[int(rng.integers(len(head.widths)))]
    widths = width_tuple(text, shape)
    return lambda head, rng: allowed(widths[head.segment], head.widths)


def width_tuple(text: str, shape: ModelShape) -> WidthTuple:
    """`0.25` or `0.25/0.5/0.75/1`, one width per segment. Raises ConfigError, InputError for what is not served."""
    try:
        widths = tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise ConfigError(f"width {text!r} is neither a width, a tuple such as 0.25/0.5/0.75/1, nor random") from None
    for width in widths:
        shape.index(width)
    if len(widths) == 1:
        widths *= shape.segments
    if len(widths) != shape.segments:
        raise ConfigError(f"width tuple {text} has {len(widths)} entries; {shape.name} has {shape.segments} segments")
    return widths


def width_shares(shares: Mapping[int, Mapping[Width, float]]) -> WidthRule:
    """Draws each segment's width with the shares that another run used."""
    tables = {s: (tuple(by), _cumulative(tuple(by.values()))) for s, by in shares.items()}

    def draw(head: Head, rng: Generator) -> Width:
        widths, cumulative = tables[head.segment]
        at = rng.random() * cumulative[-1]
        chosen = next(w for w, edge in zip(widths, cumulative, strict=True) if at < edge)
        return allowed(chosen, head.widths)

    return draw


def allowed(width: Width, widths: Sequence[Width]) -> Width:
    """The narrowest allowed width that is at least `width`, else the widest allowed."""
    return next((w for w in widths if w >= width), widths[-1])


class RandomRouter:
    """Server, width and group drawn uniformly; a full server holds the head (the paper's)."""

    chooses_full = True

    def __init__(self, groups: Sequence[int]) -> None:
        self.name = "random"
        self._groups = tuple(groups)

    def decide(self, view: View, rng: Generator) -> Decision:
        up = list(view.choices)
        widths, groups = view.head.widths, self._groups
        a, b, c = rng.random(3).tolist()  # one draw for all three: a third of the generator's overhead
        return Decision(up[int(a * len(up))], widths[int(b * len(widths))], groups[int(c * len(groups))])


class RoundRobin:
    """The next server in turn that has credit."""

    chooses_full = False

    def __init__(self, name: str, width: WidthRule) -> None:
        self.name = name
        self._width = width
        self._turn = -1

    def decide(self, view: View, rng: Generator) -> Decision:
        servers = list(view.servers.values())
        for _ in servers:
            self._turn = (self._turn + 1) % len(servers)
            if servers[self._turn].name in view.choices:
                break
        return Decision(servers[self._turn].name, self._width(view.head, rng), view.head.waiting)


class JoinShortestQueue:
    """The server with the fewest tasks sent and not yet done; ties are drawn."""

    chooses_full = False

    def __init__(self, name: str, width: WidthRule) -> None:
        self.name = name
        self._width = width

    def decide(self, view: View, rng: Generator) -> Decision:
        server = _shortest(list(view.choices.values()), rng)
        return Decision(server.name, self._width(view.head, rng), view.head.waiting)


class PowerOfTwo:
    """The shorter queue of two servers drawn at random."""

    chooses_full = False

    def __init__(self, name: str, width: WidthRule) -> None:
        self.name = name
        self._width = width

    def decide(self, view: View, rng: Generator) -> Decision:
        servers = list(view.choices.values())
        drawn = [servers[i] for i in rng.choice(len(servers), size=min(2, len(servers)), replace=False).tolist()]
        return Decision(_shortest(drawn, rng).name, self._width(view.head, rng), view.head.waiting)


class CostModel:
    """The server where the block is predicted to be done first: queue, instance load and link included."""

    chooses_full = False

    def __init__(self, name: str, width: WidthRule, facts: RouterFacts) -> None:
        self.name = name
        self._width = width
        self._costs = {server.name: ServerCost(server, facts) for server in facts.servers.values()}

    def decide(self, view: View, rng: Generator) -> Decision:
        head = view.head
        width = self._width(head, rng)
        known = choices_of(self._costs, view)
        if not known:
            return Decision(_shortest(list(view.choices.values()), rng).name, width, head.waiting)
        _, name = min((self._costs[server.name].completion(server, head, width), server.name) for server in known)
        return Decision(name, width, min(head.waiting, self._costs[name].facts.max_batch))


class ServerCost:
    """Predicted seconds of one server from its profile and what is known of its queue."""

    def __init__(self, facts: ServerFacts, router: RouterFacts) -> None:
        self.facts = facts
        self._cluster = router
        shape = router.shape
        batch = facts.max_batch
        # An item's share of a full batch, averaged over previous widths: what queued work is worth.
        self._share: dict[tuple[int, Width], Seconds] = {}
        self._load: dict[tuple[int, Width], Seconds] = {}
        for segment in range(shape.segments):
            previous = shape.widths if segment else (None,)
            for width in shape.widths:
                whole = [facts.latency.seconds(segment, p, width, batch) for p in previous]
                self._share[segment, width] = facts.slowdown * sum(whole) / len(whole) / batch
                size = shape.instance_bytes(segment, width, batch)
                self._load[segment, width] = facts.profile.load_time(size)

    def backlog(self, server: ServerView) -> Seconds:
        """Seconds of work sent and not yet done."""
        return sum([count * self._share[kind] for kind, count in server.pending.items()])

    def completion(self, server: ServerView, head: Head, width: Width) -> Seconds:
        """Seconds until a block of all waiting tasks, as many as fit, would be back."""
        facts = self.facts
        count = server.takes(min(head.waiting, facts.max_batch))
        run = facts.slowdown * facts.latency.seconds(head.segment, head.previous_width, width, count)
        return self.backlog(server) + run + self.load_time(server, head.segment, width) + self.transfer(head, count)

    def load_time(self, server: ServerView, segment: int, width: Width) -> Seconds:
        """Zero where an instance that fits is known to be loaded."""
        report = server.report
        if report is not None and any(i.segment == segment and i.width >= width for i in report.instances):
            return 0.0
        return self._load[segment, width]

    def transfer(self, head: Head, count: int) -> Seconds:
        """Link time of a block."""
        return transfer_time(self._cluster, head, self.facts, count)


def choices_of(names: Container[ServerName], view: View) -> list[ServerView]:
    """Servers that may be chosen and whose profile is known; one that joined after the run began has none."""
    return [server for name, server in view.choices.items() if name in names]


def _shortest(servers: Sequence[ServerView], rng: Generator) -> ServerView:
    least = min([server.outstanding for server in servers])
    ties = [server for server in servers if server.outstanding == least]
    return ties[0] if len(ties) == 1 else ties[int(rng.integers(len(ties)))]


def _cumulative(values: Sequence[float]) -> list[float]:
    total, edges = 0.0, []
    for value in values:
        total += value
        edges.append(total)
    return edges
