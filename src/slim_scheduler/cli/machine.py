"""`slim doctor`: what this machine has, what would not work, and what to do."""

import typer

from slim_scheduler.cli.options import Json, examples
from slim_scheduler.cli.terminal import console, print_json

MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "problem": "[red]problem[/red]"}


def add(app: typer.Typer) -> None:
    app.command(epilog=examples("slim doctor", "slim doctor --json"))(doctor)


def doctor(as_json: Json = False) -> None:
    """What works on this machine, and what to do."""
    import msgspec

    from slim_scheduler.cli.doctor import examine

    findings = examine()
    if as_json:
        print_json(msgspec.to_builtins(findings))
        return
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
    problems = sum(finding.status == "problem" for finding in findings)
    out.print("everything that is here works" if not problems else f"problems: {problems}")
