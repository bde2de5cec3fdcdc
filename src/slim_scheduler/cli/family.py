"""`slim import`: files of networks become a family that can be served."""

import re
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slim_scheduler.cli.options import Json, examples
from slim_scheduler.cli.terminal import console, print_json, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from slim_scheduler.model.family import FamilyManifest
    from slim_scheduler.model.family_import import Wishes
    from slim_scheduler.setup.config import Config

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="ONNX (.onnx) or torch.export (.pt2), 2 to 16.")]
Labels = Annotated[Path | None, typer.Option("--labels", help="Class names: one per line, or JSON.")]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", metavar="HxW", help="Pixels where a file leaves them open; repeatable.")
]
Layouts = Annotated[list[str] | None, typer.Option("--layout", help="NCHW or NHWC where it is not clear; repeatable.")]
Means = Annotated[
    list[str] | None, typer.Option("--mean", metavar="R,G,B", help="Of pixels from 0 to 1; ImageNet's by default.")
]
Stds = Annotated[list[str] | None, typer.Option("--std", metavar="R,G,B", help="Likewise.")]


def add(app: typer.Typer) -> None:
    app.command(
        "import",
        epilog=examples(
            "slim import --out models/resnets --data val/ resnet18.onnx resnet50.onnx",
            "slim import --out models/lite --data val/ --labels imagenet.txt --mean 0.5 --std 0.5 a.onnx b.onnx",
        ),
    )(import_files)
    app.command(
        "export",
        epilog=examples(
            "slim export models/cifar100 --widths 0.5 --out half.onnx",
            "slim export models/cifar100 --widths 0.25/0.5/0.75/1 --format pt2 --out mixed.pt2",
            "slim export models/resnets --widths 2 --out second.onnx     # a family's rank",
        ),
    )(export_model)


def export_model(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    widths: Annotated[str, typer.Option("--widths", "-w", help="One for all segments, or one each: 0.25/0.5/0.75/1.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The new file.")],
    form: Annotated[str, typer.Option("--format", help="onnx or pt2 (torch.export).")] = "onnx",
) -> None:
    """One network of a model as a file that others run, from image to logits, for any batch size."""
    from slim_scheduler.core.errors import ConfigError, InputError

    try:
        chosen = tuple(float(width) for width in widths.replace("/", ",").split(","))
    except ValueError:
        raise InputError(f"widths {widths} are no numbers; such as --widths 0.5 or --widths 0.25/0.5/0.75/1") from None
    try:
        from slim_scheduler.model.export import export_model as export

        print(export(model, chosen, form, out))
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed; pip install "slim-scheduler[onnx]"') from None


def import_files(
    files: Files,
    out: Annotated[Path, typer.Option("--out", "-o", help="The new model folder; its name is the model's.")],
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Class folders of images, or images without labels; digits; cifar binary."),
    ] = None,
    labels: Labels = None,
    size: Sizes = None,
    layout: Layouts = None,
    mean: Means = None,
    std: Stds = None,
    as_json: Json = False,
) -> None:
    """A family from networks of one task: variants by measured cost, with what each gets right."""
    manifest = run_import(files, out, data, wishes_of(labels, size, layout, mean, std))
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(manifest))
        return
    show_family(manifest)
    console().print(f"family: {out}", soft_wrap=True)


def run_import(files: list[Path], out: Path, data: str | None, wishes: "Wishes") -> "FamilyManifest":
    """`import_family` with progress. Raises ConfigError where the extra is not installed."""
    from slim_scheduler.core.errors import ConfigError

    try:
        from slim_scheduler.model.family_import import import_family
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed; pip install "slim-scheduler[onnx]"') from None
    with progress(f"importing {out.name}") as show:
        return import_family(files, out, data, wishes, lambda share, what: show(share, what))


def found_here(models: list[Path], data: str | None, wishes: "Callable[[], Wishes]", precision: str) -> "Config":
    """A configuration for a model folder, or for files that become a family in the user's cache first."""
    from slim_scheduler.setup.model_names import model_name

    folder = model_folder(models)
    if folder is not None:
        model_name(folder)  # which clients call it by
    return found_for(folder or cached_family(models, data, wishes()), precision)


def model_folder(models: list[Path]) -> Path | None:
    """The one folder that is given; None for files."""
    return models[0] if len(models) == 1 and models[0].is_dir() else None


def found_for(folder: Path, precision: str) -> "Config":
    """A configuration for a model folder on the devices that are here."""
    from slim_scheduler.engine.automatic import automatic_config

    with progress(f"preparing {folder.name}") as show:
        config, said = automatic_config(folder, precision, lambda share, what: show(share, what))
    for line in said:
        print(line, file=sys.stderr, flush=True)
    return config


