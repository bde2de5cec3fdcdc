"""A network at one width tuple as a file that others run: ONNX with logits for any batch size, or `torch.export`.

An ONNX file carries mean, standard deviation and labels in its metadata, where `slim import` finds them again.
"""

import io
import json
from pathlib import Path

import torch

from slim_scheduler.core.errors import InputError, first_line
from slim_scheduler.model.checkpoint import Manifest
from slim_scheduler.model.family import Family, FamilyManifest
from slim_scheduler.model.folder import load_manifest, load_model
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.segment_graph import export_network, network_at
from slim_scheduler.setup.cache import write_whole

FORMATS = ("onnx", "pt2")
MOST_BATCH = 4096  # that a `torch.export` program says it takes


def export_model(folder: Path, widths: tuple[float, ...], form: str, out: Path) -> Path:
    """Writes one network; a single width means all segments. Raises InputError, one line, and leaves nothing behind."""
    if form not in FORMATS:
        raise InputError(f"format {form} is not known; give onnx or pt2")
    if out.exists():
        raise InputError(f"{out} exists already; give another --out, or remove it")
    model, manifest = load_model(folder), load_manifest(folder)
    widths = widths * model.segments if len(widths) == 1 else widths
    if len(widths) != model.segments:
        raise InputError(f"{len(widths)} widths are given, {model.name} has {model.segments} segments; give 1 or all")
    for width in widths:
        manifest.shape.index(width)
    if isinstance(model, Family):
        if form != "onnx":
            raise InputError(f"{model.name} is a family, whose networks are ONNX files; give --format onnx")
        content = model.graph(widths[0])
    elif form == "onnx":
        content = export_network(model, widths)
    else:
        content = _program(model, widths)
    if form == "onnx":
        content = _with_metadata(content, manifest, widths)
    write_whole(out, content)  # whole or not at all
    return out


def _program(model: SlimmableModel, widths: tuple[float, ...]) -> bytes:
    out = io.BytesIO()
    batch = torch.export.Dim("batch", min=1, max=MOST_BATCH)
    try:
        with torch.no_grad():
            items = (torch.zeros(2, *model.item_shape),)
            program = torch.export.export(network_at(model, widths), items, dynamic_shapes=({0: batch},), strict=False)
        torch.export.save(program, out)
    except Exception as error:  # a network may be anybody's, and the exporter raises whatever it likes
        raise InputError(
            f"{model.name} cannot be exported ({type(error).__name__}: {first_line(error)}); try --format onnx"
        ) from None
    return out.getvalue()


def _with_metadata(content: bytes, manifest: Manifest | FamilyManifest, widths: tuple[float, ...]) -> bytes:
    import onnx

    made = onnx.load_model_from_string(content)
    expects = manifest.variant(widths[0]) if isinstance(manifest, FamilyManifest) else manifest
    known = {
        "mean": ",".join(f"{value:.9g}" for value in expects.mean),
        "std": ",".join(f"{value:.9g}" for value in expects.std),
        "labels": json.dumps(manifest.classes),
    }
    onnx.helper.set_model_props(made, known)
    exported: bytes = made.SerializeToString()
    return exported
