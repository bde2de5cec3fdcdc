"""`slim fit`, `slim accuracy`, `slim measure`: a network, what it gets right, and what it costs on a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slim_scheduler.cli.options import Json, Seed, examples
from slim_scheduler.cli.terminal import console, print_json, progress

if TYPE_CHECKING:
    from slim_scheduler.core.profile import Profile
    from slim_scheduler.model.fit import FitProgress
    from slim_scheduler.model.training_state import EpochRecord
    from slim_scheduler.setup.config import Config

ModelFolder = Annotated[Path, typer.Option("--model", "-m", help="Folder of a checkpoint, as `slim fit` writes it.")]
Data = Annotated[str, typer.Option("--data", "-d", help="digits, a cifar-100-binary folder, or class folders.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda:N, openvino:CPU or onnxruntime:CPU.")]
Precision = Annotated[str, typer.Option("--precision", help="fp32, or bf16 or fp16 where the device has it.")]


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim fit --preset digits --data digits --out models/my-digits",
            "slim fit --data pictures --out models/pictures     # pictures/CLASS/*.png",
            "slim fit --data pictures --size 32 --channels 16,32,64 --blocks 1 --out models/pictures",
            "slim fit --preset cifar100 --data data/cifar-100-binary --out models/cifar100 --device cuda:0",
            "slim fit --preset cifar100-lean --from models/cifar100-lean --data data/cifar-100-binary --out further",
            "slim fit --preset digits --data digits --teacher models/digits --out models/taught",
        )
    )(fit)
    app.command(
        epilog=examples(
            "slim accuracy --model models/digits --data digits --json",
            "slim accuracy --model models/digits --data digits --device openvino:CPU --precision bf16",
        )
    )(accuracy)
    app.command(
        epilog=examples(
            "slim measure --model models/digits --device cpu",
            "slim measure --model models/digits --served examples/demo/cluster.toml",
        )
    )(measure)


def fit(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="Checkpoint folder; an interrupted run there resumes.")],
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            "-p",
            help="digits, digits-small, cifar100, cifar100-lean; by size if left out.",
        ),
    ] = None,
    channels: Annotated[
        str | None, typer.Option("--channels", help="Instead of a preset: of each segment, such as 16,32,64.")
    ] = None,
    segments: Annotated[
        int | None, typer.Option("--segments", min=1, help="How many (4), at most 8; channels double.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option("--blocks", help="Residual blocks of each segment, such as 2,2,1.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Size of class folders' images, 32 or 24x32; theirs if left out.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda:N.")] = "cpu",
    epochs: Annotated[int | None, typer.Option("--epochs", help="Instead of the preset's.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="End on time instead of after epochs.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="A finished network of this preset, to train further.")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="Folder of a stronger network whose answers are learnt from.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Trains a slimmable network, or resumes it."""
    from slim_scheduler.model.fit import fit as train

    with progress(f"training {out.name}") as show:

        def report(step: "FitProgress") -> None:
            last = step.history[-1] if step.history else None
            show(step.share, f"epoch {step.epoch:.1f}, loss {step.loss:.3f}" + (f", {_curve(last)}" if last else ""))

        result = train(
            preset,
            data,
            out,
            channels=_numbers("--channels", channels),
            segments=segments,
            blocks=_numbers("--blocks", blocks),
            size=_size(size),
            seed=seed,
            device=device,
            epochs=epochs,
            minutes=minutes,
            start=start,
            teacher=teacher,
            progress=report,
        )
    if as_json:
        import msgspec

        print_json({"out": str(out), "seconds": result.seconds, "history": msgspec.to_builtins(result.history)})
        return
    console().print(f"trained in {result.seconds:.0f} s: {out}", soft_wrap=True)


