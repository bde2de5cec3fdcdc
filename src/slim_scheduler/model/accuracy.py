"""Measures which items a network answers right at every width tuple, and writes the tables beside the model.

Tuples share the passes of their common prefixes: 4 + 16 + 64 + 256 = 340 segment passes instead of 1,024 for four
segments at four widths. Runs the deployed slices in float32, which is what serves.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import DataError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.data import held_out, load_data
from slim_scheduler.model.images import ImageData, Images
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel
from slim_scheduler.model.workers import Workers
from slim_scheduler.setup.accuracy_files import TABLE_FILES, write_accuracy

BATCH = 250
Answers = dict[tuple[float, ...], npt.NDArray[np.bool_]]  # right or wrong, (items,), by width tuple


def measure_folder(
    folder: str | Path,
    data: str | Path,
    *,
    device: str = "cpu",
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, AccuracyTable]:
    """Tables of a model folder by split (`test`, `held-out`), written beside it, with top-1 in its manifest.

    The held-out table is of the images that `fit` kept out of training; a model without a training record, or
    measured on other data, gets the test table alone. `progress` is called with (split, share done).
    """
    folder = Path(folder)
    manifest = checkpoint.load_manifest(folder)
    model = checkpoint.load(folder, device)
    images = load_data(data, manifest.shape.item_shape)
    if len(images.classes) != manifest.shape.classes:
        raise DataError(
            f"data {images.name} has {len(images.classes)} classes, model {folder} {manifest.shape.classes}"
        )
    tables = {}
    for split, part in _splits(images, manifest).items():
        right = measure_accuracy(
            model,
            part,
            manifest.mean,
            manifest.std,
            device=device,
            progress=partial(progress, split) if progress else None,
        )
        table = AccuracyTable(right, split=split, data=images.name, weights_sha256=manifest.weights_sha256)
        write_accuracy(table, folder / TABLE_FILES[split])
        tables[split] = table
    top1 = {split: {n: round(p / 100, 4) for n, p in t.percentages().items()} for split, t in tables.items()}
    checkpoint.write_manifest(folder, msgspec.structs.replace(manifest, accuracy=top1))
    return tables


def measure_accuracy(
    model: SlimmableModel,
    images: Images,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    *,
    device: str = "cpu",
    progress: Callable[[float], None] | None = None,
) -> Answers:
    """Right or wrong, (items,), for every width tuple. `progress` gets the share done after each batch."""
    slices = _all_slices(model, device)
    shift, scale = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))
    starts = range(0, len(images), BATCH)
    done = itertools.count(1)

    def answers(start: int) -> Answers:
        pixels = torch.from_numpy(images.pixels[start : start + BATCH]).to(device)
        labels = torch.from_numpy(images.labels[start : start + BATCH]).to(device)
        right: Answers = {}
        _walk(model, slices, (pixels / 255.0 - shift) / scale, (), labels, right)
        if progress:
            progress(next(done) / len(starts))
        return right

    with Workers(torch.get_num_threads() if device == "cpu" else 1) as workers:
        parts = workers.map(answers, starts)
    return {widths: np.concatenate([part[widths] for part in parts]) for widths in parts[0]}


def _walk(
    model: SlimmableModel,
    slices: dict[tuple[int, float], SegmentSlice],
    x: Tensor,
    prefix: tuple[float, ...],
    labels: Tensor,
    right: Answers,
) -> None:
    """Runs every completion of a prefix whose activation is `x`, depth first."""
    if len(prefix) == model.segments:
        right[prefix] = (x.argmax(dim=1) == labels).cpu().numpy()  # (batch,)
        return
    for width in model.widths:
        out = slices[len(prefix), width].run(x, prefix[-1] if prefix else None)
        _walk(model, slices, out, (*prefix, width), labels, right)


def _all_slices(model: SlimmableModel, device: str) -> dict[tuple[int, float], SegmentSlice]:
    slices = {(s, w): model.slice(s, w, device) for s in range(model.segments) for w in model.widths}
    for (segment, _), piece in slices.items():
        for previous in model.widths if segment else ():
            piece.build_variant(previous)
    return slices


def _splits(images: ImageData, manifest: checkpoint.Manifest) -> dict[str, Images]:
    splits = {"test": images.test}
    training = manifest.training
    if training is not None and training.data == images.name and training.recipe.held_out > 0:
        splits["held-out"] = held_out(images.train, training.recipe.held_out, training.seed)[1]
    return splits
