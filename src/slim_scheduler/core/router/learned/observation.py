"""What a learned router sees of a view: the one encoder of training and live, in NumPy alone.

`paper` is eq. 1's state for a fixed number of servers. `extended` adds what a good decision needs, as one row per
server and one vector shared by all, so that a policy can score any number of servers in any order. A figure that nobody
has reported is marked unknown, which is not zero.
"""

from math import log1p
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.errors import RouterError
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import ServerCost, cluster_capacity
from slim_scheduler.core.router.learned.layout import Layout, layout_of
from slim_scheduler.core.types import Decision, Seconds, Width
from slim_scheduler.core.view import Head, ServerReport, ServerView, View

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

UNKNOWN = -1.0  # eq. 1 has no place for a flag; no queue, power or utilisation is negative
RATE_WINDOW: Seconds = 0.5  # as long as a device's utilisation looks back
RATE_MEMORY = 0.5  # weight of the windows before
OLDEST: Seconds = 2.0  # telemetry older than this is all the same
# Divisors of log1p that bring the usual range of a count to about [0, 1].
COUNT_SCALE = 5.0  # queues: 150 tasks
TOTAL_SCALE = 8.0  # the global FIFO: 3,000 tasks
COMPLETED_SCALE = 14.0  # items since the start: a million
TIME_SCALE = 3.0  # times, in units of a full batch's: 20 batches


class Observation(NamedTuple):
    """Features and what may be chosen. `paper` has everything in `shared`, and rows of no features."""

    shared: Floats  # (shared,)
    servers: Floats  # (N, features)
    server_mask: Flags  # (N,)
    width_mask: Flags  # (W,)
    group_mask: Flags  # (G,)


class Encoder(Protocol):
    """`names` are the servers in the order of the rows, which is the order of the choices; `layout` names the columns.
    Each decision about a view must be told (`took`)."""

    names: tuple[str, ...]
    layout: Layout

    def encode(self, view: View) -> Observation: ...

    def took(self, view: View, decision: Decision) -> None: ...


class Figures(NamedTuple):
    """An observation before it is arrays: encoders that see more add columns at the end."""

    shared: list[float]
    servers: list[list[float]]
    server_mask: list[bool]
    width_mask: Flags
    group_mask: Flags


def observation(figures: Figures) -> Observation:
    """The same figures as arrays."""
    shared, servers, available, widths, groups = figures
    return Observation(np.array(shared, np.float32), np.array(servers, np.float32), np.array(available), widths, groups)


class _Choices:
    """Masks of what may be chosen. They are few and shared: nobody may change them."""

    def __init__(self, facts: RouterFacts) -> None:
        self.widths = facts.shape.widths
        self.groups = facts.groups
        self._width_masks: dict[tuple[Width, ...], Flags] = {}
        self._group_masks = [np.arange(len(facts.groups)) <= last for last in range(len(facts.groups))]
        self.all_groups = self._group_masks[-1]

    def of_widths(self, allowed: tuple[Width, ...]) -> Flags:
        mask = self._width_masks.get(allowed)
        if mask is None:
            mask = self._width_masks[allowed] = np.array([width in allowed for width in self.widths])
        return mask

    def of_groups(self, waiting: int) -> Flags:
        """Groups up to the first that takes all who wait: larger ones would be the same choice again."""
        last = next((i for i, group in enumerate(self.groups) if group >= waiting), len(self.groups) - 1)
        return self._group_masks[last]


