"""`slim train`: a router learned in simulation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slim_scheduler.cli.options import ConfigFile, Json, Overrides, Seed, examples
from slim_scheduler.cli.running import read_config
from slim_scheduler.cli.terminal import console, print_json, progress

if TYPE_CHECKING:
    from slim_scheduler.training.curves import UpdateReport


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim train --config examples/demo/cluster.toml --out runs/policy",
            "slim train -c examples/demo/cluster.toml --set training.decisions=100000 --out runs/policy",
            "slim train -c examples/demo/cluster.toml --preset efficiency --out runs/efficiency",
            "slim simulate -c examples/demo/cluster.toml --router ppo:runs/policy",
        )
    )(train)


def train(
    config: ConfigFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="The policy's folder; a run stopped there is resumed.")],
    seed: Seed = 0,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="Reward weights and settings: a TOML file, or its name beside --config."),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Trains a router for the configured cluster, in simulation; resumes what is in --out."""
    from slim_scheduler.setup.config import with_overrides, with_preset

    settings = read_config(config, None)
    if preset is not None:
        settings = with_preset(settings, config.parent, preset)
    settings = with_overrides(settings, overrides or ())  # a flag has the last word
    warned: set[str] = set()
    with progress("training") as show:
        from slim_scheduler.training.curves import warnings
        from slim_scheduler.training.ppo import train

        def report(update: "UpdateReport") -> None:
            what = "imitating" if update.imitating else f"reward {update.reward:+.4f}"
            show((update.update + 1) / update.updates, f"{what}, {update.decisions_per_s:,.0f} decisions/s")
            for warning in warnings(update):
                kind = warning.rpartition(":")[2]
                if kind not in warned and update.update > update.updates // 4:
                    warned.add(kind)
                    typer.echo(f"warning: {warning}", err=True)

        manifest = train(settings, out, seed, report)
    if as_json:
        print_json(manifest.training)
    else:
        console().print(
            f"policy: {out} (use it with --router ppo:{out}; curves in {out / 'curves.csv'})", soft_wrap=True
        )
