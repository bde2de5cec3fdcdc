"""A run's folder as the report reads it: `record.parquet`, `summary.json` and `config.toml`.

Finds the runs below the folders it is given; what runs write there is `run/runs.py`'s.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from slim_scheduler.core.errors import RecordError
from slim_scheduler.record.recorder import Record, read_record
from slim_scheduler.report.notes import router_title
from slim_scheduler.setup.config import Config, WorkloadConfig, config_from

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
    """Runs grouped by router, in order of first appearance; live and simulated ones apart.

    Raises RecordError where means over a group, or differences that are paired by seed, would mix what cannot be
    compared: a group with two configurations or with one seed twice, and groups of different workloads.
    """
    runs = list(runs)
    several = len({run.summary["mode"] for run in runs}) > 1
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        name = f"{run.router} ({run.summary['mode']})" if several else run.router
        groups.setdefault(name, []).append(run)
    for name, of in groups.items():
        _check_group(name, of)
    firsts = [of[0] for of in groups.values()]
    for run in firsts[1:]:
        _check_same(firsts[0], run, "workload", _offered(firsts[0], several), _offered(run, several))
    return groups


def _offered(run: RunFolder, several_modes: bool) -> WorkloadConfig:
    """What came. Beside live runs, which need a folder of images, simulations of the same arrivals may name it."""
    workload = run.config.workload
    return msgspec.structs.replace(workload, data="") if several_modes else workload


def _check_group(name: str, runs: list[RunFolder]) -> None:
    """Raises RecordError where runs of one router are not of one configuration, or share a seed."""
    by_seed: dict[int, RunFolder] = {}
    for run in runs:
        _check_same(runs[0], run, "", runs[0].config, run.config)
        twin = by_seed.setdefault(run.summary["seed"], run)
        if twin is not run:
            raise RecordError(
                f"{twin.path} and {run.path} are both of {name} with seed {run.summary['seed']}; leave one out, or "
                "report them apart"
            )


def _check_same(one: RunFolder, other: RunFolder, section: str, mine: msgspec.Struct, theirs: msgspec.Struct) -> None:
    """Raises RecordError where two runs differ in a section of their configurations, or in all of it ("")."""
    found = _difference(msgspec.to_builtins(mine), msgspec.to_builtins(theirs), section)
    if found is not None:
        key, value, another = found
        raise RecordError(
            f"{one.path} and {other.path} differ in {key}: {value} and {another}; they cannot be compared, report "
            "them apart"
        )


def _difference(mine: Any, theirs: Any, key: str) -> tuple[str, Any, Any] | None:
    """The first key at which two plain trees differ, with both values; None where they are the same.

    Two spellings of one path are the same.
    """
    if mine == theirs:
        return None
    if isinstance(mine, str) and isinstance(theirs, str) and os.path.abspath(mine) == os.path.abspath(theirs):
        return None
    if isinstance(mine, dict) and isinstance(theirs, dict):
        inner = [(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}]
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
        inner = [(str(i), a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    elif isinstance(mine, list | tuple) and key in ("servers", "faults"):
        return f"the number of {key}", len(mine), len(theirs)
    else:
        return key, mine, theirs
    found = (_difference(a, b, f"{key}.{name}" if key else name) for name, a, b in inner)
    return next((difference for difference in found if difference is not None), None)


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
