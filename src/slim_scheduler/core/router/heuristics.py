"""The heuristic routers: random (the paper's baseline), round-robin, join-shortest-queue, power of two, cost model.

Each takes a width rule: a fixed width, a tuple with one width per segment, `random`, or the width shares of another
run. All but `random` see only servers with credit and send as large a group as there is.
"""

from collections.abc import Callable, Mapping, Sequence

from numpy.random import Generator

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import choices_of, least_outstanding, server_costs
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Decision, Width, WidthTuple
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
    widths = read_widths(text)
    for width in widths:
        shape.index(width)
    if len(widths) == 1:
        widths *= shape.segments
    if len(widths) != shape.segments:
        raise ConfigError(f"width tuple {text} has {len(widths)} entries; {shape.name} has {shape.segments} segments")
    return widths


def read_widths(text: str) -> WidthTuple:
    """The numbers of `0.25` or `0.25/0.5/0.75/1`, whatever network they are for. Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise ConfigError(f"width {text!r} is neither a width, a tuple such as 0.25/0.5/0.75/1, nor random") from None


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
        self._costs = server_costs(facts)

    def decide(self, view: View, rng: Generator) -> Decision:
        head = view.head
        width = self._width(head, rng)
        known = choices_of(self._costs, view)
        if not known:
            return Decision(least_outstanding(view), width, head.waiting)
        _, name = min((self._costs[server.name].completion(server, head, width), server.name) for server in known)
        return Decision(name, width, min(head.waiting, self._costs[name].server.max_batch))


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
