"""How long `slim --help` takes, against Python starting and doing nothing."""

import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

ROUNDS = 15


def run() -> dict[str, dict[str, Any]]:
    """Medians of alternating starts. The requirement is 0.3 s; the ratio says what of it is Python's own."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(_seconds("-m", "slim_scheduler", "--help"))
        theirs.append(_seconds("-c", "pass"))
    mine, bare = statistics.median(ours), statistics.median(theirs)
    return {
        "cli_start": {
            "ratio": mine / bare,
            "ours": mine,
            "theirs": bare,
            "unit": "s",
            "versions": {"python": platform.python_version(), "typer": version("typer")},
        }
    }


def _seconds(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(run())