def accuracy(
    model: ModelFolder, data: Data, device: Device = "cpu", precision: Precision = "fp32", as_json: Json = False
) -> None:
    """Right or wrong per item for every width tuple, in the precision that serves."""
    from slim_scheduler.engine.slices import slices_of
    from slim_scheduler.model.accuracy import measure_folder
    from slim_scheduler.model.family import is_family

    with progress("measuring accuracy") as show, slices_of(model, device, precision) as load:
        if is_family(model):
            from slim_scheduler.model.family_import import measure_family

            tables = {"test": measure_family(model, data, precision, load, lambda share, what: show(share, what))}
        else:
            tables = measure_folder(
                model,
                data,
                device=device,
                precision=precision,
                load=load,
                progress=lambda split, share: show(share, f"on {split} images"),
            )
    test = tables["test"]
    percentages = test.percentages()
    if as_json:
        print_json({"items": test.items, "top1": percentages})
        return
    from rich.table import Table

    from slim_scheduler.setup.accuracy_files import table_file

    table = Table(box=None)
    table.add_column("widths")
    table.add_column("%", justify="right")
    uniform = [(width,) * test.segments for width in test.widths]
    for widths in dict.fromkeys([*uniform, min(test.tuples, key=test.top1), max(test.tuples, key=test.top1)]):
        table.add_row("/".join(f"{w:g}" for w in widths), f"{100 * test.top1(widths):.2f}")
    what = (
        f"in {precision}, {test.items:,} images: {test.data}"
        if test.agreement
        else (f"top-1 in {precision} on {test.items:,} test images of {test.data}")
    )
    console().print(what)
    console().print(table)
    path = model / table_file("test", precision)
    console().print(f"all {len(test.tuples)} width tuples: {path}", soft_wrap=True)


def measure(
    model: ModelFolder,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Profile; profiles/DEVICE-MODEL.json by default.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of the server.")] = 1,
    busy: Annotated[int, typer.Option("--busy", min=0, help="Further servers that compute meanwhile.")] = 0,
    precision: Precision = "fp32",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds over all points, 4 runs each or more.")] = 5,
    memory_gib: Annotated[
        float,
        typer.Option("--memory-gib", min=0.00001, help="For all instances and a batch; larger batches are left out."),
    ] = 8.0,
    served: Annotated[
        Path | None,
        typer.Option("--served", help="Scaled to what batches take while this configuration's servers serve."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A device's profile: latency, memory and power."""
    from slim_scheduler.engine.measure import measure as take
    from slim_scheduler.run.runs import make_folder
    from slim_scheduler.setup.config import load_config
    from slim_scheduler.setup.profiles import profile_name, write_profile

    if out is not None:
        make_folder(out.parent)
    settings = load_config(served, (f"model.path={model}",)) if served is not None else None
    with progress(f"measuring {device}") as show:
        profile = take(
            model,
            device,
            threads=threads,
            slowdowns=(1.0,) * (1 + busy),
            rounds=rounds,
            memory_gib=memory_gib,
            precision=precision,
            progress=lambda done, of: show(done / of),
        )
    if settings is not None:
        profile = _served(settings, profile)
    path = out or Path("profiles") / profile_name(device, precision, profile.model)
    write_profile(profile, path)
    if as_json:
        print(path.read_text())
        return
    from rich.table import Table

    table = Table(box=None)
    table.add_column("segment")
    table.add_column("width", justify="right")
    for size in profile.batches:
        table.add_column(f"batch {size}", justify="right")
    for row in profile.latency_rows:
        if row.previous_width in (None, row.width):
            table.add_row(str(row.segment), f"{row.width:g}", *(f"{1000 * seconds:.2f}" for seconds in row.mean))
    console().print(f"{profile.model} on {profile.device}, ms per batch (mean)")
    console().print(table)
    console().print(f"power: {profile.power_source} · {profile.notes} · profile: {path}", soft_wrap=True)


def _served(settings: "Config", profile: "Profile") -> "Profile":
    import tempfile

    from msgspec.structs import replace

    from slim_scheduler.engine.served import as_served
    from slim_scheduler.setup.profiles import write_profile

    with progress("measuring while it serves") as show, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_profile(profile, path)
        servers = tuple(replace(server, profile=str(path)) for server in settings.servers)
        return as_served(replace(settings, servers=servers), profile, show)


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    from slim_scheduler.core.errors import InputError

    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"{option} {text} is no list of whole numbers; such as 16,32,64") from None


def _size(text: str | None) -> tuple[int, int] | None:
    """(height, width) of `32` or `24x32`."""
    from slim_scheduler.core.errors import InputError

    if text is None:
        return None
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise InputError(f"--size {text} is no size; give 32, or height and width as 24x32")
    return int(sides[0]), int(sides[-1])


def _curve(last: "EpochRecord") -> str:
    return ", ".join(f"{widths} {100 * share:.1f} %" for widths, share in last.top1.items())
