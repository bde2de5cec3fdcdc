"""A finished network whose answers another one is trained on: `slim fit --teacher FOLDER`.

A folder holds a model, slimmable or a family, of which the widest teaches, or one ONNX file with a teacher.json beside
it. What a teacher has seen, outside data above all, goes into the manifest of whoever learns from it.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.checkpoint import Manifest, TeacherRecord
from slim_scheduler.model.folder import load_manifest, load_model
from slim_scheduler.model.protocol import SlimmableModel

if TYPE_CHECKING:
    from slim_scheduler.model.family import Family

FORMAT = 1
NETWORK, MANIFEST = "network.onnx", "teacher.json"
MOST_MANIFEST_BYTES = 1 << 20
MOST_NETWORK_BYTES = 1 << 30
UNKNOWN = "unknown (an imported network)"


class TeacherManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """teacher.json: what an ONNX file does not say of itself.

    `mean` and `std` are of pixels scaled to [0, 1], per channel; the network takes (batch, *item_shape) float32 and
    gives logits (batch, classes). `data`, `seed` and `held_out` say which training images it was kept from, as `slim
    fit` draws them. `outside_data` names all that was seen beside `data`; empty for none. `top1` is in [0, 1], on the
    images kept from it.
    """

    format: int
    name: str
    item_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    network_sha256: str
    network_bytes: int
    data: str
    seed: int
    held_out: float
    outside_data: str
    source: str
    top1: float | None = None


class Teacher:
    """A model at its widest, asked about images that are normalised by the learner's statistics.

    `classes`, `mean` and `std` are the model's own. Runs on `device` with one compute thread per caller: training
    already splits a batch over workers.
    """

    def __init__(
        self,
        model: SlimmableModel,
        record: TeacherRecord,
        classes: tuple[str, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: str = "cpu",
    ) -> None:
        self.record, self.classes, self.item_shape = record, classes, tuple(model.item_shape)
        self._statistics, self._device, self._width = (mean, std), device, model.widths[-1]
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._slices = [model.slice(segment, self._width, device) for segment in range(model.segments)]
        finally:
            torch.set_num_threads(before)
        for piece in self._slices[1:]:
            piece.build_variant(self._width)

    def check(self, classes: tuple[str, ...], item_shape: tuple[int, ...]) -> None:
        """Raises InputError unless it can teach a network of these classes and items."""
        if self.classes != classes:
            raise InputError(
                f"teacher {self.record.name} knows {len(self.classes)} classes ({_few(self.classes)}), the data has "
                f"{len(classes)} ({_few(classes)}); both must have the same, in the same order"
            )
        if self.item_shape[0] != item_shape[0]:
            raise InputError(
                f"teacher {self.record.name} takes {self.item_shape[0]} channels, the network {item_shape[0]}; "
                "choose a teacher for the same images"
            )

    def logits(self, images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """(batch, channels, height, width) normalised by `mean` and `std` -> (batch, classes), without gradient."""
        own_mean, own_std = (images.new_tensor(values).view(1, -1, 1, 1) for values in self._statistics)
        shift, scale = (images.new_tensor(values).view(1, -1, 1, 1) for values in (mean, std))
        size = self.item_shape[1:]
        with torch.no_grad():
            x = (images * scale + shift - own_mean) / own_std
            if tuple(x.shape[2:]) != size:
                x = functional.interpolate(x, size, mode="bilinear", align_corners=False)
            x = x.to(self._device)
            for segment, piece in enumerate(self._slices):
                x = piece.run(x, self._width if segment else None)
            return x.float().to(images.device)


def load_teacher(folder: str | Path, device: str = "cpu") -> Teacher:
    """The teacher of a folder; ONNX networks run on the CPU. Raises InputError and below, one line."""
    folder = Path(folder)
    try:
        return _onnx_teacher(folder) if (folder / MANIFEST).is_file() else _model_teacher(folder, device)
    except ModuleNotFoundError as error:
        raise InputError(
            f"teacher {folder} holds ONNX networks, and {error.name} is not installed; "
            'pip install "slim-scheduler[onnx]"'
        ) from None


def write_teacher(folder: str | Path, network: bytes, manifest: TeacherManifest) -> None:
    """Writes an ONNX network and its teacher.json, hash and size filled in; the manifest last."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256(network).hexdigest()
    manifest = msgspec.structs.replace(manifest, network_sha256=sha256, network_bytes=len(network))
    checkpoint.replace_file(folder / NETWORK, network)
    checkpoint.replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _model_teacher(folder: Path, device: str) -> Teacher:
    if not (folder / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"teacher {folder} has neither {checkpoint.MANIFEST} nor {MANIFEST}; give a model's folder, or "
            f"{NETWORK} with {MANIFEST} (docs/distillation.md)"
        )
    manifest, model = load_manifest(folder), load_model(folder)
    training = manifest.training if isinstance(manifest, Manifest) else None
    outside = training.outside_data if training else UNKNOWN
    widest = ",".join(f"{model.widths[-1]:g}" for _ in range(model.segments))
    record = TeacherRecord(
        name=model.name,
        sha256=manifest.weights_sha256,
        data=training.data if training else "",
        seed=training.seed if training else 0,
        held_out=training.recipe.held_out if training else 0.0,
        outside_data=outside,
        top1=manifest.accuracy.get("held-out", {}).get(widest),
    )
    where = device if isinstance(manifest, Manifest) else "cpu"
    return Teacher(model, record, manifest.classes, manifest.mean, manifest.std, where)


