"""Which servers a recorded load needs: what `slim plan` prints. It asks the bound for sets of servers.

A set is enough when it keeps up with the trace's fastest stretch and the linear program holds the wanted accuracy,
averaged over the trace. Both are bounds: no router does better, so a set that is not enough here is not enough at all,
while one that is enough still needs a router that comes near the bound.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.plan.program import SLACK, PlanProgram
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, ServerName, Watts
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import router_facts

Times = NDArray[np.float64]  # (requests,), ascending

WINDOW: Seconds = 1.0  # what arrives in it may be spread over it; longer for a long SLO
SLOS_PER_WINDOW = 10
LEVELS = 12  # windows of about one load are asked for together
PRECISION = 1e-4  # of the peak, relative
FLOOR_STEPS = 10  # halvings of the accuracy that windows are asked for


class Level(msgspec.Struct, frozen=True):
    """Windows of about one load: so many items, at so many per second on the mean."""

    items: int
    load: float


class TraceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace asks for. `peak`: the least steady rate, items per second, at which no item waits beyond the SLO."""

    items: int
    seconds: Seconds
    slo: Seconds
    peak: float
    levels: tuple[Level, ...]

    @property
    def mean(self) -> float:
        return self.items / self.seconds


class ServerSet(msgspec.Struct, frozen=True, kw_only=True):
    """The bound of some servers for a trace. `max_load` in items per second.

    `accuracy` and `power` are of the most accurate plans, `least_power` of plans that hold the wanted accuracy; each a
    mean over the trace, None where it cannot be.
    """

    servers: tuple[ServerName, ...]
    max_load: float
    accuracy: float | None
    power: Watts | None
    least_power: Watts | None

    @property
    def enough(self) -> bool:
        return self.least_power is not None


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `needed` is None where `everything`, the set of all servers, is not enough.

    `without`: the needed set without each of its servers; `further`: with each of the others.
    """

    load: TraceLoad
    accuracy: float
    rho: float
    everything: ServerSet
    needed: ServerSet | None
    without: dict[ServerName, ServerSet]
    further: dict[ServerName, ServerSet]


def trace_load(times: Times, slo: Seconds, items_per_request: int = 1) -> TraceLoad:
    """What a trace asks for under an SLO. Raises ConfigError for an SLO that is not above 0."""
    if not 0 < slo < math.inf:
        raise ConfigError(f"the SLO is {1e3 * slo:g} ms; it must be above 0 and finite")
    items = len(times) * items_per_request
    span = float(times[-1] - times[0])
    window = max(WINDOW, SLOS_PER_WINDOW * slo)
    windows = max(1, math.ceil(span / window))
    width = max(span / windows, window if windows == 1 else 0.0)
    starts = np.minimum(((times - times[0]) / width).astype(np.int64), windows - 1)
    counts = np.bincount(starts, minlength=windows) * items_per_request
    return TraceLoad(
        items=items,
        seconds=width * windows,
        slo=slo,
        peak=_peak(times, slo, items_per_request),
        levels=_levels(counts, width + slo),
    )


def _peak(times: Times, slo: Seconds, size: int) -> float:
    """The least rate at which a queue served steadily answers every item within the SLO, by bisection.

    The last item of request i is done at the latest over all j <= i of `times[j] + (i - j + 1) * size / rate`.
    """
    place = np.arange(len(times)) * size

    def keeps_up(rate: float) -> bool:
        begun = np.maximum.accumulate(times - place / rate)
        return bool((begun + (place + size) / rate - times).max() <= slo)

    low, high = 0.0, len(times) * size / slo
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if keeps_up(middle) else (middle, high)
    return high


def _levels(counts: NDArray[np.int64], seconds: Seconds) -> tuple[Level, ...]:
    """Windows sorted by load, in `LEVELS` parts. `seconds`: until when a window's items may be done.

    A part is asked for at its mean load. What the program can hold is concave in the load, so this favours the bound.
    """
    busy = np.sort(counts[counts > 0])
    parts = [part for part in np.array_split(busy, LEVELS) if len(part)]
    return tuple(Level(int(part.sum()), float(part.mean() / seconds)) for part in parts)


class _Sizes:
    """Sets of servers of one cluster, each asked for once."""

    def __init__(self, facts: RouterFacts, table: AccuracyTable, load: TraceLoad, accuracy: float, rho: float) -> None:
        self._facts, self._table, self._load = facts, table, load
        self._accuracy, self._rho = accuracy, rho
        self._known: dict[tuple[ServerName, ...], ServerSet] = {}

    def of(self, names: Sequence[ServerName]) -> ServerSet:
        names = tuple(names)
        if names not in self._known:
            self._known[names] = self._ask(names)
        return self._known[names]

    def _ask(self, names: tuple[ServerName, ...]) -> ServerSet:
        if not names:
            return ServerSet(servers=names, max_load=0.0, accuracy=None, power=None, least_power=None)
        servers = {name: self._facts.servers[name] for name in names}
        facts = msgspec.structs.replace(self._facts, servers=servers)
        program = PlanProgram(facts, self._table, self._rho, longest=self._load.slo)
        most = program.max_load()
        if most < self._load.peak * (1 - PRECISION):
            return ServerSet(servers=names, max_load=most, accuracy=None, power=None, least_power=None)
        # Where a level is within rounding of the highest load, the solver may refuse it.
        plans = [(level, program.most_accurate(min(level.load, most * (1 - PRECISION)))) for level in self._load.levels]
        best = [(level, plan.accuracy, plan.power) for level, plan in plans if plan is not None]
        assert len(best) == len(plans), "no window is above the peak"
        accuracy = _mean([(level.items, reached) for level, reached, _ in best])
        power = _over_time(self._load, [(level, watts) for level, _, watts in best], self._idle(names))
        least = None
        wanted = self._accuracy * (1 - 10 * SLACK)  # plans are the solver's, to rounding
        if accuracy >= wanted:
            floor = _floor([(level.items, reached) for level, reached, _ in best], wanted)
            watts = []
            for level, reached, at_best in best:
                plan = program.least_power(min(level.load, most * (1 - PRECISION)), min(floor, reached * (1 - 1e-6)))
                watts.append((level, at_best if plan is None else plan.power))
            least = _over_time(self._load, watts, self._idle(names))
        return ServerSet(servers=names, max_load=most, accuracy=accuracy, power=power, least_power=least)

    def _idle(self, names: Sequence[ServerName]) -> Watts:
        return sum(self._facts.servers[name].profile.power(0.0) for name in names)


def check_accuracy(accuracy: float) -> None:
    """Raises ConfigError."""
    if not 0 <= accuracy <= 1:
        raise ConfigError(f"accuracy is {accuracy:g}; it must be from 0 to 1, such as 0.72 for 72 %")


def size(
    config: Config,
    shape: ModelShape,
    profiles: dict[ServerName, Profile],
    table: AccuracyTable,
    load: TraceLoad,
    accuracy: float,
    *,
    rho: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sizing:
    """Which servers a load needs at a mean accuracy (0 to 1), every device at most `rho` busy.

    Servers are left out one by one, each time the one without which the rest takes the least power, for as long as the
    rest is enough: none of those that remain can be left out. Raises ConfigError for an accuracy outside 0 to 1.
    """
    check_accuracy(accuracy)
    sizes = _Sizes(router_facts(config, shape, profiles), table, load, accuracy, rho)
    names = [server.name for server in config.servers]
    everything = sizes.of(names)
    needed = everything if everything.enough else None
    while needed is not None:
        progress(len(names) - len(needed.servers), len(names))
        fewer = [sizes.of(_without(needed.servers, name)) for name in reversed(needed.servers)]
        enough = [rest for rest in fewer if rest.least_power is not None]
        if not enough:
            break
        needed = min(enough, key=lambda rest: rest.least_power or 0.0)
    kept = () if needed is None else needed.servers
    return Sizing(
        load=load,
        accuracy=accuracy,
        rho=rho,
        everything=everything,
        needed=needed,
        without={name: sizes.of(_without(kept, name)) for name in kept},
        further={
            name: sizes.of([other for other in names if other in kept or other == name])
            for name in (names if needed is not None else ())
            if name not in kept
        },
    )


def _without(names: Sequence[ServerName], one: ServerName) -> tuple[ServerName, ...]:
    return tuple(name for name in names if name != one)


def _mean(weighed: Sequence[tuple[int, float]]) -> float:
    return sum(items * value for items, value in weighed) / sum(items for items, _ in weighed)


def _floor(best: Sequence[tuple[int, float]], accuracy: float) -> float:
    """The least accuracy to ask of every window so that the mean is `accuracy`, where some windows reach less."""

    def mean_at(floor: float) -> float:
        return _mean([(items, min(floor, reached)) for items, reached in best])

    low, high = accuracy, max(reached for _, reached in best)
    if mean_at(low) >= accuracy:
        return low
    for _ in range(FLOOR_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if mean_at(middle) >= accuracy else (middle, high)
    return high


def _over_time(load: TraceLoad, watts: Sequence[tuple[Level, Watts]], idle: Watts) -> Watts:
    """Mean power over the trace: in windows with work by their level, at rest in the others."""
    busy = [(level.items / level.load, power) for level, power in watts]
    working = sum(seconds for seconds, _ in busy)
    rest = max(0.0, load.seconds - working)
    return (sum(seconds * power for seconds, power in busy) + rest * idle) / (working + rest)
