"""A `slim` that runs in this process, from the root of the clone, and says what came of it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from slim_scheduler.cli import main

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Slim = Callable[..., Outcome]


@pytest.fixture
def slim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Slim:
    monkeypatch.chdir(ROOT)

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr("sys.argv", ["slim", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run