def _onnx_teacher(folder: Path) -> Teacher:
    manifest = _read_manifest(folder / MANIFEST)
    record = TeacherRecord(
        name=manifest.name,
        sha256=manifest.network_sha256,
        data=manifest.data,
        seed=manifest.seed,
        held_out=manifest.held_out,
        outside_data=manifest.outside_data,
        top1=manifest.top1,
    )
    family = _family_of_one(folder / NETWORK, manifest)
    return Teacher(family, record, manifest.classes, family.manifest.mean, family.manifest.std)


def _read_manifest(path: Path) -> TeacherManifest:
    if path.stat().st_size > MOST_MANIFEST_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, at most {MOST_MANIFEST_BYTES} are read")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=TeacherManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); write it again (docs/distillation.md)") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}, this version reads {FORMAT}; write it again")
    channels = manifest.item_shape[0]
    if len(manifest.mean) != channels or len(manifest.std) != channels or min(manifest.std) <= 0:
        raise CheckpointError(
            f"{path}: mean {manifest.mean} and std {manifest.std} must have {channels} entries, one per channel, and "
            "standard deviations above 0"
        )
    return manifest


def _family_of_one(path: Path, manifest: TeacherManifest) -> "Family":
    """One checked ONNX file as a family of one rank. Size and hash come before it is parsed."""
    from slim_scheduler.model import family, onnx_file

    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a teacher's folder holds {NETWORK} and {MANIFEST}")
    size = path.stat().st_size
    if size != manifest.network_bytes or size > MOST_NETWORK_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes, its {MANIFEST} says {manifest.network_bytes}, at most {MOST_NETWORK_BYTES} are "
            "read; it is truncated or another file"
        )
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != manifest.network_sha256:
        raise CheckpointError(
            f"{path} has SHA-256 {found[:16]}..., its {MANIFEST} says {manifest.network_sha256[:16]}...; it was changed"
        )
    channels, height, width = manifest.item_shape
    graph = onnx_file.check_onnx(path, raw, (height, width), alone=True)
    facts = graph.facts
    if (facts.channels, *facts.size, facts.classes) != (channels, height, width, len(manifest.classes)):
        raise CheckpointError(
            f"{path} takes {facts.channels}x{facts.size[0]}x{facts.size[1]} and knows {facts.classes} classes, its "
            f"{MANIFEST} says {channels}x{height}x{width} and {len(manifest.classes)}; it is of another network"
        )
    variant = family.Variant(
        name=manifest.name,
        file=NETWORK,
        sha256=manifest.network_sha256,
        bytes=size,
        source="onnx",
        dtype=facts.dtype,
        layout=facts.layout,
        size=facts.size,
        batch=facts.batch,
        mean=manifest.mean,
        std=manifest.std,
        weight_bytes=facts.weight_bytes,
        workspace_bytes=facts.workspace_bytes,
        macs=facts.macs,
        cost_s=0.0,
    )
    alone = family.FamilyManifest(
        format=family.FORMAT,
        kind="family",
        shape=family.family_shape(manifest.name, (variant,), manifest.item_shape, facts.classes),
        classes=manifest.classes,
        mean=manifest.mean,
        std=manifest.std,
        variants=(variant,),
    )
    return family.Family(manifest.name, alone, (graph.content,))


def _few(classes: tuple[str, ...]) -> str:
    return ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
