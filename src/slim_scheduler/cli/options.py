"""Options that several commands share, so that they mean and say the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The run's configuration, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key, such as servers.0.max_batch=64; repeatable."),
]
Router = Annotated[
    str | None, typer.Option("--router", "-r", help="Such as jsq:0.5, lp, module:Class; router.name by default.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything left to chance.")]
AllowFallback = Annotated[
    bool, typer.Option("--allow-fallback", help="A router that raises is no error: the fallback decided for it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to (runs/..., replaced, if left out).")]


def examples(*lines: str) -> str:
    """An epilog of example commands, one per line."""
    return "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)
