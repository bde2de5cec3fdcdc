"""`slim compare` and `slim demo`: several routers on the same workloads."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slim_scheduler.cli.bound import print_distances
from slim_scheduler.cli.options import AllowFallback, ConfigFile, Json, Out, Overrides, Seed, examples
from slim_scheduler.cli.running import print_comparison, read_config
from slim_scheduler.cli.terminal import console, progress

if TYPE_CHECKING:
    from slim_scheduler.run.compare import Finished
    from slim_scheduler.setup.config import Config

DEMO = Path("examples/demo")
PROFILE_BATCHES = (1, 4, 16, 32)
PROFILE_ROUNDS = 2
CLONE = Path(__file__).parents[3]  # where an editable install finds what is not part of the package


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim compare --config examples/demo/cluster.toml --routers random,jsq:0.25 --seeds 10 --out runs/compare",
            "slim compare -c examples/demo/cluster.toml --routers jsq:0.5,cost-model:0.5 --seeds 3 --live",
        )
    )(compare)


def add_demo(app: typer.Typer) -> None:
    app.command(epilog=examples("slim demo", "slim demo --seed 2 --out runs/again"))(demo)


def compare(
    config: ConfigFile,
    routers: Annotated[
        str, typer.Option("--routers", help="Router names, separated by commas; the first is the base.")
    ],
    seeds: Annotated[int, typer.Option("--seeds", help="How many workloads each router gets.")] = 10,
    seed: Seed = 0,
    out: Out = None,
    live: Annotated[bool, typer.Option("--live", help="On this machine's devices, routers interleaved.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes of simulated runs; one per core by default.")
    ] = None,
    overrides: Overrides = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """Several routers on the same workloads."""
    from slim_scheduler.core.errors import ConfigError
    from slim_scheduler.run.compare import run_live, run_simulated, trials
    from slim_scheduler.setup.routers import parse_router

    if live and workers is not None:
        raise ConfigError(f"--workers {workers} beside --live would change nothing: live runs take turns; leave it out")
    settings = read_config(config, overrides)
    out = out or Path("runs/compare")
    names = [parse_router(name.strip()).text for name in routers.split(",") if name.strip()]
    plan = trials(names, range(seed, seed + seeds), out)
    with progress("comparing") as show:
        runs = run_live(settings, plan, show) if live else run_simulated(settings, plan, workers, show)
        finished, interrupted = _until_interrupted(runs, allow_fallback)
    title = "Slim Scheduler comparison"
    if interrupted:
        done = sum(not run.summary["interrupted"] for run in finished)
        title += f", interrupted after {done} of {len(plan)} runs"
        print(f"interrupted: {done} of {len(plan)} runs are whole; the same command begins anew", file=sys.stderr)
    _conclude(names, finished, out, as_json, title)
    if not as_json and finished:
        whole = [run for run in finished if not run.summary["interrupted"]]
        ran = dict.fromkeys(run.trial.router for run in whole)
        print_distances(settings, {router: [r.summary for r in whole if r.trial.router == router] for router in ran})
    if interrupted:
        raise KeyboardInterrupt


def demo(
    out: Out = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many days each router gets.")] = 1,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Four routers through a day of 50 s: three unequal live servers, real images, a surge."""
    from slim_scheduler.core.errors import ConfigError
    from slim_scheduler.engine.priority import real_time
    from slim_scheduler.run.compare import run_live, trials

    out = (out or Path("runs/demo")).absolute()
    if not DEMO.is_dir():
        if not (CLONE / DEMO).is_dir():
            raise ConfigError(f"{DEMO} is not here; run the demo from the root of a clone of Slim Scheduler")
        os.chdir(CLONE)  # the demo's configuration names its model from the clone's root
    settings = read_config(DEMO / "day.toml", overrides)
    lines = (DEMO / "routers.txt").read_text().splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    plan = trials(names, range(seed, seed + seeds), out)
    with real_time():  # its servers are slowed down, and take a third of a core together
        settings = _measured(settings, out / "profile.json")
        with progress("demo") as show:
            finished, interrupted = _until_interrupted(run_live(settings, plan, show))
    _conclude(names, finished, out, as_json, "Slim Scheduler demo")
    if interrupted:
        raise KeyboardInterrupt


def _measured(settings: "Config", path: Path) -> "Config":
    """The configuration with a profile of this machine, to which its servers keep; its load is in multiples of that."""
    from msgspec.structs import replace

    from slim_scheduler.engine.measure import measure
    from slim_scheduler.setup.profiles import write_profile

    with progress("measuring this machine") as show:
        profile = measure(
            settings.model.path,
            settings.servers[0].device,
            batches=PROFILE_BATCHES,
            slowdowns=[server.slowdown for server in settings.servers],
            rounds=PROFILE_ROUNDS,
            progress=lambda done, of: show(done / of),
        )
    write_profile(profile, path)
    return replace(settings, servers=tuple(replace(server, profile=str(path)) for server in settings.servers))


def _until_interrupted(runs: "Iterable[Finished]", allow_fallback: bool = False) -> tuple[list["Finished"], bool]:
    from slim_scheduler.report.notes import refuse_raising

    finished: list[Finished] = []
    try:
        for run in runs:
            if not allow_fallback:
                refuse_raising(run.summary)
            finished.append(run)
    except KeyboardInterrupt:
        return finished, True
    return finished, False


def _conclude(routers: Sequence[str], finished: "Sequence[Finished]", out: Path, as_json: bool, title: str) -> None:
    """Writes compare.json and the page, and prints the tables, of the runs that came to their end."""
    from slim_scheduler.report.comparison import Comparison
    from slim_scheduler.report.page import write_report
    from slim_scheduler.report.run_folder import RunFolder
    from slim_scheduler.run.runs import write_json

    whole = sorted(
        (run for run in finished if not run.summary["interrupted"]),
        key=lambda run: (routers.index(run.trial.router), run.trial.seed),
    )
    if not whole:
        return
    summaries = {
        router: [run.summary for run in whole if run.trial.router == router]
        for router in dict.fromkeys(run.trial.router for run in whole)
    }
    comparison = Comparison(summaries)
    write_json(out / "compare.json", comparison.to_json())
    with progress("drawing"):
        write_report([RunFolder(run.trial.out) for run in whole], out / "report.html", title)
    print_comparison(comparison, as_json)
    if not as_json:
        console().print(f"report: {out / 'report.html'}", soft_wrap=True)
