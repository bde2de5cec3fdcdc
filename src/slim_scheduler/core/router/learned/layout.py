"""Names of the columns of an observation: which figure stands where, for the encoders, the losses and policy files.

A trained policy knows its inputs by place. So whoever adds, moves or drops a feature, or changes what one means, counts
`LAYOUT` up: policies of another layout are refused.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from slim_scheduler.core.shape import ModelShape

LAYOUT = 1

Kind = Literal["paper", "extended", "planned", "escalating"]


class Features:
    """The features of one vector, in order, each of so many columns."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._columns: dict[str, slice] = {}
        self.size = 0
        for name, count in sizes.items():
            self._columns[name] = slice(self.size, self.size + count)
            self.size += count

    def __getitem__(self, name: str) -> slice:
        """The columns of a feature."""
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)


class Layout(NamedTuple):
    """The features of the vector that all servers share, and of each server's row."""

    shared: Features
    server: Features


def layout_of(kind: Kind, shape: ModelShape, servers: int) -> Layout:
    """The columns of an observation; `servers` matters to `paper` alone, which has them in the shared vector."""
    if kind == "paper":
        return Layout(_paper(servers), Features({}))
    segments, widths = shape.segments, len(shape.widths)
    shared, server = _shared(segments, widths), _server(segments, widths)
    if kind in ("planned", "escalating"):
        shared |= {"planned_load": 1, "next_width": widths}
        server |= {"planned_share": widths, "behind": widths, "next_server": 1}
    if kind == "escalating":
        shared |= {"again": 1, "margin": 1}
    return Layout(Features(shared), Features(server))


def _paper(servers: int) -> Features:
    """Eq. 1."""
    sizes = {"fifo": 1, "completed": 1}
    for i in range(servers):
        sizes |= {f"queue_{i}": 1, f"power_{i}": 1, f"utilization_{i}": 1}
    return Features(sizes)


def _shared(segments: int, widths: int) -> dict[str, int]:
    return {
        "segment": segments,
        "previous_width": widths,
        "waiting": 1,
        "age": 1,
        "slack": 1,
        "no_deadline": 1,
        "fifo": 1,
        "rate": 1,
        "per_server": 1,
        "fifo_per_segment": segments,
    }


def _server(segments: int, widths: int) -> dict[str, int]:
    return {
        "up": 1,
        "credit": 1,
        "outstanding": 1,
        "backlog": 1,
        "report_age": 1,
        "transfer": 1,
        "is_home": 1,
        "done": widths,
        "run": widths,
        "pending": widths,
        "instances": widths,
        "no_report": 1,
        "utilization": 1,
        "utilization_unknown": 1,
        "power": 1,
        "power_unknown": 1,
        "memory": 1,
        "power_among": 1,
        "queued": segments,
        "any_instance": segments,
    }
