"""The one event record of a run, simulated or live: collected from both machines, written as Parquet, read back.

`Recorder.step` is called by the hosts around every `handle`, so it only appends; messages become columns when a
chunk is full or the run ends, those of a live run later and in a thread. Every table and figure derives from a
`Record`. The columns are `record/table.py`'s.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from slim_scheduler.core import messages as m
from slim_scheduler.core.errors import RecordError
from slim_scheduler.core.types import Request, RequestId, Seconds
from slim_scheduler.record.levels import CARRIED, KINDS_OF_LEVEL, Level

if TYPE_CHECKING:
    import pyarrow as pa

    from slim_scheduler.record.table import Judge, Row

    Pending = dict[type, list[Row]]  # by the class of the message

CHUNK: dict[Level, int] = {"full": 1 << 15, "blocks": 1 << 17, "summary": 1 << 17}  # steps: some 100 MB
LIVE_CHUNK = 1 << 11  # steps: no column of so few, nor freeing them, holds the interpreter for long
MOST_WAITING = 4  # chunks that the thread of a live run may be behind
_INFO_KEY = b"slim_scheduler.run"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says of its run beside the rows. Times are on the clock of the rows.

    `decision_us` is the host's measurement of the router (mean and p99, microseconds), `cpu_s` the CPU time of the
    process that ran it all; None where nobody measured.
    """

    mode: Literal["live", "simulated"]
    router: str
    seed: int = 0
    level: Level = "blocks"
    started_at: Seconds = 0.0
    ended_at: Seconds | None = None
    interrupted: bool = False
    decision_us: dict[str, float] | None = None
    machine: str = ""
    cpu_s: Seconds | None = None


class Record(msgspec.Struct, frozen=True):
    """A record's rows, one per event, and what is known of the run as a whole."""

    rows: Any  # pyarrow.Table with record_rows.SCHEMA
    info: RunInfo

    def of(self, *kinds: str) -> "pa.Table":
        """The rows of some kinds (message names, or `ItemOutcome`).

        A server's reports as the server made them: their arrival at the dispatcher is another row at level full.
        """
        import pyarrow.compute as pc

        kind = self.rows["kind"]
        chosen = pc.is_in(kind, _strings(kinds))
        copies = pc.and_(
            pc.equal(self.rows["machine"], "dispatcher"), pc.is_in(kind, _strings([c.__name__ for c in CARRIED]))
        )
        return self.rows.filter(pc.and_not(chosen, copies))


class Recorder:
    """Collects what both machines take and give. Not thread-safe: one host, one recorder.

    `judge` says whether an answered item was right at a width tuple, None where nobody knows. `live`: chunks
    become columns late and in a thread of their own, because the 0.2 s and more that a large one takes would make a
    live run's requests late. By then whoever asked has the answer that `judge` judges.
    """

    def __init__(self, level: Level, judge: "Judge", *, live: bool = False) -> None:
        self.level = level
        self._judge = judge
        self._step = 0
        self._chunk_steps = LIVE_CHUNK if live else CHUNK[level]
        self._chunk_end = self._chunk_steps
        self._requests: dict[RequestId, Request] = {}
        self._names: Any = None
        self._chunks: list[pa.Table] = []
        self._live = live
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._error: Exception | None = None
        self._held: deque[Pending] = deque()  # of a live run: what takes less than a minute becomes columns at its end
        self._begin_chunk()
        if live:
            self._columnise(self._pending)  # of nothing: what this imports is imported before the run

    def _begin_chunk(self) -> None:
        events, commands = KINDS_OF_LEVEL[self.level]
        self._pending: Pending = {kind: [] for kind in (*events, *commands)}
        self._take_event = {kind: self._pending[kind].append for kind in events}.get
        self._take_command = {kind: self._pending[kind].append for kind in commands}.get

    def step(self, machine: str, now: Seconds, event: m.Message, commands: Sequence[m.Message]) -> None:
        """One `handle` call of `machine` ("dispatcher" or a server's name) and what came back."""
        step = self._step = self._step + 1
        take = self._take_event(type(event))
        if take is not None:
            take((now, machine, event, step, 0))
        position = 0
        for command in commands:
            position += 1  # noqa: SIM113  half the time of enumerate for the usual one or two commands
            take = self._take_command(type(command))
            if take is not None:
                take((now, machine, command, step, position))
        if step == self._chunk_end:
            self._end_chunk()

    def record(self, info: RunInfo) -> Record:
        """All rows so far."""
        return Record(self._rows(), self._info(info))

    def write(self, path: Path, info: RunInfo) -> None:
        """Writes the record, complete up to here. The file appears under its name only when it is complete."""
        import pyarrow.parquet as pq

        rows = self._rows()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with pq.ParquetWriter(partial, rows.schema, compression="zstd") as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({_INFO_KEY.decode(): msgspec.json.encode(self._info(info)).decode()})
        os.replace(partial, path)

    def _rows(self) -> "pa.Table":
        import pyarrow as pa

        from slim_scheduler.record.table import SCHEMA

        if self._thread is not None:
            self._thread.shutdown()  # when it has done what waits
            self._thread = None
        if self._error is not None:
            raise self._error  # every time: rows are missing
        while self._held:
            self._columnise(self._held[0])
            self._held.popleft()
        self._columnise(self._pending)
        self._begin_chunk()
        self._chunks = [pa.concat_tables(self._chunks) if self._chunks else SCHEMA.empty_table()]
        return self._chunks[0]

    def _info(self, info: RunInfo) -> RunInfo:
        return msgspec.structs.replace(info, level=self.level)

    def _end_chunk(self) -> None:
        ended = self._pending
        self._chunk_end = self._step + self._chunk_steps
        self._begin_chunk()
        if not self._live:
            self._columnise(ended)
            return
        self._held.append(ended)
        if len(self._held) * LIVE_CHUNK > CHUNK[self.level]:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "slim-record")
            self._waiting.append(self._thread.submit(self._columnise_beside, self._held.popleft()))
        if len(self._waiting) > MOST_WAITING:
            wait([self._waiting.popleft()])

    def _columnise_beside(self, pending: "Pending") -> None:
        """In the thread: the run goes on, and what went wrong is told at its end."""
        try:
            if self._error is None:
                self._columnise(pending)
        except Exception as error:
            self._error = error

    def _columnise(self, pending: "Pending") -> None:
        from slim_scheduler.record.table import TupleNames, table

        if self._names is None:
            self._names = TupleNames()
        rows = table(pending, self._requests, self._judge, self._names, self.level)
        if len(rows):
            self._chunks.append(rows)


