"""The record keeps what happened: rows by level, the same hash for the same values, and a replay from level full."""

import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from slim_scheduler.core import messages as m
from slim_scheduler.core.errors import RecordError
from slim_scheduler.core.types import Batch, Block, Decision, ItemOutcome, Outcome, Request, Task
from slim_scheduler.record import recorder as recorders
from slim_scheduler.record.levels import Level
from slim_scheduler.record.recorder import Recorder, RunInfo, read_record, record_hash, replay_steps

INFO = RunInfo(mode="simulated", router="jsq:0.25", seed=3, ended_at=1.0)
TASK = Task(7, 1, 0, None, None, 0.1, None, 0)
BLOCK = Block(4, "a", 0, 0.25, None, False, (TASK,), 0.1)
BATCH = Batch(2, 9, 0, 0.5, 0.25, None, (TASK,), 0.2)
REPORTED = m.BatchReported("a", 0, 2, 0, 0.5, (7,), 0.2, 0.3, 1.5)
ANSWER = ItemOutcome(1, Outcome.ANSWERED, (0.5,), ("a",), 0.1, 0.1, 1.5)
STEPS: list[tuple[str, float, m.Message, list[m.Message]]] = [
    ("dispatcher", 0.1, m.RequestArrived(Request(5, (1, 2), 0.05, deadline=0.9)), [m.SendBlock(BLOCK), m.WakeAt(0.9)]),
    ("a", 0.2, m.BlockArrived(BLOCK), [m.StartBatch(BATCH)]),
    ("a", 0.3, m.BatchDone(2, 1.5), [REPORTED]),
    (
        "dispatcher",
        0.3,
        REPORTED,
        [
            m.BlockFinished(4, Decision("a", 0.25, 8), 0, None, 1, 0.1, 0.3, 0.2, ((1, (0.5,)),), 0, 2, 0, "jsq:0.25"),
            m.Reply(5, Outcome.ANSWERED, (ANSWER, ItemOutcome(2, Outcome.EXPIRED, (), (), 0.2, 0.0, reason="late"))),
        ],
    ),
]


def recorded(level: Level) -> Recorder:
    recorder = Recorder(level, judge=lambda item, widths: item == 1 and widths == (0.5,))
    for step in STEPS:
        recorder.step(*step)
    return recorder


def test_blocks_level_has_one_row_per_request_block_batch_and_item() -> None:
    rows = recorded("blocks").record(INFO).rows.to_pylist()
    kinds = ["RequestArrived", "StartBatch", "BatchReported", "BlockFinished", "ItemOutcome", "ItemOutcome"]
    assert [row["kind"] for row in rows] == kinds
    block, right, late = rows[3:]
    assert (block["items"], block["ran"], block["requested_width"], block["group"]) == ([1], ["0.5"], 0.25, 8)
    assert (right["arrival"], right["time"], right["widths"], right["servers"], right["right"]) == (
        *(0.05, 0.3, "0.5", "a"),
        True,
    )
    assert (late["outcome"], late["reason"], late["right"], late["deadline"]) == ("expired", "late", None, 0.9)


def test_summary_level_leaves_out_the_batches() -> None:
    kinds = set(recorded("summary").record(INFO).rows["kind"].to_pylist())
    assert kinds == {"RequestArrived", "BlockFinished", "ItemOutcome"}


def test_full_level_replays_every_step_in_order() -> None:
    assert list(replay_steps(recorded("full").record(INFO))) == STEPS


def test_full_level_replays_from_the_file(tmp_path: Path) -> None:
    recorded("full").write(tmp_path / "record.parquet", INFO)
    assert list(replay_steps(read_record(tmp_path))) == STEPS


def test_payloads_can_be_left_on_disk(tmp_path: Path) -> None:
    recorded("full").write(tmp_path / "record.parquet", INFO)
    light = read_record(tmp_path, payloads=False)
    assert light.rows["payload"].null_count == len(light.rows)
    assert light.rows.drop(["payload"]) == read_record(tmp_path).rows.drop(["payload"])


@pytest.mark.parametrize("added", [("pace",), ("passes", "margin", "pace")])
def test_a_record_of_before_a_column_is_read(tmp_path: Path, added: tuple[str, ...]) -> None:
    recorded("blocks").write(tmp_path / "now.parquet", INFO)
    with pq.ParquetFile(tmp_path / "now.parquet") as file:
        table = file.read().replace_schema_metadata(file.metadata.metadata)
    pq.write_table(table.drop(list(added)), tmp_path / "record.parquet")
    old, now = read_record(tmp_path), read_record(tmp_path / "now.parquet")
    assert all(old.rows[column].null_count == len(old.rows) for column in added)
    assert old.rows.drop(list(added)) == now.rows.drop(list(added))
    pq.write_table(table.drop(["right"]), tmp_path / "record.parquet")
    with pytest.raises(RecordError):
        read_record(tmp_path)


