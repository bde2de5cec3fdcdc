"""The columns of the event record, and how messages become rows of them.

Owns the schema and the conversion of a chunk of messages to one Arrow table, column by column, because a Python
loop over rows would cost more than the scheduling it records. `recorder.py` collects the messages and owns the file.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from slim_scheduler.core import messages as m
from slim_scheduler.core.types import ItemId, ItemOutcome, Outcome, Request, RequestId, Seconds, WidthTuple
from slim_scheduler.record.levels import Level

# (time, machine, message, step, position): position 0 is the event of a step, its commands follow.
Row = tuple[Seconds, str, Any, int, int]
Judge = Callable[[ItemId, WidthTuple], bool | None]

SCHEMA = pa.schema(
    [
        ("time", pa.float64()),  # host's clock, seconds
        ("step", pa.int64()),
        ("position", pa.int32()),
        ("machine", pa.string()),
        ("kind", pa.string()),
        # requests and items
        ("request", pa.int64()),
        ("item", pa.int64()),
        ("arrival", pa.float64()),
        ("deadline", pa.float64()),
        ("outcome", pa.string()),
        ("widths", pa.string()),  # 0.25/0.5/0.75/1
        ("servers", pa.string()),  # a/b/b/a
        ("queue_s", pa.float64()),
        ("compute_s", pa.float64()),
        ("right", pa.bool_()),
        ("passes", pa.int32()),  # through the network, whichever answered
        ("margin", pa.float64()),  # after the first
        # blocks
        ("block", pa.int64()),
        ("server", pa.string()),
        ("segment", pa.int32()),
        ("width", pa.float64()),
        ("requested_width", pa.float64()),
        ("previous_width", pa.float64()),
        ("group", pa.int32()),
        ("size", pa.int32()),
        ("decided_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("latency", pa.float64()),
        ("lost", pa.int32()),
        ("fifo_length", pa.int64()),
        ("completed", pa.int64()),
        ("router", pa.string()),
        ("items", pa.list_(pa.int64())),
        ("ran", pa.list_(pa.string())),
        # batches and instances
        ("batch", pa.int64()),
        ("instance", pa.int64()),
        ("started", pa.float64()),
        ("bytes", pa.int64()),
        # devices
        ("utilization", pa.float64()),
        ("power_w", pa.float64()),
        ("energy_j", pa.float64()),
        ("energy_source", pa.string()),
        ("queue", pa.list_(pa.int32())),
        ("running_tasks", pa.int32()),
        ("memory_used", pa.int64()),
        ("pace", pa.float64()),
        # what went otherwise than planned
        ("up", pa.bool_()),
        ("raised", pa.bool_()),
        ("until", pa.float64()),
        ("seconds", pa.float64()),
        ("reason", pa.string()),
        ("payload", pa.string()),  # the message as JSON, at level full
    ]
)


class TupleNames(dict[tuple[Any, ...], str]):
    """Width tuples and server tuples as text, each spelled once."""

    def __missing__(self, parts: tuple[Any, ...]) -> str:
        name = self[parts] = "/".join(part if isinstance(part, str) else f"{part:g}" for part in parts)
        return name


# What records of before do not have.
ADDED = ("passes", "margin", "pace")

Extract = Callable[[Sequence[Any], TupleNames], Any]  # the values of one column, from all rows of a kind


def table(
    rows: Mapping[type, Sequence[Row]],
    requests: dict[RequestId, Request],
    judge: Judge,
    names: TupleNames,
    level: Level,
) -> pa.Table:
    """One table of all rows in the order of their steps; `requests` are those that wait for their answer."""
    parts = []
    for kind, of_kind in rows.items():
        if not of_kind:
            continue
        if kind is m.RequestArrived:
            requests.update([(row[2].request.request_id, row[2].request) for row in of_kind])
        if kind is not m.Reply or level == "full":
            parts.append(_part(kind.__name__, of_kind, [row[2] for row in of_kind], _COLUMNS[kind], names, level))
        if kind is m.Reply:
            ended = _ended_items(of_kind, requests, judge)
            parts.append(_part(ItemOutcome.__name__, [e.row for e in ended], ended, _ITEM_COLUMNS, names, level))
    if not parts:
        return SCHEMA.empty_table()
    joined = pa.concat_tables(parts)
    order = np.lexsort((joined["position"].to_numpy(), joined["step"].to_numpy()))
    return joined.take(pa.array(order)).combine_chunks()


_ENCODE = msgspec.json.Encoder().encode


def _part(
    kind: str,
    rows: Sequence[Row],
    sources: Sequence[Any],
    extractors: Mapping[str, Extract],
    names: TupleNames,
    level: Level,
) -> pa.Table:
    """The rows of one kind, whose columns come out of `sources`, one per row."""
    skipped = _NOT_IN_SUMMARY.get(kind, frozenset()) if level == "summary" else frozenset()
    columns: dict[str, Any] = {
        "time": [row[0] for row in rows],
        "machine": [row[1] for row in rows],
        "step": [row[3] for row in rows],
        "position": [row[4] for row in rows],
        "kind": pa.repeat(kind, len(rows)),
    }
    columns.update([(name, of(sources, names)) for name, of in extractors.items() if name not in skipped])
    if level == "full" and kind != ItemOutcome.__name__:
        columns["payload"] = [_ENCODE(message).decode() for message in sources]
    arrays = []
    for field in SCHEMA:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(len(rows), field.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """An item's end, with the reply that said so, the request it came with and the judge's verdict."""

    row: Row
    request: Request | None
    item: ItemOutcome
    right: bool | None


def _ended_items(rows: Sequence[Row], requests: dict[RequestId, Request], judge: Judge) -> list[_Ended]:
    ended = []
    for row in rows:
        reply = row[2]
        request = requests.pop(reply.request_id, None)
        for item in reply.items:
            right = judge(item.item, item.widths) if item.outcome is Outcome.ANSWERED else None
            ended.append(_Ended(row, request, item, right))
    return ended


def _lists(values: Sequence[Any], lengths: Sequence[int], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


def _items_of_requests(messages: Sequence[m.RequestArrived], names: TupleNames) -> pa.Array:
    items = [message.request.items for message in messages]
    return _lists(list(chain.from_iterable(items)), [len(of) for of in items], pa.int64())


def _items_of_blocks(messages: Sequence[m.BlockFinished], names: TupleNames) -> pa.Array:
    items = [pair[0] for message in messages for pair in message.ran]
    return _lists(items, [len(message.ran) for message in messages], pa.int64())


def _ran(messages: Sequence[m.BlockFinished], names: TupleNames) -> pa.Array:
    ran = [names[pair[1]] for message in messages for pair in message.ran]
    return _lists(ran, [len(message.ran) for message in messages], pa.string())


def _fields(**fields: str) -> dict[str, Extract]:
    """Columns that are plain fields of the message: column=field."""

    def column(field: str) -> Extract:
        return lambda messages, names: [getattr(message, field) for message in messages]

    return {name: column(field) for name, field in fields.items()}


# What `run/summary.py` and the figures do without.
_NOT_IN_SUMMARY = {
    ItemOutcome.__name__: frozenset({"widths", "servers", "queue_s", "compute_s", "energy_j", "reason"}),
    m.BlockFinished.__name__: frozenset(
        {"block", "server", "previous_width", "group", "fifo_length", "completed", "router"}
    ),
}

# Comprehensions over the whole chunk, one per column: a function call per row would cost more than all else.
_ITEM_COLUMNS: dict[str, Extract] = {
    "request": lambda ended, _: [e.row[2].request_id for e in ended],
    "item": lambda ended, _: [e.item.item for e in ended],
    "arrival": lambda ended, _: [e.request and e.request.arrival for e in ended],
    "deadline": lambda ended, _: [e.request and e.request.deadline for e in ended],
    "outcome": lambda ended, _: [e.item.outcome for e in ended],
    "widths": lambda ended, names: [names[e.item.widths] for e in ended],
    "servers": lambda ended, names: [names[e.item.servers] for e in ended],
    "queue_s": lambda ended, _: [e.item.queue_s for e in ended],
    "compute_s": lambda ended, _: [e.item.compute_s for e in ended],
    "energy_j": lambda ended, _: [e.item.energy_j for e in ended],
    "right": lambda ended, _: [e.right for e in ended],
    "passes": lambda ended, _: [2 if e.item.other_widths else 1 for e in ended],
    "margin": lambda ended, _: [e.item.margin if e.item.passes == 1 else e.item.other_margin for e in ended],
    "reason": lambda ended, _: [e.item.reason or e.row[2].reason or None for e in ended],
}
_COLUMNS: dict[type, dict[str, Extract]] = defaultdict(
    dict,
    {
        m.RequestArrived: {
            "request": lambda arrived, _: [x.request.request_id for x in arrived],
            "arrival": lambda arrived, _: [x.request.arrival for x in arrived],
            "deadline": lambda arrived, _: [x.request.deadline for x in arrived],
            "size": lambda arrived, _: [len(x.request.items) for x in arrived],
            "items": _items_of_requests,
        },
        m.RequestCancelled: _fields(request="request_id"),
        m.ServerJoined: _fields(server="server", size="credit_tasks"),
        m.ServerLeft: _fields(server="server", reason="reason"),
        m.RouterTooSlow: _fields(seconds="seconds"),
        m.RouterFellBack: _fields(reason="reason", until="until", raised="raised"),
        m.ServerChanged: _fields(server="server", up="up", reason="reason", size="requeued"),
        m.BlockFinished: {
            "block": lambda blocks, _: [x.block_id for x in blocks],
            "server": lambda blocks, _: [x.decision.server for x in blocks],
            "requested_width": lambda blocks, _: [x.decision.width for x in blocks],
            "group": lambda blocks, _: [x.decision.group for x in blocks],
            "segment": lambda blocks, _: [x.segment for x in blocks],
            "previous_width": lambda blocks, _: [x.previous_width for x in blocks],
            "size": lambda blocks, _: [x.size for x in blocks],
            "decided_at": lambda blocks, _: [x.decided_at for x in blocks],
            "finished_at": lambda blocks, _: [x.finished_at for x in blocks],
            "latency": lambda blocks, _: [x.latency for x in blocks],
            "lost": lambda blocks, _: [x.lost for x in blocks],
            "fifo_length": lambda blocks, _: [x.fifo_length for x in blocks],
            "completed": lambda blocks, _: [x.completed for x in blocks],
            "router": lambda blocks, _: [x.router for x in blocks],
            "items": _items_of_blocks,
            "ran": _ran,
        },
        m.StartBatch: {
            "batch": lambda started, _: [x.batch.batch_id for x in started],
            "instance": lambda started, _: [x.batch.instance for x in started],
            "segment": lambda started, _: [x.batch.segment for x in started],
            "width": lambda started, _: [x.batch.width for x in started],
            "requested_width": lambda started, _: [x.batch.requested_width for x in started],
            "previous_width": lambda started, _: [x.batch.previous_width for x in started],
            "size": lambda started, _: [len(x.batch.tasks) for x in started],
            "started": lambda started, _: [x.batch.started for x in started],
        },
        m.BatchReported: {
            **_fields(server="server", batch="batch_id", segment="segment", width="width", started="started"),
            **_fields(finished_at="finished", energy_j="energy_j"),
            "size": lambda reported, _: [len(x.tasks) for x in reported],
        },
        m.BatchFailed: _fields(batch="batch_id", reason="reason"),
        m.TasksReturned: {
            **_fields(server="server", reason="reason"),
            "size": lambda returned, _: [len(x.tasks) for x in returned],
        },
        m.ServerReported: {
            "server": lambda reported, _: [x.report.server for x in reported],
            "utilization": lambda reported, _: [x.report.utilization for x in reported],
            "power_w": lambda reported, _: [x.report.power_w for x in reported],
            "energy_j": lambda reported, _: [x.report.energy_j for x in reported],
            "energy_source": lambda reported, _: [x.report.energy_source for x in reported],
            "queue": lambda reported, _: [x.report.queue_per_segment for x in reported],
            "running_tasks": lambda reported, _: [x.report.running_tasks for x in reported],
            "memory_used": lambda reported, _: [x.report.memory_used for x in reported],
            "pace": lambda reported, _: [x.report.pace for x in reported],
        },
        m.LoadInstance: _fields(instance="instance", segment="segment", width="width", bytes="reserved"),
        m.InstanceReady: _fields(instance="instance"),
        m.InstanceFailed: _fields(instance="instance", reason="reason"),
        m.UnloadInstance: _fields(instance="instance"),
        m.InstanceUnloaded: _fields(instance="instance"),
    },
)
