"""The columns of the event record, and how messages become rows of them.

Owns the schema and the conversion of a chunk of messages to one Arrow table, column by column, because a Python
loop over rows would cost more than the scheduling it records. `record.py` collects the messages and owns the file.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from slim_scheduler.core import messages as m
from slim_scheduler.core.types import ItemId, ItemOutcome, Request, RequestId, Seconds, WidthTuple

# (time, machine, message, step, position): position 0 is the event of a step, its commands follow.
Row = tuple[Seconds, str, Any, int, int]
Judge = Callable[[ItemId, WidthTuple], bool | None]
Columns = dict[str, Any]

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
        # what went otherwise than planned
        ("up", pa.bool_()),
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


def table(
    rows: Mapping[type, Sequence[Row]],
    requests: dict[RequestId, Request],
    judge: Judge,
    names: TupleNames,
    payloads: bool,
) -> pa.Table:
    """One table of all rows in the order of their steps; `requests` are those that wait for their answer."""
    parts = []
    for kind, of_kind in rows.items():
        if not of_kind:
            continue
        if kind is m.RequestArrived:
            requests.update((row[2].request.request_id, row[2].request) for row in of_kind)
        if kind is not m.Reply or payloads:
            messages = [row[2] for row in of_kind]
            columns = _COLUMNS[kind](messages, names) if kind in _COLUMNS else {}
            if payloads:
                columns["payload"] = [_ENCODE(message).decode() for message in messages]
            parts.append(_part(kind.__name__, of_kind, columns))
        if kind is m.Reply:
            parts.append(_items(of_kind, requests, judge, names))
    if not parts:
        return SCHEMA.empty_table()
    joined = pa.concat_tables(parts)
    order = np.lexsort((joined["position"].to_numpy(), joined["step"].to_numpy()))
    return joined.take(pa.array(order)).combine_chunks()


_ENCODE = msgspec.json.Encoder().encode


def _part(kind: str, rows: Sequence[Row], columns: Columns) -> pa.Table:
    columns["time"] = [row[0] for row in rows]
    columns["machine"] = [row[1] for row in rows]
    columns["step"] = [row[3] for row in rows]
    columns["position"] = [row[4] for row in rows]
    columns["kind"] = pa.repeat(kind, len(rows))
    arrays = []
    for field in SCHEMA:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(len(rows), field.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _items(rows: Sequence[Row], requests: dict[RequestId, Request], judge: Judge, names: TupleNames) -> pa.Table:
    """One row per item of each reply, joined with its request's arrival and deadline."""
    asked = [requests.pop(row[2].request_id, None) for row in rows]
    spread = [(row, request, item) for row, request in zip(rows, asked, strict=True) for item in row[2].items]
    items: list[ItemOutcome] = [item for _, _, item in spread]
    columns: Columns = {
        "request": [row[2].request_id for row, _, _ in spread],
        "item": [item.item for item in items],
        "arrival": [request and request.arrival for _, request, _ in spread],
        "deadline": [request and request.deadline for _, request, _ in spread],
        "outcome": [item.outcome.value for item in items],
        "widths": [names[item.widths] for item in items],
        "servers": [names[item.servers] for item in items],
        "queue_s": [item.queue_s for item in items],
        "compute_s": [item.compute_s for item in items],
        "energy_j": [item.energy_j for item in items],
        "right": [judge(item.item, item.widths) if item.outcome == "answered" else None for item in items],
        "reason": [item.reason or row[2].reason or None for row, _, item in spread],
    }
    return _part(ItemOutcome.__name__, [row for row, _, _ in spread], columns)