def read_record(path: Path, payloads: bool = True) -> Record:
    """Reads a record, given the file or its run's folder. Raises RecordError when it is missing or damaged.

    Without `payloads` the JSON of level full, most of such a file, is left on disk.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from slim_scheduler.record.table import ADDED, SCHEMA

    if path.is_dir():
        path = path / "record.parquet"
    try:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            left_out = {name for name in ADDED if name not in there} | ({"payload"} if not payloads else set())
            rows = file.read([name for name in SCHEMA.names if name not in left_out])
            info = msgspec.json.decode((file.metadata.metadata or {})[_INFO_KEY], type=RunInfo)
    except FileNotFoundError:
        raise RecordError(f"record {path} does not exist; write one with `slim simulate` or `slim bench`") from None
    except KeyError:
        raise RecordError(f"{path} is a Parquet file but not a record of a run; write one with `slim bench`") from None
    except (pa.ArrowException, OSError, msgspec.MsgspecError) as error:
        reason = str(error).partition("\n")[0]
        raise RecordError(f"record {path} is damaged or truncated ({reason}); run it again") from None
    for name in left_out:
        field = SCHEMA.field(name)
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    if left_out and set(rows.schema.names) == set(SCHEMA.names):
        rows = rows.select(SCHEMA.names)
    if rows.schema.remove_metadata() != SCHEMA:
        raise RecordError(f"record {path} has other columns than this version writes; run it again")
    return Record(rows, info)


def read_width_shares(path: Path) -> dict[int, dict[float, float]]:
    """Share of the tasks of each segment that a run's decisions asked to run at each width, for `jsq@RUN`."""
    blocks = read_record(path).of("BlockFinished")
    tasks: dict[int, dict[float, float]] = {}
    columns = (blocks[name].to_pylist() for name in ("segment", "requested_width", "size"))
    for segment, width, size in zip(*columns, strict=True):
        of_segment = tasks.setdefault(segment, {})
        of_segment[width] = of_segment.get(width, 0.0) + size
    if not tasks:
        raise RecordError(f"record {path} has no finished block to take width shares from; run it longer")
    return {
        segment: {width: count / sum(by.values()) for width, count in sorted(by.items())}
        for segment, by in sorted(tasks.items())
    }


def record_hash(record: Record | Path) -> str:
    """SHA-256 over every column's values: equal for equal records, however they were chunked or compressed."""
    rows = (record if isinstance(record, Record) else read_record(record)).rows
    digest = hashlib.sha256()
    for name in rows.column_names:
        digest.update(name.encode())
        for part in _plain(rows[name]):
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def replay_steps(record: Record) -> Iterator[tuple[str, Seconds, m.Message, list[m.Message]]]:
    """The steps of a record at level full, as the host performed them: (machine, now, event, commands)."""
    if record.info.level != "full":
        raise RecordError(f"the record's level is {record.info.level}; only full replays (--set record.level=full)")
    decode = msgspec.json.Decoder(m.DispatcherEvent | m.DispatcherCommand | m.ServerEvent | m.ServerCommand).decode
    kept = record.rows.filter(record.rows["payload"].is_valid())
    columns = (kept[name].to_pylist() for name in ("step", "machine", "time", "payload"))
    last = None
    machine, now, messages = "", 0.0, []
    for step, of_machine, at, payload in zip(*columns, strict=True):
        if step != last and last is not None:
            yield machine, now, messages[0], messages[1:]
            messages = []
        last, machine, now = step, of_machine, at
        messages.append(decode(payload))
    if messages:
        yield machine, now, messages[0], messages[1:]


def _strings(values: Sequence[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(list(values), pa.string())


def _plain(column: "pa.ChunkedArray | pa.Array") -> Iterator[np.ndarray]:
    """A column as plain arrays in which undefined bytes under nulls do not show."""
    import pyarrow as pa
    import pyarrow.compute as pc

    yield np.asarray(column.is_valid())
    kind = column.type
    if pa.types.is_list(kind):
        yield np.asarray(pc.fill_null(pc.list_value_length(column), 0))
        yield from _plain(pc.list_flatten(column))
    elif pa.types.is_string(kind):
        text = pc.fill_null(column, "")
        yield np.asarray(pc.binary_length(text))
        yield np.frombuffer("".join(text.to_pylist()).encode(), np.uint8)
    else:
        yield np.asarray(pc.fill_null(column, False if pa.types.is_boolean(kind) else 0))
