"""The linear program behind `slim frontier` and the router `lp`: what any router can hold on given devices and links.

Variables are rates in items per second: of every choice (a width tuple, or a pair with a threshold), of every (server,
segment, previous width, width, pass), of what stays at its server between two segments, and of the activations there
that second passes go on from. A choice's accuracy belongs to the whole path, its cost only to single steps, so the
steps need not know the path: for three servers and no pairs that is 256 + 156 + 36 variables in place of the 20,736 of
all paths, and milliseconds to solve. Where moving activations costs nothing this is exact; where it does, it may let an
item stay that no single path could let stay, and remains an upper bound. With pairs it is a bound over those that it is
given, whose second passes go on wherever they can: over a narrow link the input may be the cheaper beginning.

Also in favour of the bound: batches are always the most efficient size, memory and queueing are left out, and power is
its lower convex hull over the work done.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from slim_scheduler.core.accuracy import AccuracyPrior
from slim_scheduler.core.errors import InputError
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import seconds_per_item
from slim_scheduler.core.router.escalation import Choice
from slim_scheduler.core.types import Joules, Seconds, ServerName, Watts, Width, WidthTuple

K = TypeVar("K", bound=Hashable)

MOST_TUPLES = 65_536
LOGIT_BYTES = 4  # fp32
MESSAGE_BYTES = 46  # per task and direction: its entry in a message, and its part of the header of a full batch's
CURVE_STEPS = 64  # of utilisation, where work and power are looked at
SLACK = 1e-7  # relative: what a solver may be off by
NOTHING = 1e-5  # of the load: a rate that is left out


class Step(NamedTuple):
    """A segment of an item's way; `again`: of its second pass."""

    segment: int
    previous_width: Width | None
    width: Width
    again: bool = False


