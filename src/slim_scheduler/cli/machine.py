"""`slim doctor`: what this machine has or a configuration means, what would not work, and what to do."""

from pathlib import Path
from typing import Annotated

import typer

from slim_scheduler.cli.options import Json, Overrides, examples
from slim_scheduler.cli.terminal import console, print_json, progress

MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "problem": "[red]problem[/red]"}


def add(app: typer.Typer) -> None:
    lines = (
        "slim doctor",
        "slim doctor --json",
        "slim doctor -c examples/demo/cluster.toml --set router.name=lp",
    )
    app.command(epilog=examples(*lines))(doctor)


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Instead of the machine: what this configuration means.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """What works on this machine, or what a configuration means, and what to do.

    With --config the exit code is 2 where something keeps it from being served. Devices and precisions that are "auto"
    are tried once, as `slim serve` would.
    """
    import msgspec

    from slim_scheduler.core.errors import ConfigError

    if config is None and overrides:
        raise ConfigError(f"--set {overrides[0]} is given without --config; give the configuration whose key it is")
    if config is None:
        from slim_scheduler.cli.doctor import examine

        findings, works = examine(), "everything that is here works"
    else:
        from slim_scheduler.cli.explanation import explain
        from slim_scheduler.setup.config import load_config

        read = load_config(config, tuple(overrides or ()))
        with progress("looking") as show:
            findings, works = explain(read, show), "this configuration can be served"
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print_json(msgspec.to_builtins(findings))
        raise typer.Exit(2 if problems and config is not None else 0)
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        advice = f"\n[dim]→ {escape(finding.advice)}[/dim]" if finding.advice else ""
        table.add_row(MARKS[finding.status], escape(finding.subject), escape(finding.found) + advice)
    out = console()
    out.print(table)
    out.print(works if not problems else f"problems: {problems}")
    if problems and config is not None:
        raise typer.Exit(2)
