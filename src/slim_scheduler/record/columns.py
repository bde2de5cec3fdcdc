"""Items and blocks of a record as numpy columns, for summaries and figures.

Only reading and flattening happens here; what the columns mean is `record/table.py`'s, what is made of them
`run/summary.py`'s and `report`'s.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.core.types import WidthTuple
from slim_scheduler.record.recorder import Record

if TYPE_CHECKING:
    import pyarrow as pa

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]
Mask = npt.NDArray[np.bool_]


class Items(msgspec.Struct, frozen=True):
    """Columns over items: those with an outcome first, then those still in flight (outcome "in-flight")."""

    item: Indices
    arrival: Floats
    deadline: Floats  # nan where none was asked for
    ended: Floats  # nan in flight
    outcome: Texts
    right: Floats  # 1, 0, nan where nobody knows
    margin: Floats  # after the first pass, nan where it was not told
    again: Mask  # ran a second time

    @property
    def answered(self) -> Mask:
        return np.asarray(self.outcome == "answered")


class Blocks(msgspec.Struct, frozen=True):
    """Columns over finished blocks, and flattened over their done tasks: `task_block` indexes the first."""

    decided: Floats
    finished: Floats
    latency: Floats
    done: Floats  # tasks that came back
    task_block: Indices
    task_item: Indices
    task_ran: Indices  # width tuple so far, as written in the record
    ran_names: list[str]


def items_of(record: Record) -> Items:
    """All items of a record, also those of requests without a reply yet."""
    ended = record.of("ItemOutcome")
    asked = record.of("RequestArrived")
    waiting = ~np.isin(numbers(asked, "request"), numbers(ended, "request"))
    repeats = np.where(waiting, numbers(asked, "size"), 0).astype(int)
    flying = np.repeat(np.arange(len(waiting)), repeats)
    ids = asked["items"].combine_chunks().flatten().to_numpy()
    in_flight = ids[np.repeat(waiting, numbers(asked, "size").astype(int))]
    nothing = np.full(len(flying), np.nan)
    return Items(
        item=np.concatenate([numbers(ended, "item").astype(np.int64), in_flight]),
        arrival=np.concatenate([numbers(ended, "arrival"), numbers(asked, "arrival")[flying]]),
        deadline=np.concatenate([numbers(ended, "deadline"), numbers(asked, "deadline")[flying]]),
        ended=np.concatenate([numbers(ended, "time"), nothing]),
        outcome=np.concatenate([texts(ended, "outcome"), np.full(len(flying), "in-flight", object)]),
        right=np.concatenate([numbers(ended, "right"), nothing]),
        margin=np.concatenate([numbers(ended, "margin"), nothing]),
        again=np.concatenate([numbers(ended, "passes"), nothing]) > 1,
    )


def blocks_of(record: Record) -> Blocks:
    """All finished blocks of a record."""
    rows = record.of("BlockFinished")
    ran = rows["ran"].combine_chunks()
    done = np.asarray(ran.value_lengths()).astype(np.int64)
    encoded = ran.flatten().dictionary_encode()
    return Blocks(
        decided=numbers(rows, "decided_at"),
        finished=numbers(rows, "finished_at"),
        latency=numbers(rows, "latency"),
        done=done.astype(float),
        task_block=np.repeat(np.arange(len(done)), done),
        task_item=rows["items"].combine_chunks().flatten().to_numpy(),
        task_ran=encoded.indices.to_numpy(),
        ran_names=encoded.dictionary.to_pylist(),
    )


def numbers(rows: "pa.Table", column: str) -> Floats:
    """A column as floats, nan where it is null."""
    import pyarrow as pa

    return np.asarray(rows[column].cast(pa.float64()).to_numpy(), float)


def texts(rows: "pa.Table", column: str) -> Texts:
    """A column of strings, None where it is null."""
    return np.asarray(rows[column].to_numpy(), object)


def parse_widths(name: str) -> WidthTuple:
    """The width tuple of a `widths` or `ran` value, such as 0.25/0.5."""
    return tuple(float(width) for width in name.split("/")) if name else ()
