"""One run from its configuration to its folder: `record.parquet`, `summary.json`, `config.toml`.

Puts host, judge, recorder and summary together, for simulated and live runs alike. An interrupted run is written as
far as it came, and its summary says so.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import ItemId, WidthTuple
from slim_scheduler.record.recorder import Recorder, RunInfo, read_record
from slim_scheduler.run.summary import summarize
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.interruption import Interruption, deferred, sigterm_as_ctrl_c
from slim_scheduler.setup.machines import in_items_per_second, load_shape

DIGITS_CHANNELS = 1  # and square: digits are enlarged to the network's size

Progress = Callable[[float], None]  # share of the run in [0, 1]


def simulated_run(
    config: Config,
    router: str,
    seed: int,
    out: Path,
    progress: Progress | None = None,
    interruption: Interruption | None = None,
) -> dict[str, Any]:
    """Simulates the configured workload and writes the run's folder; returns the summary.

    `interruption` is for callers that watch for signals themselves. Raises InputError.
    """
    if interruption is None:
        with deferred() as own:
            return simulated_run(config, router, seed, out, progress, own)
    from slim_scheduler.setup.workload import generate
    from slim_scheduler.sim.host import Simulation

    config = in_items_per_second(config)
    accuracy = accuracy_table(config)
    check_data(config, accuracy)
    arrivals = generate(config.workload, seed, accuracy.items if accuracy else 1)
    samples = arrivals.samples.tolist()
    verdicts: dict[WidthTuple, list[bool]] = {}

    def judge(item: ItemId, widths: WidthTuple) -> bool | None:
        if accuracy is None:
            return None
        if widths not in verdicts:
            verdicts[widths] = accuracy.correct(widths).tolist()
        return bool(verdicts[widths][samples[item]])

    margins: dict[WidthTuple, list[float]] = {}

    def margin(item: ItemId, widths: WidthTuple) -> float:
        assert accuracy is not None
        if widths not in margins:
            margins[widths] = accuracy.margin(widths).tolist()
        return float(margins[widths][samples[item]])

    def step(share: float) -> None:
        interruption.check()
        if progress is not None:
            progress(share)

    make_folder(out)
    recorder = Recorder(config.record.level, judge)
    told = margin if accuracy is not None and accuracy.has_margins else None
    simulation = Simulation(config, router, seed, recorder=recorder, arrivals=arrivals, margin=told)
    interrupted = False
    try:
        simulation.run(step)
    except KeyboardInterrupt:
        interrupted = True
    info = RunInfo(
        mode="simulated",
        router=router,
        seed=seed,
        ended_at=simulation.agenda.now,
        interrupted=interrupted,
        machine="simulated",
    )
    return _write(out, config, recorder, info, accuracy)


def live_run(config: Config, router: str, seed: int, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Runs the workload on this machine's devices and writes the run's folder; returns the summary."""
    from slim_scheduler.engine.bench import bench

    def share(done: float, of: float) -> None:
        if progress is not None:
            progress(min(done / of, 1.0))

    config = in_items_per_second(config)
    make_folder(out)
    with sigterm_as_ctrl_c():
        run = bench(config, router, seed, progress=share)
    return _write(out, config, run.recorder, run.info, accuracy_table(config))


def accuracy_table(config: Config) -> AccuracyTable | None:
    """The model's table of right and wrong test items, None where nobody measured one. Raises DataError."""
    path = accuracy_path(config)
    return read_accuracy(path) if path.exists() else None


def check_data(config: Config, accuracy: AccuracyTable | None) -> None:
    """Raises ConfigError where the workload shows digits to a network that was not made for them, or the other way."""
    shape, path, data = load_shape(config).item_shape, config.model.path, config.workload.data
    by = "x".join(map(str, shape))
    if data == "digits" and not (shape[0] == DIGITS_CHANNELS and shape[-1] == shape[-2]):
        raise ConfigError(
            f"workload.data is digits, images of 1x8x8, but {path} takes {by}; set workload.data to that network's data"
        )
    if accuracy is not None and (data == "digits") != (accuracy.data == "digits"):
        raise ConfigError(
            f"workload.data is {data}, but {path} was measured on {accuracy.data}; "
            "set workload.data to that network's data, or run `slim accuracy` with these"
        )


def _write(
    out: Path, config: Config, recorder: Recorder, info: RunInfo, accuracy: AccuracyTable | None
) -> dict[str, Any]:
    import tomli_w

    recorder.write(out / "record.parquet", info)
    ran = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, name=info.router))
    (out / "config.toml").write_text(tomli_w.dumps(_without_none(msgspec.to_builtins(ran))))
    summary = summarize(read_record(out, payloads=False), config, accuracy)
    write_json(out / "summary.json", summary)
    return summary


def make_folder(out: Path) -> None:
    """The folder of what is going to be run, before it is. Raises ConfigError where there can be none."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be a folder: {error.strerror}; choose another --out") from None
    if not os.access(out, os.W_OK):
        raise ConfigError(f"{out} cannot be written to; choose another --out")


def write_json(path: Path, content: Any) -> None:
    """Writes JSON under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _without_none(tree: Any) -> Any:
    """TOML has no null: a key without a value is left out, and reads as its default again."""
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree] if isinstance(tree, list | tuple) else tree
