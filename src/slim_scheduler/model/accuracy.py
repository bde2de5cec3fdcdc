"""Measures which items a network answers right at every width tuple and by what margin, and writes it beside the model.

Tuples share the passes of their common prefixes: 4 + 16 + 64 + 256 = 340 segment passes instead of 1,024 for four
segments at four widths. Runs the slices that serve, in the precision that serves.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.accuracy import AccuracyTable, tuple_name
from slim_scheduler.core.confidence import calibration_errors
from slim_scheduler.core.errors import DataError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.calibration import fit_calibration, margins_of
from slim_scheduler.model.data import held_out, load_data
from slim_scheduler.model.images import ImageData, Images
from slim_scheduler.model.precision import in_precision
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel
from slim_scheduler.model.workers import Workers
from slim_scheduler.setup.accuracy_files import table_file, write_accuracy

BATCH = 250

LoadSlice = Callable[[int, float], SegmentSlice]  # of a segment at a width


class Answers(NamedTuple):
    """By width tuple: right or wrong, and the margin of the answer, each (items,)."""

    right: dict[tuple[float, ...], npt.NDArray[np.bool_]]
    margins: dict[tuple[float, ...], npt.NDArray[np.float16]]


def measure_folder(
    folder: str | Path,
    data: str | Path,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    load: LoadSlice | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, AccuracyTable]:
    """Tables of a model folder by split (`test`, `held-out`), written beside it, fp32's top-1 and calibration also in
    its manifest.

    The held-out table is of the images that `fit` kept out of training, and calibrates; a model without a training
    record or without such images, or measured on other data, gets the test table alone, which then calibrates too.
    `load` gives slices of an execution engine, where torch on `device` is not meant. `progress` is called with (split,
    share done). Raises DataError for data without test images.
    """
    folder = Path(folder)
    device = "cpu" if load is not None else device
    manifest = checkpoint.load_manifest(folder)
    model = checkpoint.load(folder, device)
    images = load_data(data, manifest.shape.item_shape)
    if len(images.classes) != manifest.shape.classes:
        raise DataError(
            f"data {images.name} has {len(images.classes)} classes, model {folder} {manifest.shape.classes}"
        )
    answers = {
        split: measure_accuracy(
            model,
            part,
            manifest.mean,
            manifest.std,
            device=device,
            load=load or partial(_slice, in_precision(model, precision), device),
            progress=partial(progress, split) if progress else None,
        )
        for split, part in _splits(data, images, manifest).items()
    }
    fitted_on = "held-out" if "held-out" in answers else "test"
    calibration = fit_calibration(*answers[fitted_on], fitted_on)
    tables = {
        split: AccuracyTable(
            right,
            split=split,
            data=images.name,
            weights_sha256=manifest.weights_sha256,
            margins=margins,
            calibration=calibration,
            precision=precision,
        )
        for split, (right, margins) in answers.items()
    }
    for split, table in tables.items():
        write_accuracy(table, folder / table_file(split, precision))
    if precision != "fp32":
        return tables
    top1 = {split: {n: round(p / 100, 4) for n, p in t.percentages().items()} for split, t in tables.items()}
    errors = {
        split: {tuple_name(t): round(error, 4) for t, error in sorted(calibration_errors(calibration, *found).items())}
        for split, found in answers.items()
    }
    record = checkpoint.Confidence(calibration=calibration, error=errors)
    checkpoint.write_manifest(folder, msgspec.structs.replace(manifest, accuracy=top1, confidence=record))
    return tables


def measure_accuracy(
    model: SlimmableModel,
    images: Images,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    *,
    device: str = "cpu",
    load: LoadSlice | None = None,
    progress: Callable[[float], None] | None = None,
) -> Answers:
    """Right or wrong, and margin, for every width tuple. `progress` gets the share done after each batch."""
    slices = _all_slices(model, load or partial(_slice, model, device))
    shift, scale = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))
    starts = range(0, len(images), BATCH)
    done = itertools.count(1)

    def answers(start: int) -> Answers:
        pixels = torch.from_numpy(images.pixels[start : start + BATCH]).to(device)
        labels = torch.from_numpy(images.labels[start : start + BATCH]).to(device)
        found = Answers({}, {})
        _walk(model, slices, (pixels / 255.0 - shift) / scale, (), labels, found)
        if progress:
            progress(next(done) / len(starts))
        return found

    with Workers(torch.get_num_threads() if device == "cpu" else 1) as workers:
        parts = workers.map(answers, starts)
    return Answers(
        {widths: np.concatenate([part.right[widths] for part in parts]) for widths in parts[0].right},
        {widths: np.concatenate([part.margins[widths] for part in parts]) for widths in parts[0].right},
    )


def table_margins(logits: Tensor) -> npt.NDArray[np.float16]:
    """Margins as accuracy tables hold them, (batch,)."""
    return margins_of(logits).cpu().numpy().astype(np.float16)


def _walk(
    model: SlimmableModel,
    slices: dict[tuple[int, float], SegmentSlice],
    x: Tensor,
    prefix: tuple[float, ...],
    labels: Tensor,
    found: Answers,
) -> None:
    """Runs every completion of a prefix whose activation is `x`, depth first."""
    if len(prefix) == model.segments:
        found.right[prefix] = (x.argmax(dim=1) == labels).cpu().numpy()  # (batch,)
        found.margins[prefix] = table_margins(x)
        return
    for width in model.widths:
        out = slices[len(prefix), width].run(x, prefix[-1] if prefix else None)
        _walk(model, slices, out, (*prefix, width), labels, found)


def _slice(model: SlimmableModel, device: str, segment: int, width: float) -> SegmentSlice:
    return model.slice(segment, width, device)


def _all_slices(model: SlimmableModel, load: LoadSlice) -> dict[tuple[int, float], SegmentSlice]:
    slices = {(s, w): load(s, w) for s in range(model.segments) for w in model.widths}
    for (segment, _), piece in slices.items():
        for previous in model.widths if segment else ():
            piece.build_variant(previous)
    return slices


def _splits(data: str | Path, images: ImageData, manifest: checkpoint.Manifest) -> dict[str, Images]:
    if not len(images.test):
        raise DataError(
            f"data {data} has no test images: a class folder gives some from two images on; add images, or make "
            "folders train and test"
        )
    splits = {"test": images.test}
    training = manifest.training
    if training is not None and training.data == images.name and training.recipe.held_out > 0:
        away = held_out(images.train, training.recipe.held_out, training.seed)[1]
        if len(away):  # few images may give none
            splits["held-out"] = away
    return splits
