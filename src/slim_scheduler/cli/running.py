"""`slim simulate`, `slim bench`, `slim report`: one run, and what can be seen of runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slim_scheduler.cli.options import AllowFallback, ConfigFile, Json, Out, Overrides, Router, Seed, examples
from slim_scheduler.cli.terminal import console, print_json, progress

if TYPE_CHECKING:
    from slim_scheduler.setup.config import Config


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim simulate --config examples/demo/cluster.toml --router jsq:0.25 --seed 1 --out runs/jsq",
            "slim simulate -c examples/demo/cluster.toml --set workload.rate=500 --json",
        )
    )(simulate)
    app.command(
        epilog=examples(
            "slim bench --config examples/demo/cluster.toml --router random --out runs/random",
            "slim bench -c examples/demo/cluster.toml -r cost-model:0.5 --set workload.duration_s=10",
        )
    )(bench)
    app.command(epilog=examples("slim report runs/random runs/jsq", "slim report runs/demo --out page.html"))(report)


def simulate(
    config: ConfigFile,
    router: Router = None,
    seed: Seed = 0,
    out: Out = None,
    overrides: Overrides = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """One simulated run of the configured workload."""
    from slim_scheduler.run.runs import simulated_run

    settings = read_config(config, overrides)
    router = router or settings.router.name
    out = out or default_out("simulate", router, seed)
    with progress(f"simulating {router}") as show:
        summary = simulated_run(settings, router, seed, out, show)
    _conclude(summary, out, as_json, allow_fallback)


def bench(
    config: ConfigFile,
    router: Router = None,
    seed: Seed = 0,
    out: Out = None,
    overrides: Overrides = None,
    allow_fallback: AllowFallback = False,
    as_json: Json = False,
) -> None:
    """One live run on this machine's devices."""
    from slim_scheduler.run.runs import live_run

    settings = read_config(config, overrides)
    router = router or settings.router.name
    out = out or default_out("bench", router, seed)
    with progress(f"running {router} live") as show:
        summary = live_run(settings, router, seed, out, show)
    _conclude(summary, out, as_json, allow_fallback)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs' folders, or folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; RUN_DIR/report.html by default.")] = None,
    as_json: Json = False,
) -> None:
    """Tables and figures of runs."""
    from slim_scheduler.report.comparison import Comparison
    from slim_scheduler.report.page import write_report
    from slim_scheduler.report.run_folder import by_router, find_runs

    found = find_runs(runs)
    comparison = Comparison({router: [run.summary for run in of] for router, of in by_router(found).items()})
    page = out or runs[0] / "report.html"
    with progress("drawing"):
        write_report(found, page)
    print_comparison(comparison, as_json)
    if not as_json:
        console().print(f"report: {page}", soft_wrap=True)


def read_config(path: Path, overrides: list[str] | None) -> "Config":
    from slim_scheduler.setup.config import load_config

    return load_config(path, tuple(overrides or ()))


def default_out(command: str, router: str, seed: int) -> Path:
    from slim_scheduler.run.compare import folder_name

    return Path("runs") / command / folder_name(router) / f"seed-{seed}"


def print_comparison(comparison: Any, as_json: bool) -> None:
    """The tables of a comparison, or its JSON."""
    if as_json:
        print_json(comparison.to_json())
        return
    from slim_scheduler.report.notes import notes
    from slim_scheduler.report.terminal import comparison_table, difference_table

    out = console()
    out.print(comparison_table(comparison))
    differences = difference_table(comparison)
    if differences is not None:
        out.print()
        out.print(differences)
    for note in notes([run for runs in comparison.summaries.values() for run in runs]):
        out.print(f"[dim]{note}[/dim]", soft_wrap=True)


def _conclude(summary: dict[str, Any], out: Path, as_json: bool, allow_fallback: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        from slim_scheduler.report.comparison import Comparison

        print_comparison(Comparison({summary["router"]: [summary]}), as_json=False)
        console().print(f"record, summary and configuration: {out}", soft_wrap=True)
    if summary["interrupted"]:
        raise KeyboardInterrupt
    if not allow_fallback:
        from slim_scheduler.report.notes import refuse_raising

        refuse_raising(summary)
