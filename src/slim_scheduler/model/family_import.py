"""Makes a family from files of networks: checks them, measures cost and accuracy, writes one folder, or nothing.

Order of work: every file is checked before any is run; then variants are ranked by measured cost; then images decide
what each rank gets right. Without labels a rank's share is its agreement with the last one, and is called so.
"""

import contextlib
import json
import math
import os
import re
import shutil
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from slim_scheduler.core.accuracy import AGREEMENT, AccuracyTable
from slim_scheduler.core.errors import DataError, InputError, first_line
from slim_scheduler.model.accuracy import Answers, LoadSlice, table_margins
from slim_scheduler.model.calibration import fit_calibration
from slim_scheduler.model.data import IMAGE_SUFFIXES, load_data, read_image
from slim_scheduler.model.exported_program import is_zip, onnx_of_exported_program
from slim_scheduler.model.family import (
    FORMAT,
    MANIFEST,
    Family,
    FamilyManifest,
    Measured,
    Variant,
    family_shape,
    load_family,
)
from slim_scheduler.model.graph_session import GraphSession
from slim_scheduler.model.onnx_file import Graph, Layout, check_onnx, read_onnx, sha256, with_any_batch
from slim_scheduler.model.precision import in_precision
from slim_scheduler.setup.accuracy_files import TABLE_FILES, table_file, write_accuracy
from slim_scheduler.setup.model_names import model_name

MOST_VARIANTS = 16
COST_BATCH = 4
COST_RUNS = 5  # at least
COST_SECONDS = 0.2  # per network, at least: of brief runs there must be some that nothing disturbs
BATCH = 16  # images through all variants at a time
SAME_ANSWER = 1e-2  # between a graph's scores at one batch size and at another, of the largest score
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_LABELS_BYTES = 4 << 20

T = TypeVar("T")
Progress = Callable[[float, str], None]  # share done, what is being done


class Wishes(NamedTuple):
    """What the caller says that files may leave open; each one value for all files, or one per file."""

    sizes: Sequence[tuple[int, int]] = ()
    layouts: Sequence[Layout] = ()
    means: Sequence[tuple[float, ...]] = ()
    stds: Sequence[tuple[float, ...]] = ()
    labels: Path | None = None


NO_WISHES = Wishes()


class _Candidate(NamedTuple):
    """A checked file, not yet ranked."""

    path: Path
    source: str
    graph: Graph
    mean: tuple[float, ...]
    std: tuple[float, ...]
    cost_s: float = 0.0


def import_family(
    files: Sequence[Path],
    out: Path,
    data: str | None,
    wishes: Wishes = NO_WISHES,
    progress: Progress = lambda share, what: None,
) -> FamilyManifest:
    """Writes the family of `files` to the new folder `out`. Raises InputError, one line, and leaves nothing behind."""
    model_name(out)
    if out.exists():
        raise InputError(f"{out} exists already; give another --out, or remove it")
    candidates = _checked(files, wishes, progress)
    labels = _labels(candidates, wishes.labels)
    ranked = _by_cost(candidates, progress)
    unfinished = out.parent / f".{out.name}.{os.getpid()}.partial"
    made = [folder for folder in out.parents if not folder.exists()]  # the innermost first
    try:
        unfinished.mkdir(parents=True)
        manifest = _written(unfinished, out.name, ranked, labels)
        if data is not None:
            family = Family(out.name, manifest, tuple(candidate.graph.content for candidate in ranked))
            table, manifest = _measured(
                family, data, labels is not None, "fp32", partial(family.slice, device="cpu"), progress
            )
            write_accuracy(table, unfinished / TABLE_FILES["test"])
        _write_manifest(manifest, unfinished)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        for folder in made if not out.exists() else ():
            with contextlib.suppress(OSError):  # somebody else put something into it
                folder.rmdir()
    return manifest


