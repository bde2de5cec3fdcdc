"""Benchmark results say which commit was measured."""

import json
import subprocess
from pathlib import Path

from benchmarks.__main__ import RESULTS

from slim_scheduler.run.provenance import measured_commit


def git(folder: Path, *command: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(
        ["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_every_stored_result_carries_a_commit() -> None:
    rows = json.loads(RESULTS.read_text())
    assert [name for name, row in rows.items() if not row.get("commit")] == []


def test_a_result_names_the_commit_and_whether_the_tree_was_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "results.json").write_text("1")
    git(tmp_path, "add", "code.py", "stored")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert measured_commit(tmp_path) == commit

    (tmp_path / "stored" / "results.json").write_text("2")
    assert measured_commit(tmp_path) == f"{commit} with uncommitted changes"
    for written in ("stored", "stored/results.json"):
        assert measured_commit(tmp_path, written) == commit

    (tmp_path / "code.py").write_text("2")
    assert measured_commit(tmp_path, "stored") == f"{commit} with uncommitted changes"


def test_without_git_the_commit_is_unknown(tmp_path: Path) -> None:
    assert measured_commit(tmp_path / "absent") == "unknown"