def cached_family(files: list[Path], data: str | None, wishes: "Wishes") -> Path:
    """The family of these files; imported unless the same files were imported in the same way before."""
    import hashlib

    from slim_scheduler.core.errors import InputError
    from slim_scheduler.model.onnx_file import external_files
    from slim_scheduler.setup.cache import cache_folder
    from slim_scheduler.setup.model_names import LONGEST_NAME

    read: list[Path] = []
    for path in files:
        if not path.is_file():
            raise InputError(f"{path} does not exist; give a model folder, or .onnx or .pt2 files")
        read += [path, *external_files(path)]
    if wishes.labels is not None and wishes.labels.is_file():
        read.append(wishes.labels)
    listing = _listing(Path(data)) if data is not None else []
    digest = hashlib.sha256(repr((data and str(Path(data).resolve()), listing, wishes)).encode())
    for path in read:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    stems = [path.stem for path in files]
    common = "".join(
        letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*stems, strict=False))
    )
    name = re.sub(r"[^A-Za-z0-9]+", "-", common).strip("-")[:LONGEST_NAME].rstrip("-") or "family"
    folder = cache_folder("families") / digest.hexdigest()[:32] / name
    if not folder.is_dir():
        show_family(run_import(files, folder, data, wishes))
    return folder


def _listing(data: Path) -> list[tuple[str, int, int]]:
    """(relative name, bytes, time of change in ns) of a file, or of a folder's; empty for data of a plain name."""
    import os

    found = [data] if data.is_file() else []
    for folder, _, names in os.walk(data, followlinks=True):
        found += [Path(folder) / name for name in names]
    there = [(path, path.stat()) for path in sorted(found) if path.is_file()]
    return [(path.relative_to(data).as_posix(), about.st_size, about.st_mtime_ns) for path, about in there]


def wishes_of(
    labels: Path | None, sizes: list[str] | None, layouts: list[str] | None, means: list[str] | None,
    stds: list[str] | None,
) -> "Wishes":  # fmt: skip
    """The flags as values. Raises InputError, one line."""
    from slim_scheduler.core.errors import ConfigError, InputError

    try:
        from slim_scheduler.model.family_import import Wishes
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed; pip install "slim-scheduler[onnx]"') from None
    for layout in layouts or ():
        if layout not in ("NCHW", "NHWC"):
            raise InputError(f"layout {layout} is not known; give NCHW or NHWC")
    try:
        pixels = [tuple(int(side) for side in text.lower().split("x")) for text in sizes or ()]
        mean, std = ([tuple(float(x) for x in text.split(",")) for text in texts or ()] for texts in (means, stds))
    except ValueError as error:
        raise InputError(
            f"a number cannot be read ({error}); such as --size 224x224 --mean 0.485,0.456,0.406"
        ) from None
    pixels = [side * 2 if len(side) == 1 else side for side in pixels]
    for side in pixels:
        if len(side) != 2 or min(side) < 1:
            raise InputError(f"size {side} is no height and width; such as --size 224x224")
    return Wishes(pixels, layouts or (), mean, std, labels)  # type: ignore[arg-type]


def show_family(manifest: "FamilyManifest") -> None:
    """One row per variant, and what of it is worth knowing."""
    from rich.table import Table

    column = {"accuracy": "accuracy %", "agreement": f"agreement with {manifest.variants[-1].name} %", "nothing": ""}
    table = Table(box=None)
    for title in ("rank", "variant", "input", "ms per item", "weights MB", column[manifest.measured]):
        table.add_column(title, justify="left" if title in ("variant", "input") else "right")
    share = manifest.accuracy.get("test", {})
    best = -1.0
    useless = []
    for rank, variant in enumerate(manifest.variants, 1):
        right = share.get(str(rank))
        if right is not None and right <= best:
            useless.append(variant.name)
        best = max(best, right if right is not None else -1.0)
        said = "" if right is None else f"{100 * right:.2f}"
        height, width = variant.size
        cost, weights = f"{1e3 * variant.cost_s:.2f}", f"{variant.weight_bytes / 1e6:.1f}"
        table.add_row(str(rank), variant.name, f"{height}x{width} {variant.layout}", cost, weights, said)
    out = console()
    out.print(table)
    first = manifest.variants[0]
    if manifest.measured != "nothing":
        out.print(f"{manifest.measured} on: {manifest.data}", soft_wrap=True)
    else:
        out.print("nothing measured: without --data only routers that need no accuracy can serve it", soft_wrap=True)
    normalisation = ", ".join(f"{m:g}/{s:g}" for m, s in zip(first.mean, first.std, strict=True))
    out.print(f"mean/std per channel of {first.name}: {normalisation} (change them with --mean, --std)", soft_wrap=True)
    for name in useless:
        out.print(f"{name} costs more than the ranks before it and is no better here", soft_wrap=True)