def test_a_report_counts_once_although_both_machines_saw_it() -> None:
    record = recorded("full").record(INFO)
    assert record.of("BatchReported")["machine"].to_pylist() == ["a"]


def test_replay_needs_level_full() -> None:
    with pytest.raises(RecordError, match="level is blocks; only full replays"):
        next(replay_steps(recorded("blocks").record(INFO)))


def test_what_is_known_of_the_run_travels_with_the_file(tmp_path: Path) -> None:
    recorded("summary").write(tmp_path / "record.parquet", INFO)
    info = read_record(tmp_path).info
    assert (info.mode, info.router, info.seed, info.level) == ("simulated", "jsq:0.25", 3, "summary")


@pytest.mark.parametrize("live", [False, True])
def test_equal_records_hash_equal_however_they_are_chunked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    whole = recorded("blocks")
    monkeypatch.setitem(recorders.CHUNK, "blocks", 1)
    monkeypatch.setattr(recorders, "LIVE_CHUNK", 1)
    chunked = Recorder("blocks", lambda item, widths: item == 1 and widths == (0.5,), live=live)
    for step in STEPS:
        chunked.step(*step)
    chunked.write(tmp_path / "record.parquet", INFO)
    assert record_hash(tmp_path) == record_hash(chunked.record(INFO)) == record_hash(whole.record(INFO))


def test_a_live_run_is_not_held_up_and_judged_when_its_answers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "LIVE_CHUNK", 1)
    monkeypatch.setitem(recorders.CHUNK, "blocks", 1)
    answers: dict[int, bool] = {}
    threads = set()

    def judge(item: int, widths: object) -> bool | None:
        threads.add(threading.current_thread())
        return answers.get(item)

    live = Recorder("blocks", judge, live=True)
    for step in STEPS:
        live.step(*step)  # a chunk each
    answers[1] = True  # the loop hands an answer over after the step that replied
    live.step("dispatcher", 0.4, m.RequestArrived(Request(6, (3,), 0.4)), [])
    rows = live.record(INFO).rows.to_pylist()
    assert [row["right"] for row in rows if row["outcome"] == "answered"] == [True]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_what_goes_wrong_beside_a_live_run_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "LIVE_CHUNK", 1)
    monkeypatch.setitem(recorders.CHUNK, "blocks", 1)

    def judge(item: int, widths: object) -> bool | None:
        raise LookupError("no such label")

    live = Recorder("blocks", judge, live=True)
    monkeypatch.setattr(recorders, "MOST_WAITING", 0)
    for step in (*STEPS, *STEPS):
        live.step(*step)  # the run goes on
    for _ in range(2):
        with pytest.raises(LookupError, match="no such label"):
            live.record(INFO)


def test_one_changed_value_changes_the_hash() -> None:
    other = Recorder("blocks", judge=lambda item, widths: None)
    for step in STEPS:
        other.step(*step)
    assert record_hash(other.record(INFO)) != record_hash(recorded("blocks").record(INFO))


def test_a_file_under_way_does_not_look_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.parquet"
    recorder = recorded("blocks")
    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetWriter, "write_table", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            recorder.write(path, INFO)
    assert not path.exists()
    recorder.write(path, INFO)
    assert [file.name for file in tmp_path.iterdir()] == ["record.parquet"]


def test_an_empty_run_has_a_record(tmp_path: Path) -> None:
    Recorder("blocks", lambda item, widths: None).write(tmp_path / "record.parquet", INFO)
    assert len(read_record(tmp_path).rows) == 0


def test_missing_record_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"record .*record\.parquet does not exist; write one with"):
        read_record(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 200, -10])
def test_truncated_record_is_one_clear_line(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "record.parquet"
    recorded("blocks").write(path, INFO)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RecordError, match=r"is damaged or truncated") as caught:
        read_record(path)
    assert "\n" not in str(caught.value)


def test_another_parquet_file_is_refused(tmp_path: Path) -> None:
    rows = recorded("blocks").record(INFO).rows
    pq.write_table(rows, tmp_path / "other.parquet")
    with pytest.raises(RecordError, match="not a record of a run"):
        read_record(tmp_path / "other.parquet")