def measure_family(
    folder: Path,
    data: str,
    precision: str = "fp32",
    load: LoadSlice | None = None,
    progress: Progress = lambda share, what: None,
) -> AccuracyTable:
    """What the ranks of an imported family get right, written beside it, fp32's also in its manifest. `load` gives
    ranks on an execution engine. Raises InputError."""
    family = load_family(folder)
    named = family.manifest.classes != _numbered(family.classes)
    load = load or partial(in_precision(family, precision).slice, device="cpu")
    table, manifest = _measured(family, data, named, precision, load, progress)
    write_accuracy(table, folder / table_file("test", precision))
    if precision == "fp32":
        _write_manifest(manifest, folder)
    return table


def _write_manifest(manifest: FamilyManifest, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _numbered(classes: int) -> tuple[str, ...]:
    return tuple(str(label) for label in range(classes))


# ---- files


def _checked(files: Sequence[Path], wishes: Wishes, progress: Progress) -> list[_Candidate]:
    if not 2 <= len(files) <= MOST_VARIANTS:
        raise InputError(
            f"{len(files)} file is given; a family has 2 to {MOST_VARIANTS} variants, one file each"
            if len(files) == 1
            else f"{len(files)} files are given; a family has 2 to {MOST_VARIANTS}"
        )
    for name, values in zip(Wishes._fields, wishes[:-1], strict=False):
        if len(values) not in (0, 1, len(files)):
            raise InputError(f"{len(values)} {name} are given for {len(files)} files; give one for all, or one each")
    candidates: list[_Candidate] = []
    seen: dict[str, Path] = {}
    for i, path in enumerate(files):
        progress(0.1 * i / len(files), f"checking {path.name}")
        source, graph = _read(path, _of(wishes.sizes, i), _of(wishes.layouts, i))
        digest = sha256(graph.content)
        if digest in seen:
            raise InputError(f"{path.name} holds the same network as {seen[digest].name}; give each variant once")
        seen[digest] = path
        mean, std = _normalization(path, graph, _of(wishes.means, i), _of(wishes.stds, i))
        candidates.append(_Candidate(path, source, graph, mean, std))
    first = candidates[0]
    for other in candidates[1:]:
        for what in ("classes", "channels"):
            mine, its = getattr(first.graph.facts, what), getattr(other.graph.facts, what)
            if mine != its:
                raise InputError(
                    f"{other.path.name} has {its} {what} and {first.path.name} {mine}; variants share them"
                )
    return [_with_open_batch(candidate) for candidate in candidates]


def _read(path: Path, size: tuple[int, int] | None, layout: Layout | None) -> tuple[str, Graph]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}; give ONNX (.onnx) or torch.export (.pt2) files")
    with path.open("rb") as file:
        head = file.read(4)
    if head[:1] == b"\x80":
        raise InputError(
            f"{path.name}: is a pickle, which is never loaded; export the network to ONNX, or with "
            "torch.export.save (.pt2)"
        )
    if not is_zip(head):
        return "onnx", read_onnx(path, size, layout)
    return "torch.export", check_onnx(path, onnx_of_exported_program(path), size, layout)