Output = tuple[int, Width, ServerName, bool]  # segment and width that made an output, where it lies, for which pass


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A way to carry a load. Rates in items per second; steps and stays that carry nothing are left out.

    `outputs[segment, width, server, again]`: of a segment at that width, those that lie there for the next segment, of
    a first pass or `again`; `stays`: those of them that are read there too (both only where moving activations costs
    something).
    """

    load: float
    accuracy: float
    power: Watts
    work: dict[ServerName, float]
    choices: dict[Choice, float]
    steps: dict[tuple[ServerName, Step], float]
    outputs: dict[Output, float]
    stays: dict[Output, float]

    @property
    def energy_per_item(self) -> Joules:
        return self.power / self.load

    def shares(self) -> dict[int, dict[tuple[ServerName, Width], float]]:
        """Per segment, the share of items by server and width, both passes."""
        shares: dict[int, dict[tuple[ServerName, Width], float]] = {}
        for (server, step), rate in self.steps.items():
            by = shares.setdefault(step.segment, {})
            by[server, step.width] = by.get((server, step.width), 0.0) + rate / self.load
        return shares


def mixed(low: Plan, high: Plan, load: float) -> Plan:
    """A plan for a load between those of two: each for its share of the time, which no limit forbids. It is not the
    best one, but near it, since the best accuracy that a load can have is nearly straight over a short way."""
    part = (load - low.load) / (high.load - low.load)
    right = (1 - part) * low.load * low.accuracy + part * high.load * high.accuracy
    return Plan(
        load=load,
        accuracy=right / load,
        power=(1 - part) * low.power + part * high.power,
        work=_weighted(low.work, high.work, part),
        choices=_weighted(low.choices, high.choices, part),
        steps=_weighted(low.steps, high.steps, part),
        outputs=_weighted(low.outputs, high.outputs, part),
        stays=_weighted(low.stays, high.stays, part),
    )


def _weighted(low: Mapping[K, float], high: Mapping[K, float], part: float) -> dict[K, float]:
    return {key: (1 - part) * low.get(key, 0.0) + part * high.get(key, 0.0) for key in {**low, **high}}


class Prices(msgspec.Struct, frozen=True):
    """What limits are worth at a load: accuracy, summed over items, that one more unit would buy (the program's dual).

    `device`: per second of its work; `into`, `out_of`: per byte to a server and from it. On one shared medium a byte
    is paid for where it arrives.
    """

    device: dict[ServerName, float]
    into: dict[ServerName, float]
    out_of: dict[ServerName, float]


class PlanProgram:
    """The program for one cluster; `rho` is how busy each device and link may be, `links` each link, where that is not
    the same. `pairs` are further choices beside all width tuples; no batch takes longer than `longest`. Raises
    InputError."""

    def __init__(
        self,
        facts: RouterFacts,
        accuracy: AccuracyPrior,
        rho: float = 1.0,
        pairs: Sequence[Choice] = (),
        longest: Seconds = math.inf,
        links: float | None = None,
    ) -> None:
        shape = facts.shape
        if not 0 < rho <= 1:
            raise InputError(f"rho is {rho:g}; it must be above 0 and at most 1")
        if len(shape.widths) ** shape.segments > MOST_TUPLES:
            raise InputError(
                f"{shape.name} has {len(shape.widths)} widths in {shape.segments} segments; the bound takes at most "
                f"{MOST_TUPLES} width tuples"
            )
        self._facts = facts
        self._rho = rho
        self._links = rho if links is None else links
        tuples = product(shape.widths, repeat=shape.segments)
        self._choices = [*(Choice(widths, accuracy.top1(widths)) for widths in tuples), *pairs]
        self._accuracy = np.array([choice.accuracy for choice in self._choices])
        self._names = list(facts.servers)
        self._steps = [
            Step(segment, previous, width, again)
            for again in ((False, True) if pairs else (False,))
            for segment in range(shape.segments)
            for previous in (shape.widths if segment else (None,))
            for width in shape.widths
        ]
        self._places = [(name, step) for name in self._names for step in self._steps]
        self._stays: list[Output] = [
            (segment, width, name, again)
            for again in ((False, True) if pairs else (False,))
            for segment in range(shape.segments - 1)
            for width in shape.widths
            for name in self._names
            if facts.move_activations
        ]
        # Columns: choices, places, stays, what second passes go on from, each server's power, the busiest device, load.
        self._first_place = len(self._choices)
        first_stay = self._first_place + len(self._places)
        self._stay = {key: first_stay + i for i, key in enumerate(self._stays)}
        first_kept = first_stay + len(self._stays)
        self._kept = {key: first_kept + i for i, key in enumerate(key for key in self._stays if key[-1])}
        self._first_power = first_kept + len(self._kept)
        self._busiest = self._first_power + len(self._names)
        self._load = self._busiest + 1
        self._columns = self._load + 1
        self._place = {place: self._first_place + i for i, place in enumerate(self._places)}
        seconds = {(n, step): seconds_per_item(facts.servers[n], *step[:3], longest) for n, step in self._places}
        self._never = [self._place[place] for place, taken in seconds.items() if taken == math.inf]
        self._seconds = {place: 0.0 if taken == math.inf else taken for place, taken in seconds.items()}
        self._equalities = _Rows(self._columns)
        self._limits = _Rows(self._columns)
        self._rows: dict[tuple[str, ServerName], int] = {}  # of the limits that have a price
        self._conserve()
        self._conserve_kept()
        self._limit_devices()
        self._limit_links()
        # The last limit is on accuracy: sum of (least - accuracy) * rate <= 0, for the least accuracy asked for.
        self._assembled: tuple[Any, Any, Any, Any] | None = None

    # ---- questions

    def max_load(self) -> float:
        """The highest load that can be carried at all, at whatever accuracy."""
        objective = np.zeros(self._columns)
        objective[self._load] = -1.0
        solution = self._solve(objective, None)
        assert solution is not None, "a load of 0 can be carried"
        return float(solution[self._load])

    def most_accurate(self, load: float) -> Plan | None:
        """The highest mean accuracy at a load, at the least power that allows it. None: the load cannot be carried."""
        solution = self._solve(self._errors(load), load)
        if solution is None:
            return None
        best = self._plan(solution)
        return self.least_power(load, best.accuracy * (1 - SLACK)) or best

    def least_power(self, load: float, accuracy: float) -> Plan | None:
        """The least power at which a load is carried at a mean accuracy of at least `accuracy`. None: cannot be."""
        objective = np.zeros(self._columns)
        objective[self._first_power : self._busiest] = 1.0
        solution = self._solve(objective, load, accuracy)
        return None if solution is None else self._plan(solution)

    def most_even(self, load: float) -> Plan | None:
        """The highest mean accuracy at a load, with as little as possible on the busiest device. None: cannot be."""
        solution = self._solve(self._errors(load), load)
        if solution is None:
            return None
        accuracy = self._plan(solution).accuracy * (1 - SLACK)
        objective = np.zeros(self._columns)
        objective[self._busiest] = 1.0
        even = self._solve(objective, load, accuracy)
        return self._plan(solution if even is None else even)

    def prices(self, load: float) -> Prices | None:
        """What device time and links are worth at a load. None: the load cannot be carried."""
        solved = self._solved(self._errors(load), load)
        if not solved.success:
            return None
        marginals = solved.ineqlin.marginals  # of the objective, which is the mean error per item
        worth = {key: max(0.0, -load * float(marginals[row])) for key, row in self._rows.items()}
        return Prices(
            *({name: worth.get((kind, name), 0.0) for name in self._names} for kind in ("device", "into", "out of"))
        )

    def _errors(self, load: float) -> Any:
        objective = np.zeros(self._columns)
        objective[: len(self._choices)] = (1 - self._accuracy) / load
        return objective

    # ---- constraints

    def _conserve(self) -> None:
        """All choices make the load; those that take a step are the items that take it somewhere."""
        self._equalities.add([(i, 1.0) for i in range(len(self._choices))] + [(self._load, -1.0)], 0.0)
        takers: dict[Step, list[tuple[int, float]]] = {step: [] for step in self._steps}
        for i, choice in enumerate(self._choices):
            for step in steps_of(choice.first):
                takers[step].append((i, 1.0))
            for step in steps_of(choice.second or (), again=True)[choice.shared :]:
                takers[step].append((i, choice.again))
        for step in self._steps:
            served = [(self._place[name, step], -1.0) for name in self._names]
            self._equalities.add(takers[step] + served, 0.0)

    def _conserve_kept(self) -> None:
        """What second passes go on from lies where first passes made it."""
        takers: dict[tuple[int, Width], list[tuple[int, float]]] = {}
        for i, choice in enumerate(self._choices):
            if choice.shared:
                made = (choice.shared - 1, choice.first[choice.shared - 1])
                takers.setdefault(made, []).append((i, choice.again))
        for (segment, width, name, _), column in self._kept.items():
            made_there = [(j, -1.0) for j in self._made(segment, width, name, again=False)]
            self._limits.add([(column, 1.0), *made_there], 0.0)
        for made in dict.fromkeys(key[:2] for key in self._kept):
            kept = [(self._kept[*made, name, True], -1.0) for name in self._names]
            self._equalities.add(takers.get(made, []) + kept, 0.0)

    def _made(self, segment: int, width: Width, name: ServerName, again: bool) -> list[int]:
        """Columns of the steps of a pass that make such an output at a server."""
        steps = [step for step in self._steps if (step.segment, step.width, step.again) == (segment, width, again)]
        return [self._place[name, step] for step in steps]

    def _outputs(self, output: Output) -> list[int]:
        """Columns that make up the outputs that lie somewhere for a pass."""
        return self._made(*output) + ([self._kept[output]] if output in self._kept else [])

    def _read(self, output: Output) -> list[int]:
        """Columns of the steps of that pass that read such outputs at their server, wherever they lay."""
        segment, width, name, again = output
        steps = [s for s in self._steps if (s.segment, s.previous_width, s.again) == (segment + 1, width, again)]
        return [self._place[name, step] for step in steps]

    def _limit_devices(self) -> None:
        for i, name in enumerate(self._names):
            work = [(self._place[name, step], self._seconds[name, step]) for step in self._steps]
            most, lines = work_and_power(self._facts.servers[name], self._rho)
            self._rows["device", name] = self._limits.add(work, most)
            self._limits.add([(j, s / most) for j, s in work] + [(self._busiest, -1.0)], 0.0)
            for slope, watts in lines:  # power >= slope * work + watts
                self._limits.add([(j, slope * s) for j, s in work] + [(self._first_power + i, -1.0)], -watts)

    def _limit_links(self) -> None:
        facts, shape = self._facts, self._facts.shape
        shared: list[tuple[int, float]] = []
        for name in self._names:
            last = shape.segments - 1
            first_bytes = {0: shape.input_bytes}  # beside the message, by segment: to the server and from it
            last_bytes = {last: shape.classes * LOGIT_BYTES}
            down = [(self._place[name, s], MESSAGE_BYTES + first_bytes.get(s.segment, 0.0)) for s in self._steps]
            up = [(self._place[name, s], MESSAGE_BYTES + last_bytes.get(s.segment, 0.0)) for s in self._steps]
            moved_in: list[tuple[int, float]] = []
            for output in [key for key in self._stays if key[2] == name]:
                size = float(shape.activation(*output[:2]))
                column, made, read = self._stay[output], self._outputs(output), self._read(output)
                for ends in (made, read):
                    self._limits.add([(column, 1.0)] + [(j, -1.0) for j in ends], 0.0)
                up += [(j, size) for j in made] + [(column, -size)]
                moved_in += [(j, size) for j in read] + [(column, -size)]
            limit = self._links * facts.servers[name].bytes_per_s
            if facts.shared_link:  # a move crosses the one medium once: counted where it leaves
                shared += down + up
            else:
                self._rows["into", name] = self._limits.add(down + moved_in, limit)
                self._rows["out of", name] = self._limits.add(up, limit)
        if shared:
            row = self._limits.add(shared, self._links * min(s.bytes_per_s for s in facts.servers.values()))
            self._rows |= {("into", name): row for name in self._names}

    # ---- solving

    def _solve(self, objective: Any, load: float | None, accuracy: float = 0.0) -> Any:
        solved = self._solved(objective, load, accuracy)
        return solved.x if solved.success else None

    def _solved(self, objective: Any, load: float | None, accuracy: float = 0.0) -> Any:
        from scipy.optimize import linprog  # 0.2 s to import, and only this needs it
        from scipy.sparse import csr_array, vstack

        if self._assembled is None:
            self._assembled = (*self._equalities.matrix(), *self._limits.matrix())
        equal, equal_to, limited, limits = self._assembled
        floor = np.zeros(self._columns)
        floor[: len(self._choices)] = accuracy - self._accuracy
        bounds = np.zeros((self._columns, 2))
        bounds[:, 1] = np.inf
        bounds[self._never] = 0.0
        if load is not None:
            bounds[self._load] = load
        return linprog(
            objective,
            A_ub=vstack([limited, csr_array(floor[None])]),
            b_ub=np.append(limits, 0.0),
            A_eq=equal,
            b_eq=equal_to,
            bounds=bounds,
            method="highs",
        )

    def _plan(self, x: Any) -> Plan:
        load = float(x[self._load])
        least = NOTHING * load
        choices = {choice: float(x[i]) for i, choice in enumerate(self._choices) if x[i] > least}
        steps = {place: float(x[j]) for place, j in self._place.items() if x[j] > least}
        work = dict.fromkeys(self._names, 0.0)
        for (name, step), rate in steps.items():
            work[name] += rate * self._seconds[name, step]
        # Staying is never worse than moving, so as much stays as lies and is read in one place.
        outputs = {key: float(x[self._outputs(key)].sum()) for key in self._stays}
        stays = {key: min(rate, float(x[self._read(key)].sum())) for key, rate in outputs.items()}
        return Plan(
            load=load,
            accuracy=float(self._accuracy @ x[: len(self._choices)]) / load,
            power=float(x[self._first_power : self._busiest].sum()),
            work=work,
            choices=choices,
            steps=steps,
            outputs={key: rate for key, rate in outputs.items() if rate > least},
            stays={key: rate for key, rate in stays.items() if rate > least},
        )


def steps_of(widths: WidthTuple, again: bool = False) -> list[Step]:
    """The steps of an item's way at a width tuple."""
    before: tuple[Width | None, ...] = (None, *widths)
    return [Step(segment, before[segment], width, again) for segment, width in enumerate(widths)]


class _Rows:
    """Sparse rows of a constraint matrix with their right sides."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self._right: list[float] = []

    def add(self, entries: Sequence[tuple[int, float]], right: float) -> int:
        """Returns the row's number."""
        for column, value in entries:
            self._row.append(len(self._right))
            self._column.append(column)
            self._value.append(value)
        self._right.append(right)
        return len(self._right) - 1

    def matrix(self) -> tuple[Any, Any]:
        from scipy.sparse import csr_array

        shape = (len(self._right), self._columns)
        return csr_array((self._value, (self._row, self._column)), shape=shape), np.array(self._right)


def work_and_power(server: ServerFacts, rho: float) -> tuple[float, list[tuple[float, float]]]:
    """The most work per second at utilisation up to rho, and the lines (slope, watts at 0) that power stays above.

    A device that is busy for a share u of the time does u / slowdown(u) seconds of work as if it were at rest.
    """
    profile = server.profile
    busy = sorted({*np.linspace(0.0, rho, CURVE_STEPS + 1).tolist(), *(x for x in profile.slowdown.x if 0 <= x <= rho)})
    points = [(u / profile.slowdown(u), profile.power(u)) for u in busy]
    most = max(points)[0]
    hull: list[tuple[float, float]] = []
    for point in sorted(points):
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        if hull and point[0] - hull[-1][0] < 1e-12:
            continue  # the same work at more power
        hull.append(point)
    lines = [((y1 - y0) / (x1 - x0), x0, y0) for (x0, y0), (x1, y1) in pairwise(hull)]
    return most, _simplified([(slope, y - slope * x) for slope, x, y in lines])


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _simplified(lines: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without lines that are the same but for rounding."""
    kept: list[tuple[float, float]] = []
    for slope, watts in lines:
        if not kept or abs(slope - kept[-1][0]) > 1e-6 * max(1.0, abs(slope)):
            kept.append((slope, watts))
    return kept
