"""A run's folder as the report reads it: `record.parquet`, `summary.json` and `config.toml`.

Finds the runs below the folders it is given; what runs write there is `run/runs.py`'s.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from slim_scheduler.core.errors import RecordError
from slim_scheduler.record.recorder import Record, read_record
from slim_scheduler.report.notes import router_title
from slim_scheduler.setup.config import Config, config_from

RECORD, SUMMARY, CONFIG, COMPARISON = "record.parquet", "summary.json", "config.toml", "compare.json"


class RunFolder:
    """One finished (or interrupted) run. The record is read when a figure first asks for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.summary: dict[str, Any] = _read_json(path / SUMMARY)
        try:
            self.config: Config = config_from(tomllib.loads((path / CONFIG).read_text()))
        except (OSError, ValueError) as error:
            raise RecordError(f"{path / CONFIG} cannot be read ({error}); run it again") from None

    @cached_property
    def record(self) -> Record:
        return read_record(self.path, payloads=False)

    @property
    def router(self) -> str:
        return str(self.summary["router"])

    @property
    def origin(self) -> str:
        """What every table and figure must say: simulated or live, and where energy comes from."""
        return origin(self.summary)


def origin(summary: dict[str, Any]) -> str:
    return f"{summary['mode']} · energy: {summary['energy_source']}"


def find_runs(folders: Iterable[Path]) -> list[RunFolder]:
    """All runs in and below some folders, by path, or in the order of a comparison found there.

    Raises RecordError where there is none.
    """
    runs: list[RunFolder] = []
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"{folder} is not a run's folder; write one with `slim simulate` or `slim bench`")
        found = sorted(path.parent for path in folder.rglob(RECORD))
        if not found:
            read_record(folder)  # says what is missing
        order = _compared(folder)
        below = [RunFolder(path) for path in found]
        runs.extend(sorted(below, key=lambda run: order.get(run.router, len(order))))
    return runs


def _compared(folder: Path) -> dict[str, int]:
    """The places of routers in a comparison's `compare.json`; empty where there is none."""
    path = folder / COMPARISON
    if not path.exists():
        return {}
    try:
        return {str(entry["router"]): i for i, entry in enumerate(json.loads(path.read_text()))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} cannot be read ({error}); compare again") from None


def by_router(runs: Iterable[RunFolder]) -> dict[str, list[RunFolder]]:
    """Runs grouped by router, in order of first appearance; live and simulated ones apart."""
    runs = list(runs)
    several = len({run.summary["mode"] for run in runs}) > 1
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        name = f"{run.router} ({run.summary['mode']})" if several else run.router
        groups.setdefault(name, []).append(run)
    return groups


def shown(groups: Mapping[str, list[RunFolder]]) -> dict[str, list[RunFolder]]:
    """The groups under the names that the page shows: short, and with the marks of what must be known of their runs."""
    short = [_shortened(name) for name in groups]
    names = short if len(set(short)) == len(short) else list(groups)
    return {
        router_title(name, [run.summary for run in of]): of for name, of in zip(names, groups.values(), strict=True)
    }


def _shortened(router: str) -> str:
    """`ppo:…/adaptive` for a policy in a folder of folders."""
    return re.sub(r"^ppo:.*/([^/]+)/?", r"ppo:…/\1", router)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist; run it again") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read ({error}); run it again") from None
    if not isinstance(content, dict) or not {"router", "seed", "mode", "energy_source"} <= content.keys():
        raise RecordError(f"{path} is not a run's summary; run it again")
    return content
