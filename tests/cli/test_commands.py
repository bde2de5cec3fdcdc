"""What commands print and write, as a user would run them."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import active_children
from pathlib import Path

import pytest

from slim_scheduler.record.recorder import read_record, record_hash
from slim_scheduler.setup.profiles import read_profile
from tests.cli.conftest import ROOT, Slim

DEMO = ROOT / "examples/demo/cluster.toml"
SHORT = ("--set", "workload.duration_s=1", "--set", "workload.warmup_s=0.1", "--set", "workload.rate=100")


def test_simulate_writes_record_summary_and_configuration(slim: Slim, tmp_path: Path) -> None:
    code, out, _ = slim("simulate", "--config", DEMO, "-r", "jsq:0.5", "--seed", 3, "--out", tmp_path, "--json", *SHORT)
    assert code == 0
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["router"], summary["seed"], summary["mode"]) == ("jsq:0.5", 3, "simulated")
    assert summary["items_completed"] == summary["items_arrived"] > 50
    assert summary["accuracy"] > 0.9
    assert read_record(tmp_path).info.seed == 3


def test_a_command_runs_with_garbage_collection(slim: Slim) -> None:
    gc.disable()
    try:
        assert slim("simulate", "--config", DEMO, "--help").code == 0
        assert gc.isenabled()
    finally:
        gc.enable()


def test_the_configuration_as_used_gives_the_same_run_again(slim: Slim, tmp_path: Path) -> None:
    slim("simulate", "--config", DEMO, "-r", "random", "--seed", 5, "--out", tmp_path / "one", *SHORT)
    slim("simulate", "--config", tmp_path / "one/config.toml", "--seed", 5, "--out", tmp_path / "two")
    assert record_hash(tmp_path / "one") == record_hash(tmp_path / "two")


def test_jsq_takes_the_width_shares_of_another_run(slim: Slim, tmp_path: Path) -> None:
    slim("simulate", "--config", DEMO, "-r", "jsq:0.25/0.5/0.75/1", "--out", tmp_path / "one", *SHORT)
    slim("simulate", "--config", DEMO, "-r", f"jsq@{tmp_path / 'one'}", "--out", tmp_path / "two", *SHORT)
    blocks = read_record(tmp_path / "two").of("BlockFinished").to_pylist()
    assert {(block["segment"], block["requested_width"]) for block in blocks} == {
        (0, 0.25),
        (1, 0.5),
        (2, 0.75),
        (3, 1),
    }


def test_bench_runs_live_and_judges_by_true_labels(slim: Slim, tmp_path: Path) -> None:
    calm = ("--set", "workload.duration_s=3", "--set", "workload.rate=40")  # 3 s to drain: a busy machine may stand
    code, out, _ = slim("bench", "--config", DEMO, "-r", "jsq:0.25", "--out", tmp_path, "--json", *SHORT, *calm)
    assert code == 0
    summary = json.loads(out)
    assert summary["mode"] == "live"
    assert summary["items_completed"] == summary["items_arrived"] > 50
    assert summary["accuracy"] > 0.9
    assert summary["decision_us"]["mean"] > 0


def test_compare_pairs_the_same_arrivals_and_draws_a_page(slim: Slim, tmp_path: Path) -> None:
    routers = ("--routers", "random,jsq:0.25", "--seeds", 2, "--seed", 4)
    code, out, _ = slim("compare", "--config", DEMO, *routers, "--out", tmp_path, "--json", *SHORT)
    assert code == 0
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert compared == json.loads(out)
    assert [entry["router"] for entry in compared] == ["random", "jsq:0.25"]
    arrived = [entry["metrics"]["items_arrived"]["runs"] for entry in compared]
    assert arrived[0] == arrived[1]
    latency = [entry["metrics"]["latency_s.mean"] for entry in compared]
    assert len(latency[0]["runs"]) == 2
    assert latency[0]["ci95"] > 0
    difference = compared[1]["differences"]["latency_s.mean"]["mean"]
    assert difference == pytest.approx(latency[1]["mean"] - latency[0]["mean"])
    assert (tmp_path / "random/seed-5/record.parquet").exists()
    assert "jsq:0.25" in (tmp_path / "report.html").read_text()


def test_live_comparison_runs_here_and_says_so(slim: Slim, tmp_path: Path) -> None:
    routers = ("--routers", "random,jsq:0.25", "--seeds", 1, "--live")
    code, out, _ = slim("compare", "--config", DEMO, *routers, "--out", tmp_path, *SHORT)
    assert code == 0
    assert "live · energy: estimated" in out
    assert "difference to random, same arrivals" in out
    modes = [json.loads(path.read_text())["mode"] for path in tmp_path.rglob("summary.json")]
    assert modes == ["live", "live"]


@pytest.mark.slow
def test_a_network_is_trained_judged_and_measured(slim: Slim, tmp_path: Path) -> None:
    model, profile = tmp_path / "small", tmp_path / "small.json"
    fit = ("fit", "--preset", "digits", "--data", "digits", "--epochs", 1, "--teacher", ROOT / "models/digits")
    code, out, _ = slim(*fit, "--out", model, "--json")
    assert (code, json.loads(out)["out"]) == (0, str(model))
    code, out, _ = slim("accuracy", "--model", model, "--data", "digits", "--json")
    judged = json.loads(out)
    assert (code, len(judged["top1"]), judged["items"]) == (0, 4**4, 599)
    assert 0 <= judged["top1"]["0.25,0.5,0.75,1"] <= 100
    code, out, _ = slim("measure", "--model", model, "--rounds", 1, "--out", profile)
    assert code == 0
    assert "ms per batch" in out
    assert read_profile(profile).source == "measured"


def test_report_prints_a_table_and_writes_the_page(slim: Slim, tmp_path: Path) -> None:
    slim("simulate", "--config", DEMO, "--out", tmp_path / "run", *SHORT)
    code, out, _ = slim("report", tmp_path)
    assert code == 0
    assert "cost-model:0.5" in out
    assert "simulated · energy: estimated" in out
    assert str(tmp_path / "report.html") in out


def test_doctor_says_what_is_here_and_where_data_comes_from(slim: Slim) -> None:
    code, out, _ = slim("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(out)}
    assert code == 0
    assert findings["models/digits"]["status"] == "ok"
    assert {"python", "torch", "cpu", "memory", "disk", "cpu energy", "data digits", "data cifar100"} <= findings.keys()


def test_the_version_is_told(slim: Slim) -> None:
    assert slim("--version") == (0, f"slim-scheduler {version('slim-scheduler')}\n", "")


def test_every_command_explains_itself_with_examples(slim: Slim) -> None:
    commands = [line.split()[0] for line in slim("--help").out.partition("Commands:")[2].splitlines() if line.strip()]
    assert {"demo", "fit", "accuracy", "measure", "simulate", "bench", "compare", "report", "doctor"} <= set(commands)
    for command in commands:
        code, out, _ = slim(command, "--help")
        assert code == 0
        assert f"slim {command}" in out.partition("Examples:")[2]


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def interrupted(
    number: signal.Signals, *arguments: str | Path, after: str = " 0 %", with_children: bool = True
) -> tuple[int, str]:
    """Starts `slim` as a shell script does in the background, with SIGINT ignored; sends it a signal once its progress
    says `after`, to its children as well (as a terminal does) or not (as `kill` does), and waits for its end."""
    command = [sys.executable, "-m", "slim_scheduler", *map(str, arguments)]
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    with (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process,
        killed_after(100.0, process),
    ):
        assert process.stderr is not None
        said = ""
        while after not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        (os.killpg if with_children else os.kill)(process.pid, number)
        said += process.stderr.read()
        return process.wait(), said


@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_a_folder_that_cannot_be_made_is_told_before_the_run(slim: Slim, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    result = slim(command, "--config", DEMO, "--out", out, "--set", "workload.duration_s=3000")
    assert result.code == 2
    assert f"{out} cannot be a folder: Not a directory; choose another --out" in result.err.replace("\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_an_interrupted_run_leaves_a_readable_record_and_summary(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    long = ("--set", "workload.duration_s=3000")
    code, said = interrupted(number, command, "--config", DEMO, "--out", tmp_path, *long)
    assert code == 130
    assert "interrupted; what was written so far stays" in said
    assert "Traceback" not in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    record = read_record(tmp_path)
    assert summary["interrupted"]
    assert record.info.interrupted
    assert 0 < record.rows["time"].to_numpy().max() <= record.info.ended_at < 3000


def test_a_comparison_that_is_interrupted_while_its_workers_start_ends_in_silence(tmp_path: Path) -> None:
    plan = ("--routers", "random,jsq:0.25", "--seeds", "5", "--set", "workload.duration_s=100", "--workers", "2")
    code, said = interrupted(signal.SIGINT, "compare", "--config", DEMO, "--out", tmp_path, *plan)
    assert code == 130
    assert "Traceback" not in said


def test_an_interrupted_comparison_keeps_what_its_runs_recorded(tmp_path: Path) -> None:
    plan = ("--routers", "random,jsq:0.25", "--seeds", "1", "--set", "workload.duration_s=100", "--workers", "1")
    code, said = interrupted(signal.SIGINT, "compare", "--config", DEMO, "--out", tmp_path, *plan, after=" 10 %")
    assert code == 130
    assert "Traceback" not in said
    summary = json.loads((tmp_path / "random/seed-0/summary.json").read_text())
    assert summary["interrupted"]
    assert summary["items_arrived"] > 0
    assert len(read_record(tmp_path / "random/seed-0").rows) > 0
    assert not (tmp_path / "jsq-0.25").exists()


def test_a_training_whose_worker_is_killed_fails_with_one_line(slim: Slim, tmp_path: Path) -> None:
    def kill_one() -> None:
        until = time.monotonic() + 60
        while not (workers := active_children()) and time.monotonic() < until:
            time.sleep(0.01)
        workers[0].kill()

    threading.Thread(target=kill_one, daemon=True).start()
    code, _, err = slim("train", "--config", DEMO, "--out", tmp_path)
    assert code == 1
    assert "ended with -9; run `slim train` again to resume" in err.splitlines()[-1]
    assert "Traceback" not in err
