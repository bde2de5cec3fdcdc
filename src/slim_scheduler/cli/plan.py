"""`slim plan`: which servers a recorded load needs, and what each more costs or gives."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slim_scheduler.cli.options import Json, Overrides, examples
from slim_scheduler.cli.terminal import console, print_json, progress

if TYPE_CHECKING:
    from slim_scheduler.run.sizing import ServerSet, Sizing, TraceLoad
    from slim_scheduler.setup.config import Config


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim plan models/resnets --trace requests.csv --slo 100 --accuracy 0.75",
            "slim plan --config cluster.toml --trace requests.csv --slo 50 --accuracy 0.72 --json",
        )
    )(plan)


def plan(
    trace: Annotated[Path, typer.Option("--trace", help="CSV or Parquet with a column arrival_s, a row per request.")],
    slo: Annotated[float, typer.Option("--slo", help="Milliseconds in which every item is to be answered.")],
    accuracy: Annotated[float, typer.Option("--accuracy", help="Mean accuracy over the trace, 0 to 1.")],
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="A model folder, on the devices that are here.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The servers that there are, a TOML file.")
    ] = None,
    items: Annotated[int, typer.Option("--items", min=1, help="Images per request.")] = 1,
    rho: Annotated[
        float | None,
        typer.Option("--rho", help="How busy each device may be, to 1; 0.89 if left out."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Without --config: fp32 (if left out), bf16, fp16 or auto.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Which of the servers a recorded load needs, by the bound, and what each more costs or gives."""
    from slim_scheduler.cli.family import found_for
    from slim_scheduler.core.errors import ConfigError
    from slim_scheduler.core.router.plan.plans import RHO
    from slim_scheduler.run.sizing import check_accuracy, size, trace_load
    from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
    from slim_scheduler.setup.config import load_config, with_overrides
    from slim_scheduler.setup.machines import load_profiles, load_shape
    from slim_scheduler.setup.workload import read_trace

    if (model is None) == (config is None):
        raise ConfigError("give a model folder, or --config FILE with the servers that there are")
    if config is not None and precision is not None:
        raise ConfigError("--precision is for a model folder; with --config, set the servers' precision in the file")
    check_accuracy(accuracy)
    load = trace_load(read_trace(trace), slo / 1e3, items)
    settings: Config
    if config is not None:
        settings = load_config(config, tuple(overrides or ()))
    else:
        assert model is not None
        settings = with_overrides(found_for(model, precision or "fp32"), overrides or ())
    shape = load_shape(settings)
    table = read_accuracy(accuracy_path(settings))
    with progress("asking the bound") as show:
        sizing = size(
            settings,
            shape,
            load_profiles(settings, shape),
            table,
            load,
            accuracy,
            rho=RHO if rho is None else rho,
            progress=lambda done, total: show(done / total),
        )
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(sizing))
        return
    _print_load(load)
    _print_sizing(sizing)
    if table.agreement:
        console().print(f"Accuracy is {table.agreement}: the images have no labels.", soft_wrap=True)


def _print_load(load: "TraceLoad") -> None:
    console().print(
        f"{load.items:,} items in {load.seconds:,.0f} s: {load.mean:,.1f} items/s on the mean; at most "
        f"{1e3 * load.slo:g} ms each takes {load.peak:,.1f} items/s at the fastest stretch",
        soft_wrap=True,
    )


def _print_sizing(sizing: "Sizing") -> None:
    from rich.table import Table

    table = Table(title=f"The bound, every device at most {sizing.rho:.0%} busy", title_justify="left")
    table.add_column("servers")
    for name in ("carries, items/s", "accuracy, %", "W then", f"W at {100 * sizing.accuracy:g} %"):
        table.add_column(name, justify="right")
    table.add_column("")
    needed = sizing.needed

    def row(label: str, of: "ServerSet", note: str) -> None:
        numbers = (f"{100 * of.accuracy:.2f}", f"{of.power:.1f}") if of.accuracy is not None and of.power else ("", "")
        least = "" if of.least_power is None else f"{of.least_power:.1f}"
        table.add_row(label, f"{of.max_load:,.1f}", *numbers, least, note)

    if needed is None:
        row("all: " + ", ".join(sizing.everything.servers), sizing.everything, _lacks(sizing, sizing.everything))
    else:
        row("needed: " + ", ".join(needed.servers), needed, "enough")
        for name, rest in sizing.without.items():
            row(f"  without {name}", rest, _lacks(sizing, rest))
        for name, more in sizing.further.items():
            row(f"  and {name}", more, _gains(needed, more))
    console().print(table)
    if needed is None:
        console().print("All servers together are not enough: no router can do it with them.")
    console().print(
        "[dim]Bounds: no router does better. Full batches, no queueing beyond the SLO, no memory limit.[/dim]",
        soft_wrap=True,
    )


def _lacks(sizing: "Sizing", of: "ServerSet") -> str:
    """Why a set is not enough."""
    if not of.servers:
        return "nothing left"
    if of.accuracy is None:
        return f"too slow by {sizing.load.peak - of.max_load:,.1f} items/s"
    return f"{100 * (sizing.accuracy - of.accuracy):.2f} points short"


def _gains(needed: "ServerSet", more: "ServerSet") -> str:
    """What a further server gives and costs, against the needed ones."""
    assert needed.accuracy is not None
    assert more.accuracy is not None
    assert needed.least_power is not None
    assert more.least_power is not None
    points = 100 * (more.accuracy - needed.accuracy)
    watts = more.least_power - needed.least_power
    return f"{points:+.2f} points at best, {more.max_load - needed.max_load:+,.1f} items/s, {watts:+.1f} W"