def _normalization(
    path: Path, graph: Graph, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """From flags, else from the file's metadata, else ImageNet's for colours and none for grey and raw pixels."""
    channels = graph.facts.channels
    if graph.facts.dtype == "uint8":
        default = (0.0,) * channels, (1.0,) * channels
    elif channels == 3:
        default = IMAGENET_MEAN, IMAGENET_STD
    else:
        default = (0.0,) * channels, (1.0,) * channels
    found = []
    for name, said, otherwise in (("mean", mean, default[0]), ("std", std, default[1])):
        values = said or _numbers(graph.metadata.get(name)) or otherwise
        values = values * channels if len(values) == 1 else values
        if len(values) != channels or not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
            raise InputError(f"{path.name}: {name} {values} does not fit {channels} channels; give --{name} as numbers")
        found.append(tuple(values))
    return found[0], found[1]


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return tuple(float(part) for part in text.strip("[]() ").split(",")) if text else None
    except ValueError:
        return None


def _with_open_batch(candidate: _Candidate) -> _Candidate:
    """Lets a graph with a fixed batch size take any, where its scores are the same then."""
    graph = candidate.graph
    facts = graph.facts
    open_graph = with_any_batch(graph) if facts.batch else graph
    images = _random_images(graph, 3)
    try:
        together = GraphSession(open_graph.content, 1, name=candidate.path.name).run(images)
    except InputError:
        if not facts.batch:
            raise
        together = np.empty((0, 0), np.float32)
    except Exception as error:  # ONNX Runtime's own kinds share no base but this
        if not facts.batch:
            raise InputError(f"{candidate.path.name}: does not run on 3 images ({first_line(error)})") from None
        together = np.empty((0, 0), np.float32)
    try:
        session = GraphSession(graph.content, 1, batch=facts.batch or 1, name=candidate.path.name)
        apart, again = session.run(images), session.run(images)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{candidate.path.name}: does not run on an image ({first_line(error)})") from None
    if not np.isfinite(apart).all():
        raise InputError(f"{candidate.path.name}: gives scores that are not finite numbers; export it again")
    if np.abs(again - apart).max() > SAME_ANSWER * np.abs(apart).max():
        raise InputError(
            f"{candidate.path.name}: answers one image differently each time; export it in evaluation mode, without "
            "dropout or random numbers"
        )
    if together.shape == apart.shape and np.abs(together - apart).max() <= SAME_ANSWER * np.abs(apart).max():
        return candidate._replace(graph=open_graph)
    if not facts.batch:  # it says that it takes any batch, and mixes its items
        return candidate._replace(graph=Graph(msgspec.structs.replace(facts, batch=1), graph.content, graph.metadata))
    return candidate


def _by_cost(candidates: list[_Candidate], progress: Progress) -> list[_Candidate]:
    """Cheapest first, by seconds per item on one thread: the least of many runs in turns, because a disturbance only
    adds."""
    sessions = [GraphSession(c.graph.content, 1, batch=c.graph.facts.batch, name=c.path.name) for c in candidates]
    images = [_random_images(c.graph, COST_BATCH) for c in candidates]
    seconds: list[list[float]] = [[] for _ in candidates]
    run, end = 0, time.perf_counter() + COST_SECONDS * len(candidates)
    while run <= COST_RUNS or time.perf_counter() < end:
        for i, session in enumerate(sessions):
            if run <= COST_RUNS:
                progress(0.1 + 0.1 * (run + i / len(sessions)) / (COST_RUNS + 1), f"timing {candidates[i].path.name}")
            begin = time.perf_counter()
            session.run(images[i])
            seconds[i].append((time.perf_counter() - begin) / COST_BATCH)
        run += 1
    timed = [c._replace(cost_s=min(s[1:])) for c, s in zip(candidates, seconds, strict=True)]
    return sorted(timed, key=lambda c: c.cost_s)


def _random_images(graph: Graph, count: int) -> npt.NDArray[np.generic]:
    facts = graph.facts
    shape = (facts.channels, *facts.size) if facts.layout == "NCHW" else (*facts.size, facts.channels)
    pixels = np.random.default_rng(0).uniform(0, 1, (count, *shape))
    return (pixels * 255).astype(np.uint8) if facts.dtype == "uint8" else pixels.astype(facts.dtype)


def _written(folder: Path, name: str, ranked: list[_Candidate], labels: tuple[str, ...] | None) -> FamilyManifest:
    """Writes the graphs; the manifest comes last, when everything is measured."""
    variants = []
    stems = [candidate.path.stem for candidate in ranked]
    for rank, candidate in enumerate(ranked, 1):
        facts, content = candidate.graph.facts, candidate.graph.content
        # Files of one name, each in a folder of its own, take its name too.
        parts = candidate.path.resolve().parent.name, candidate.path.stem
        name_here = "-".join(parts) if stems.count(candidate.path.stem) > 1 else candidate.path.stem
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", name_here)[:60]
        file = f"{rank}-{stem}.onnx"
        (folder / file).write_bytes(content)
        variants.append(
            Variant(
                name=stem,
                file=file,
                sha256=sha256(content),
                bytes=len(content),
                source=candidate.source,  # type: ignore[arg-type]
                dtype=facts.dtype,
                layout=facts.layout,
                size=facts.size,
                batch=facts.batch,
                mean=candidate.mean,
                std=candidate.std,
                weight_bytes=facts.weight_bytes,
                workspace_bytes=facts.workspace_bytes,
                macs=facts.macs,
                cost_s=candidate.cost_s,
            )
        )
    last, facts = variants[-1], ranked[-1].graph.facts
    largest = max(variants, key=lambda v: math.prod(v.size)).size
    item_shape = (facts.channels, *largest)
    raw = last.dtype == "uint8"
    return FamilyManifest(
        format=FORMAT,
        kind="family",
        shape=family_shape(name, tuple(variants), item_shape, facts.classes),
        classes=labels or _numbered(facts.classes),
        mean=(0.0,) * facts.channels if raw else last.mean,
        std=(1.0,) * facts.channels if raw else last.std,
        variants=tuple(variants),
    )


# ---- labels and images


def _labels(candidates: list[_Candidate], given: Path | None) -> tuple[str, ...] | None:
    """Class names from a file, else from the networks' metadata; None where nobody says them."""
    classes = candidates[0].graph.facts.classes
    if given is not None:
        if not given.is_file() or given.stat().st_size > MOST_LABELS_BYTES:
            raise InputError(f"labels {given} is no file of at most {MOST_LABELS_BYTES} bytes; one class name per line")
        try:
            names = _names(given.read_text())
        except UnicodeDecodeError:
            raise InputError(f"labels {given} is no text in UTF-8; one class name per line") from None
        if names is None or len(names) != classes:
            raise InputError(f"labels {given} has {len(names or ())} names, the networks have {classes} classes")
        return names
    for candidate in candidates:
        for key in ("labels", "classes", "names"):
            names = _names(candidate.graph.metadata.get(key, ""))
            if names is not None and len(names) == classes:
                return names
    return None


def _names(text: str) -> tuple[str, ...] | None:
    """Names from a JSON list, a JSON object by index, or one per line."""
    if not text.strip():
        return None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return tuple(line.strip() for line in text.splitlines() if line.strip())
    if isinstance(tree, dict) and all(str(i) in tree for i in range(len(tree))):
        tree = [tree[str(i)] for i in range(len(tree))]
    names = tuple(map(str, tree)) if isinstance(tree, list) else ()
    try:
        "".join(names).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return names or None


@dataclass(frozen=True, slots=True)
class _Images:
    """Images to measure on, in batches, with their labels; None where they have none."""

    name: str
    count: int
    labels: npt.NDArray[np.int64] | None
    batches: Callable[[], Iterator[npt.NDArray[np.uint8]]]
    classes: tuple[str, ...] | None = None


def _images(data: str, manifest: FamilyManifest, named: bool) -> _Images:
    """`digits`, CIFAR's binary layout, class folders, or a folder of images without labels."""
    shape = manifest.shape.item_shape
    path = Path(data)
    if data == "digits" or path.name.endswith(".tar.gz") or (path / "test.bin").exists():
        loaded = load_data(data, shape)
        if len(loaded.classes) != manifest.shape.classes:
            raise DataError(
                f"data {loaded.name} has {len(loaded.classes)} classes, the networks have {manifest.shape.classes}"
            )
        pixels = loaded.test.pixels

        def parts() -> Iterator[npt.NDArray[np.uint8]]:
            for start in range(0, len(pixels), BATCH):
                yield pixels[start : start + BATCH]

        return _Images(loaded.name, len(pixels), loaded.test.labels, parts, loaded.classes)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise DataError(f"data {data} {what}; give `digits`, class folders of images, or a folder of images")
    root = path / "test" if (path / "test").is_dir() and (path / "train").is_dir() else path
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    files: list[Path] = []
    labels: list[int] = []
    classes = None
    if folders:
        names = [folder.name for folder in folders]
        index, classes = _class_index(path, names, manifest, named)
        for folder in folders:
            found = _image_files(folder)
            files += found
            labels += [index[folder.name]] * len(found)
    else:
        files = _image_files(root)
    if not files:
        raise DataError(f"data {data} has no images ({', '.join(IMAGE_SUFFIXES)})")

    def batches() -> Iterator[npt.NDArray[np.uint8]]:
        for start in range(0, len(files), BATCH):
            yield np.stack([read_image(file, shape) for file in files[start : start + BATCH]])  # type: ignore[arg-type]

    return _Images(path.name, len(files), np.array(labels, np.int64) if folders else None, batches, classes)


def _class_index(
    path: Path, names: list[str], manifest: FamilyManifest, named: bool
) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """Which class each folder is: by label, by number, or, where there are as many as classes, in sorted order."""
    classes = manifest.shape.classes
    known = _labelled(names, manifest.classes) if named else {}
    if len(known) == len(names):
        return known, None
    if all(name.isdecimal() and int(name) < classes for name in names):
        return {name: int(name) for name in names}, None
    if len(names) == classes:
        return {name: i for i, name in enumerate(names)}, None if named else tuple(names)
    numbers = {str(i) for i in range(classes)}
    stranger = next((name for name in names if name not in known and name not in numbers), names[0])
    raise DataError(
        f"data {path}: folder {stranger!r} is no class of the networks ({len(names)} folders, {classes} classes); name "
        "folders by label or class number, and give --labels"
    )


def _labelled(names: Sequence[str], labels: Sequence[str]) -> dict[str, int]:
    """The class of every name that is a label, exactly or else but for case, spaces and punctuation."""
    exact = {label: i for i, label in reversed(list(enumerate(labels)))}
    alike = Counter(_plain(label) for label in exact)
    plain = {_plain(label): i for label, i in exact.items() if alike[_plain(label)] == 1}
    found = {name: exact.get(name, plain.get(_plain(name))) for name in names}
    return {name: label for name, label in found.items() if label is not None}


def _plain(label: str) -> str:
    """Letters and digits of any script; letters with marks are the same however they are encoded."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFC", label).casefold()).strip()


def _image_files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in IMAGE_SUFFIXES)


# ---- accuracy


def _measured(
    family: Family, data: str, named: bool, precision: str, load: LoadSlice, progress: Progress
) -> tuple[AccuracyTable, FamilyManifest]:
    """Runs all images through all variants: the table, and the manifest that sums it up.

    Without labels what counts as right is what the last variant answers in fp32.
    """
    manifest = family.manifest
    images = _images(data, manifest, named)
    ranks = manifest.shape.widths
    slices = [load(0, rank) for rank in ranks]
    judge = family.slice(0, ranks[-1], "cpu") if images.labels is None and precision != "fp32" else slices[-1]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (manifest.mean, manifest.std))
    scores: list[list[npt.NDArray[np.float32]]] = [[] for _ in ranks]
    said_best: list[npt.NDArray[np.int64]] = []
    done = 0
    for pixels in images.batches():
        items = (torch.from_numpy(pixels).float() / 255.0 - mean) / std
        for i, piece in enumerate(slices):
            scores[i].append(piece.run(items, None).numpy())
        best = scores[-1][-1] if judge is slices[-1] else judge.run(items, None).numpy()
        said_best.append(best.argmax(axis=1))
        done += len(pixels)
        progress(0.2 + 0.8 * done / images.count, f"{done} of {images.count} images")
    outputs = [np.concatenate(parts) for parts in scores]  # each (images, classes)
    answers = [output.argmax(axis=1) for output in outputs]
    truth = np.concatenate(said_best) if images.labels is None else images.labels
    kind: Measured = "agreement" if images.labels is None else "accuracy"
    last = manifest.variants[-1].name
    said = images.name if images.labels is not None else f"{AGREEMENT} with {last} on {images.name}"
    found = Answers(
        {(rank,): given == truth for rank, given in zip(ranks, answers, strict=True)},
        {(rank,): table_margins(torch.from_numpy(output)) for rank, output in zip(ranks, outputs, strict=True)},
    )
    table = AccuracyTable(
        found.right,
        margins=found.margins,
        calibration=fit_calibration(*found, "test"),
        split="test",
        data=said,
        weights_sha256=manifest.weights_sha256,
        precision=precision,
    )
    return table, msgspec.structs.replace(
        manifest,
        classes=manifest.classes if named else images.classes or manifest.classes,
        measured=kind,
        data=said,
        accuracy={"test": {f"{rank:g}": round(table.top1((rank,)), 4) for rank in ranks}},
    )


def _of(values: Sequence[T], i: int) -> T | None:
    return values[i if len(values) > 1 else 0] if values else None