class PaperEncoder:
    """Eq. 1: [q_fifo, c_done, (q_i, P_i, U_i) for i = 1..N], normalised."""

    def __init__(self, facts: RouterFacts) -> None:
        self.names = tuple(facts.servers)
        self.layout = layout_of("paper", facts.shape, len(self.names))
        self._choices = _Choices(facts)
        self._no_rows = np.zeros((len(self.names), 0), np.float32)
        self._most_power = {name: max(server.profile.power.y) for name, server in facts.servers.items()}

    def encode(self, view: View) -> Observation:
        servers = view.servers
        if len(servers) != len(self.names):
            raise RouterError(f"this policy knows {len(self.names)} servers, but there are {len(servers)}")
        state = [log1p(view.fifo_length) / TOTAL_SCALE, log1p(view.completed) / COMPLETED_SCALE]
        available = []
        for name in self.names:
            server = servers.get(name)
            if server is None:
                raise RouterError(f"server {name} is configured but unknown; there are {', '.join(servers)}")
            report = server.report
            available.append(name in view.choices)
            if report is None:
                state += (UNKNOWN, UNKNOWN, UNKNOWN)
                continue
            power, utilization = report.power_w, report.utilization
            state += (
                log1p(report.queue_length) / COUNT_SCALE,
                UNKNOWN if power is None else power / self._most_power[name],
                UNKNOWN if utilization is None else utilization,
            )
        choices = self._choices
        return Observation(
            np.array(state, np.float32),
            self._no_rows,
            np.array(available),
            choices.of_widths(view.head.widths),
            choices.all_groups,
        )

    def took(self, view: View, decision: Decision) -> None: ...


class ExtendedEncoder:
    """Everything a good decision needs. It is of one run: it remembers when how many items were complete."""

    def __init__(self, facts: RouterFacts, batch_time: Seconds) -> None:
        shape = facts.shape
        self.names = tuple(facts.servers)
        self._choices = _Choices(facts)
        self._servers = [_ServerEncoder(server, facts, batch_time) for server in facts.servers.values()]
        self._batch_time = batch_time
        self._segments = range(shape.segments)
        self._capacity = cluster_capacity(facts)
        self._prefixes = {
            (segment, previous): [float(s == segment) for s in self._segments]
            + [float(width == previous) for width in shape.widths]
            for segment in self._segments
            for previous in ((None,) if segment == 0 else shape.widths)
        }
        self.layout = layout_of("extended", shape, len(self.names))
        self._absent = [0.0] * self.layout.server.size
        self._window_start: Seconds = float("-inf")
        self._window_completed = 0
        self._rate = 0.0  # items per second, of the cluster's capacity

    def encode(self, view: View) -> Observation:
        return observation(self.figures(view))

    def figures(self, view: View) -> Figures:
        head, views, now = view.head, view.servers, view.now
        self._measure_rate(view)
        time, slack = self._batch_time, head.slack
        shared = [  # as `layout.py` names them
            *self._prefixes[head.segment, head.previous_width],
            log1p(head.waiting) / COUNT_SCALE,
            log1p(head.age / time) / TIME_SCALE,
            0.0 if slack is None else log1p(max(0.0, slack) / time) / TIME_SCALE,
            1.0 if slack is None else 0.0,
            log1p(view.fifo_length) / TOTAL_SCALE,
            self._rate,
            1.0 / len(views),
            *[log1p(count) / TOTAL_SCALE for count in view.fifo_per_segment],
        ]
        rows = []
        available = []
        for server in self._servers:
            seen = views.get(server.name)  # None: it has not joined yet
            available.append(server.name in view.choices)
            rows.append(self._absent.copy() if seen is None else server.row(seen, head, now))
        choices = self._choices
        return Figures(shared, rows, available, choices.of_widths(head.widths), choices.of_groups(head.waiting))

    def took(self, view: View, decision: Decision) -> None:
        self._measure_rate(view)

    def _measure_rate(self, view: View) -> None:
        """The rate of completion so far: how loaded the cluster is, which no single server tells."""
        now, completed = view.now, view.completed
        if now - self._window_start < RATE_WINDOW:
            return
        if self._window_completed or completed:
            rate = (completed - self._window_completed) / (now - self._window_start) / self._capacity
            self._rate = RATE_MEMORY * self._rate + (1 - RATE_MEMORY) * rate
        self._window_start, self._window_completed = now, completed


