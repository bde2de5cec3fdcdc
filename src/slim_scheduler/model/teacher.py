"""A finished network whose answers another one is trained on: `slim fit --teacher FOLDER`.

A folder holds either a network of this project (its widest width tuple teaches) or any ONNX file with a teacher.json
beside it. What a teacher has seen, outside data above all, goes into the manifest of whoever learns from it.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.checkpoint import TeacherRecord

if TYPE_CHECKING:
    import onnxruntime

FORMAT = 1
NETWORK, MANIFEST = "network.onnx", "teacher.json"
MOST_MANIFEST_BYTES = 1 << 20
MOST_NETWORK_BYTES = 1 << 30


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


class Network(Protocol):
    """What computes a teacher's logits. Safe to call from several threads."""

    def __call__(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) as this network normalises them -> logits (batch, classes)."""
        ...


class Teacher:
    """A network with its normalisation, asked about images that are normalised by the learner's statistics."""

    def __init__(
        self,
        network: Network,
        record: TeacherRecord,
        classes: tuple[str, ...],
        item_shape: tuple[int, ...],
        statistics: tuple[tuple[float, ...], tuple[float, ...]],
    ) -> None:
        self.record, self.classes, self.item_shape = record, classes, item_shape
        self._network, self._statistics = network, statistics

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
            views = (images * scale + shift - own_mean) / own_std
            if tuple(views.shape[2:]) != size:
                views = functional.interpolate(views, size, mode="bilinear", align_corners=False)
            return self._network(views).float()


def load_teacher(folder: str | Path, device: str = "cpu") -> Teacher:
    """The teacher of a folder. Raises CheckpointError, one line; InputError where onnxruntime is missing."""
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return _onnx_teacher(folder, device)
    if not (folder / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"teacher {folder} has neither {checkpoint.MANIFEST} nor {MANIFEST}; give a folder that `slim fit` wrote, "
            f"or {NETWORK} with {MANIFEST} (docs/distillation.md)"
        )
    return _slimmable_teacher(folder, device)


def write_teacher(folder: str | Path, network: bytes, manifest: TeacherManifest) -> None:
    """Writes an ONNX network and its teacher.json, hash and size filled in; the manifest last."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256(network).hexdigest()
    manifest = msgspec.structs.replace(manifest, network_sha256=sha256, network_bytes=len(network))
    checkpoint.replace_file(folder / NETWORK, network)
    checkpoint.replace_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def _slimmable_teacher(folder: Path, device: str) -> Teacher:
    """A network of the model protocol, at its widest."""
    manifest = checkpoint.load_manifest(folder)
    model = checkpoint.load(folder, device)
    slices = [model.slice(segment, model.widths[-1], device) for segment in range(model.segments)]
    for piece in slices[1:]:
        piece.build_variant(model.widths[-1])

    def run(images: Tensor) -> Tensor:
        x = images
        for segment, piece in enumerate(slices):
            x = piece.run(x, model.widths[-1] if segment else None)
        return x

    training = manifest.training
    widest = ",".join(f"{model.widths[-1]:g}" for _ in range(model.segments))
    record = TeacherRecord(
        name=folder.resolve().name,
        sha256=manifest.weights_sha256,
        data=training.data if training else "",
        seed=training.seed if training else 0,
        held_out=training.recipe.held_out if training else 0.0,
        outside_data=training.outside_data if training else "",
        top1=manifest.accuracy.get("held-out", {}).get(widest),
    )
    return Teacher(run, record, manifest.classes, manifest.shape.item_shape, (manifest.mean, manifest.std))


def _onnx_teacher(folder: Path, device: str) -> Teacher:
    manifest = _read_manifest(folder / MANIFEST)
    session = _session(folder / NETWORK, manifest, device)
    entry = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run(None, {entry: images.cpu().contiguous().numpy()})
        if logits.shape != (len(images), len(manifest.classes)):
            raise CheckpointError(
                f"{folder / NETWORK} answers {logits.shape}, {len(images)} items of {len(manifest.classes)} classes "
                f"were asked; its {MANIFEST} is of another network"
            )
        return torch.from_numpy(logits).to(images.device)

    record = TeacherRecord(
        name=manifest.name,
        sha256=manifest.network_sha256,
        data=manifest.data,
        seed=manifest.seed,
        held_out=manifest.held_out,
        outside_data=manifest.outside_data,
        top1=manifest.top1,
    )
    return Teacher(run, record, manifest.classes, manifest.item_shape, (manifest.mean, manifest.std))


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


def _session(path: Path, manifest: TeacherManifest, device: str) -> "onnxruntime.InferenceSession":
    """One compute thread: training already splits a batch over workers. Size and hash come before loading."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError(
            f"teacher {path.parent} is an ONNX network; `pip install slim-scheduler[onnx]` to run it"
        ) from None
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
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    wanted = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
    providers = [p for p in (*wanted, "CPUExecutionProvider") if p in onnxruntime.get_available_providers()]
    try:
        session = onnxruntime.InferenceSession(raw, options, providers=providers)
    except Exception as error:  # onnxruntime's own exceptions have no common base but Exception
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is no network that onnxruntime runs ({reason}); export it again") from None
    shape = session.get_inputs()[0].shape
    if len(session.get_inputs()) != 1 or len(session.get_outputs()) != 1 or len(shape) != 4:
        raise CheckpointError(f"{path} must have one input (batch, channels, height, width) and one output, logits")
    if isinstance(shape[0], int):
        raise CheckpointError(f"{path} takes batches of {shape[0]} alone; export it with a dynamic batch")
    return session


def _few(classes: tuple[str, ...]) -> str:
    return ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