def _lists(values: Sequence[Any], lengths: Sequence[int], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


def _requests(messages: Sequence[m.RequestArrived], names: TupleNames) -> Columns:
    requests = [message.request for message in messages]
    sizes = [len(request.items) for request in requests]
    return {
        "request": [request.request_id for request in requests],
        "arrival": [request.arrival for request in requests],
        "deadline": [request.deadline for request in requests],
        "size": sizes,
        "items": _lists(list(chain.from_iterable(r.items for r in requests)), sizes, pa.int64()),
    }


def _blocks(messages: Sequence[m.BlockFinished], names: TupleNames) -> Columns:
    decisions = [message.decision for message in messages]
    done = [len(message.ran) for message in messages]
    ran = list(chain.from_iterable(message.ran for message in messages))
    return {
        "block": [message.block_id for message in messages],
        "server": [decision.server for decision in decisions],
        "requested_width": [decision.width for decision in decisions],
        "group": [decision.group for decision in decisions],
        "segment": [message.segment for message in messages],
        "previous_width": [message.previous_width for message in messages],
        "size": [message.size for message in messages],
        "decided_at": [message.decided_at for message in messages],
        "finished_at": [message.finished_at for message in messages],
        "latency": [message.latency for message in messages],
        "lost": [message.lost for message in messages],
        "fifo_length": [message.fifo_length for message in messages],
        "completed": [message.completed for message in messages],
        "router": [message.router for message in messages],
        "items": _lists([pair[0] for pair in ran], done, pa.int64()),
        "ran": _lists([names[pair[1]] for pair in ran], done, pa.string()),
    }


def _started(messages: Sequence[m.StartBatch], names: TupleNames) -> Columns:
    batches = [message.batch for message in messages]
    return {
        "batch": [batch.batch_id for batch in batches],
        "instance": [batch.instance for batch in batches],
        "segment": [batch.segment for batch in batches],
        "width": [batch.width for batch in batches],
        "requested_width": [batch.requested_width for batch in batches],
        "previous_width": [batch.previous_width for batch in batches],
        "size": [len(batch.tasks) for batch in batches],
        "started": [batch.started for batch in batches],
    }


def _reported(messages: Sequence[m.BatchReported], names: TupleNames) -> Columns:
    return {
        "server": [message.server for message in messages],
        "batch": [message.batch_id for message in messages],
        "segment": [message.segment for message in messages],
        "width": [message.width for message in messages],
        "size": [len(message.tasks) for message in messages],
        "started": [message.started for message in messages],
        "finished_at": [message.finished for message in messages],
        "energy_j": [message.energy_j for message in messages],
    }


def _reports(messages: Sequence[m.ServerReported], names: TupleNames) -> Columns:
    reports = [message.report for message in messages]
    return {
        "server": [report.server for report in reports],
        "utilization": [report.utilization for report in reports],
        "power_w": [report.power_w for report in reports],
        "energy_j": [report.energy_j for report in reports],
        "energy_source": [report.energy_source for report in reports],
        "queue": [report.queue_per_segment for report in reports],
        "running_tasks": [report.running_tasks for report in reports],
        "memory_used": [report.memory_used for report in reports],
    }


def _fields(**fields: str) -> Callable[[Sequence[Any], TupleNames], Columns]:
    """Columns that are plain fields of the message: column=field."""

    def columns(messages: Sequence[Any], names: TupleNames) -> Columns:
        return {column: [getattr(x, field) for x in messages] for column, field in fields.items()}

    return columns


def _returned(messages: Sequence[m.TasksReturned], names: TupleNames) -> Columns:
    return {
        "server": [message.server for message in messages],
        "size": [len(message.tasks) for message in messages],
        "reason": [message.reason for message in messages],
    }


_COLUMNS: dict[type, Callable[[Sequence[Any], TupleNames], Columns]] = {
    m.RequestArrived: _requests,
    m.RequestCancelled: _fields(request="request_id"),
    m.ServerJoined: _fields(server="server", size="credit_tasks"),
    m.ServerLeft: _fields(server="server", reason="reason"),
    m.RouterTooSlow: _fields(seconds="seconds"),
    m.RouterFellBack: _fields(reason="reason", until="until"),
    m.ServerChanged: _fields(server="server", up="up", reason="reason", size="requeued"),
    m.BlockFinished: _blocks,
    m.StartBatch: _started,
    m.BatchReported: _reported,
    m.BatchFailed: _fields(batch="batch_id", reason="reason"),
    m.TasksReturned: _returned,
    m.ServerReported: _reports,
    m.LoadInstance: _fields(instance="instance", segment="segment", width="width", bytes="reserved"),
    m.InstanceReady: _fields(instance="instance"),
    m.InstanceFailed: _fields(instance="instance", reason="reason"),
    m.UnloadInstance: _fields(instance="instance"),
    m.InstanceUnloaded: _fields(instance="instance"),
}