class _ServerEncoder:
    """One server's row. What follows from a report alone is kept until the next report."""

    def __init__(self, server: ServerFacts, facts: RouterFacts, batch_time: Seconds) -> None:
        shape = facts.shape
        self.name = server.name
        self._facts = server
        self._cost = ServerCost(server, facts)
        self._shape = shape
        self._widths = shape.widths
        self._unit = 1.0 / batch_time
        self._run_figures = {  # [count][width], as the policy sees them
            (segment, p): [[log1p(s * self._unit) / TIME_SCALE for s in row] for row in self._cost.runs(segment, p)]
            for segment in range(shape.segments)
            for p in (shape.widths if segment else (None,))
        }
        powers = [max(s.profile.power.y) for s in facts.servers.values()]
        self._most_power = max(server.profile.power.y)
        self._least_power = min(server.profile.power.y) / self._most_power
        self._power_among = self._most_power / (sum(powers) / len(powers))
        self._nothing = [0.0] * len(shape.widths)
        self._report: ServerReport | None = None
        self._of_report = self._read(None)
        self._loaded: list[list[float] | None] = [None] * shape.segments

    def row(self, server: ServerView, head: Head, now: Seconds) -> list[float]:
        report = server.report
        if report is not self._report:
            self._report = report
            self._of_report = self._read(report)
            self._loaded = [None] * self._shape.segments
        segment = head.segment
        loaded = self._loaded[segment]
        if loaded is None:
            loaded = self._loaded[segment] = self._instances(report, segment)
        unit, pending = self._unit, server.pending
        credit = server.credit
        count = min(head.waiting, self._facts.max_batch, max(1, credit))
        predicted = self._cost.predict(server, head, count)
        return [  # as `layout.py` names them
            1.0 if server.up else 0.0,
            credit / server.credit_tasks,
            log1p(server.outstanding) / COUNT_SCALE,
            log1p(predicted.backlog * unit) / TIME_SCALE,
            1.0 if report is None else min(1.0, max(0.0, now - report.made_at) / OLDEST),
            log1p(predicted.transfer * unit) / TIME_SCALE,
            1.0 if head.home == self.name else 0.0,
            *[log1p(seconds * unit) / TIME_SCALE for seconds in predicted.done],
            *(
                self._run_figures[segment, head.previous_width][count]
                if server.pace == 1.0
                else [log1p(seconds * unit) / TIME_SCALE for seconds in predicted.run]
            ),
            *(
                [log1p(pending.get((segment, width), 0)) / COUNT_SCALE for width in self._widths]
                if pending
                else self._nothing
            ),
            *loaded,
            *self._of_report,
        ]

    def _read(self, report: ServerReport | None) -> list[float]:
        """Figures that change with a report only; first whether there is none, flags after what may be unknown."""
        if report is None:
            return [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, self._power_among] + [0.0] * 2 * self._shape.segments
        power, utilization = report.power_w, report.utilization
        queued = [log1p(count) / COUNT_SCALE for count in report.queue_per_segment]
        any_loaded = [0.0] * self._shape.segments
        for instance in report.instances:
            if instance.free + instance.busy:
                any_loaded[instance.segment] = 1.0
        return [
            0.0,
            0.0 if utilization is None else utilization,
            1.0 if utilization is None else 0.0,
            self._least_power if power is None else power / self._most_power,
            1.0 if power is None else 0.0,
            min(2.0, report.memory_used / self._facts.vram_budget),
            self._power_among,
            *queued,
            *any_loaded,
        ]

    def _instances(self, report: ServerReport | None, segment: int) -> list[float]:
        """How many instances of a segment are there by width."""
        counts = [0] * len(self._widths)
        if report is not None:
            for instance in report.instances:
                if instance.segment == segment:
                    counts[self._shape.index(instance.width)] += instance.count
        return [min(1.0, count / 2) for count in counts]
