"""`slim frontier`: the bound as a table, a figure or JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slim_scheduler.cli.options import ConfigFile, Json, Overrides, examples
from slim_scheduler.cli.running import read_config
from slim_scheduler.cli.terminal import console, print_json

if TYPE_CHECKING:
    from slim_scheduler.run.frontier import FrontierPoint
    from slim_scheduler.setup.config import Config


COLUMNS = ("items/s", "of most", "accuracy, %", "known, %", "J per item", "mean widths")
SECOND_PASS = ("two passes, %", "known, %", "J, as accurate as one")


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim frontier --config examples/reference/cluster.toml",
            "slim frontier -c cluster.toml --load 500 --load 900 --accuracies 5 --out runs/frontier",
            "slim frontier -c cluster.toml --rho 0.9 --json",
        )
    )(frontier)


def frontier(
    config: ConfigFile,
    load: Annotated[list[float] | None, typer.Option("--load", help="Items per second; repeatable.")] = None,
    rho: Annotated[float, typer.Option("--rho", help="How busy each device and link may be, above 0 to 1.")] = 1.0,
    accuracies: Annotated[
        int, typer.Option("--accuracies", min=1, help="So many accuracies per load, each with its least energy.")
    ] = 1,
    table: Annotated[str, typer.Option("--table", help="Accuracy table: test or held-out.")] = "test",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for frontier.json and frontier.svg; none if left out.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """The best accuracy that any router can hold at each load, and the least energy it takes: the bound.

    What can be known of it: the plan that is best on held-out images, judged on the test images.
    """
    from slim_scheduler.core.errors import ConfigError
    from slim_scheduler.run.frontier import frontier as points_of
    from slim_scheduler.run.runs import write_json
    from slim_scheduler.setup.accuracy_files import TABLE_FILES, accuracy_path, read_accuracy
    from slim_scheduler.setup.machines import load_profiles, load_shape

    if table not in TABLE_FILES:
        raise ConfigError(f"accuracy table {table} is unknown; available: {', '.join(TABLE_FILES)}")
    settings = read_config(config, overrides)
    shape = load_shape(settings)
    accuracy = read_accuracy(accuracy_path(settings, table))
    profiles = load_profiles(settings, shape)
    other = accuracy_path(settings, "held-out")
    planned_on = read_accuracy(other) if table == "test" and other.is_file() else None
    points = points_of(
        settings, shape, profiles, accuracy, load or (), rho=rho, levels=accuracies, planned_on=planned_on
    )
    content = [point.to_json() for point in points]
    if out is not None:
        from slim_scheduler.report.bound_figure import write_bound_figure

        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "frontier.json", content)
        write_bound_figure(points, out / "frontier.svg")
    if as_json:
        print_json(content)
        return
    _print_table(points)
    if accuracy.agreement:
        console().print(f"Accuracy is {accuracy.agreement}: the images have no labels.", soft_wrap=True)
    if out is not None:
        console().print(f"{out / 'frontier.json'}, {out / 'frontier.svg'}", soft_wrap=True)


def _print_table(points: "list[FrontierPoint]") -> None:
    from rich.table import Table

    most = points[0].max_load_items_s
    table = Table(title=f"The bound: this cluster carries at most {most:,.0f} items/s", title_justify="left")
    for name in (*COLUMNS, *SECOND_PASS):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        load = (f"{point.load_items_s:,.0f}", f"{point.load_items_s / most:.0%}")
        if point.plan is None:
            table.add_row(*load, "cannot be carried")
            continue
        means = [sum(w * s for (_, w), s in by.items()) for _, by in sorted(point.plan.shares().items())]
        mean_widths = " ".join(f"{mean:.2f}" for mean in means)
        best, same = point.again, point.again_same
        twice = (
            ("", "", "")
            if best is None or same is None
            else (_percent(best.accuracy), _percent(point.known_again), f"{same.energy_per_item:.4g}")
        )
        energy = f"{point.plan.energy_per_item:.4g}"
        table.add_row(*load, _percent(point.accuracy), _percent(point.known), energy, mean_widths, *twice)
    console().print(table)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def print_distances(config: "Config", summaries: "Mapping[str, Sequence[dict[str, Any]]]") -> None:
    """How far each router of a comparison is from the bound; a line where that cannot be said."""
    from rich.table import Table

    from slim_scheduler.core.errors import InputError
    from slim_scheduler.run.frontier import distances

    try:
        found = distances(config, summaries)
    except InputError as error:
        console().print(f"[dim]distance from the bound: {error}[/dim]", soft_wrap=True)
        return
    table = Table(title="Distance from the bound (slim frontier) at the load each carried", title_justify="left")
    table.add_column("router")
    for name in ("items/s", "accuracy below the best, points", "energy above the least at its accuracy"):
        table.add_column(name, justify="right")
    for router, far in found.items():
        points = "beyond it" if far.beyond else "–" if far.accuracy is None else f"{100 * far.accuracy:.2f}"
        energy = "" if far.energy is None else f"{far.energy:+.0%}"
        table.add_row(router, f"{far.load_items_s:,.0f}", points, energy)
    console().print(table)
