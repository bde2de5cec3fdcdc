"""A network on disk: weights.safetensors and manifest.json in one folder. No pickle, and no fallback.

The manifest says everything that is not a tensor: which class the network is of, by name, the values that build it
again, and the weights' SHA-256. A file of the wrong size is refused before it is read, what else does not match before
the network is built.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.model.contract import check_runs, checked_shape
from slim_scheduler.model.presets import Recipe
from slim_scheduler.model.protocol import STORED_METHODS, StoredNetwork
from slim_scheduler.model.training_state import EpochRecord
from slim_scheduler.setup.plugins import find_class, name_of

FORMAT = 1
WEIGHTS, MANIFEST = "weights.safetensors", "manifest.json"
MOST_MANIFEST_BYTES = 4 << 20
HEADER_ROOM = 1 << 20  # a safetensors header names tensors; it is never near this size
DTYPES = {"float32": torch.float32, "float16": torch.float16}
NETWORKS = {"slim-resnet": "slim_scheduler.model.slim_resnet:SlimResNet"}
ANSWERS = ("network", "architecture", "mean", "std", "weights_sha256")  # of a manifest: what answers hang on
REFETCH = "fetch the model again"
GROUP = "slim_scheduler.networks"  # of entry points, through which a package offers a network


class TeacherRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who taught a network. `data`, `seed` and `held_out` say which training images the teacher itself was kept from.

    `outside_data` names what it had seen beside `data`, empty for none; `top1` is in [0, 1], on its held-out images.
    """

    name: str
    sha256: str
    data: str
    seed: int
    held_out: float
    outside_data: str
    top1: float | None = None


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights came about. `seconds` is time on the clock; `history` the curve on held-out images.

    `started_from`: SHA-256 of the weights that a further run began with; seconds and history include theirs.
    `outside_data`: what reached the weights beside `data`, through a teacher or the weights that they started from.
    """

    preset: str
    recipe: Recipe
    seed: int
    data: str
    source: str
    seconds: float
    history: tuple[EpochRecord, ...]
    started_from: str = ""
    teacher: TeacherRecord | None = None
    outside_data: str = ""


class Confidence(msgspec.Struct, frozen=True, kw_only=True):
    """What margins are worth. `error`: expected calibration error in [0, 1] by split, then by width tuple."""

    calibration: Calibration
    error: dict[str, dict[str, float]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself. `accuracy`: top-1 in [0, 1] by split, then by width tuple ("0.25/0.5/...").

    `network` names the class: one of ours, an entry point of `slim_scheduler.networks`, or `module:Class`;
    `architecture` are the JSON values from which the class builds the network again.
    """

    format: int
    network: str = "slim-resnet"
    shape: ModelShape
    architecture: dict[str, Any]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights_sha256: str
    weights_bytes: int
    training: Training | None = None
    accuracy: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    confidence: Confidence | None = None


def save(
    model: StoredNetwork,
    folder: str | Path,
    *,
    classes: tuple[str, ...] = (),
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    training: Training | None = None,
) -> Manifest:
    """Writes both files; the manifest last, so that an interruption leaves no folder that looks whole. Accuracy tables
    that lie there go, unless they are of a network that answers the same.

    Defaults: classes are numbered, mean 0 and std 1 per channel. Raises InputError for a class that nobody could
    import by name, that does not tell its sizes or build the same network again, whose widths do not ascend, or whose
    slices lack a method, fail, or give other shapes than it says.
    """
    from slim_scheduler.setup.accuracy_files import tables_in, weights_of

    folder = Path(folder)
    name = folder.resolve().name
    dtype = DTYPES[training.recipe.weights_dtype if training else "float32"]
    state = {key: _stored(tensor, dtype) for key, tensor in model.state_dict().items()}
    raw = save_tensors(state)
    shape = msgspec.structs.replace(checked_shape(model), name=name)
    channels = model.item_shape[0]
    manifest = Manifest(
        format=FORMAT,
        network=name_of(type(model), GROUP, NETWORKS),
        shape=shape,
        architecture=_architecture(model),
        classes=classes or tuple(str(label) for label in range(model.classes)),
        mean=mean or (0.0,) * channels,
        std=std or (1.0,) * channels,
        weights_sha256=hashlib.sha256(raw).hexdigest(),
        weights_bytes=len(raw),
        training=training,
    )
    _check_sizes(folder, manifest, "give as many")
    again = "let from_architecture build again what architecture tells"
    tensors = {key: tuple(t.shape) for key, t in state.items()}
    _check_tensors(folder / WEIGHTS, tensors, _outline(folder, manifest, again), again)
    check_runs(_restored(folder, manifest, state))
    folder.mkdir(parents=True, exist_ok=True)
    before = _manifest_or_none(folder)
    same = before is not None and all(getattr(before, name) == getattr(manifest, name) for name in ANSWERS)
    if before is not None and same:
        manifest = msgspec.structs.replace(manifest, accuracy=before.accuracy, confidence=before.confidence)
    replace_file(folder / WEIGHTS, raw)
    write_manifest(folder, manifest)
    for table in tables_in(folder):
        if not same or weights_of(table) != manifest.weights_sha256:
            table.unlink()
    return manifest


def _architecture(model: StoredNetwork) -> dict[str, Any]:
    """What builds the network again, as it is read from the manifest. Raises InputError."""
    try:
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(model.architecture()), type=dict[str, Any])
    except Exception as error:  # the class may be anybody's
        raise InputError(
            f"network {model.name}: architecture() gives no JSON values by name ({error}); tensors belong to "
            "state_dict()"
        ) from error
    return values


def _manifest_or_none(folder: Path) -> Manifest | None:
    try:
        return load_manifest(folder)
    except CheckpointError:
        return None


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    replace_file(Path(folder) / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def load_manifest(folder: str | Path) -> Manifest:
    """Reads and checks manifest.json. Raises CheckpointError, one line."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a model folder holds {MANIFEST} and {WEIGHTS}, as `slim fit` writes")
    if path.stat().st_size > MOST_MANIFEST_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes, at most {MOST_MANIFEST_BYTES} are read; it is no manifest"
        )
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        manifest.shape.check()
    except (msgspec.DecodeError, UnicodeDecodeError, InputError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch the model again, or run `slim fit`") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}, this version reads {FORMAT}; write it again with `slim fit`"
        )
    _check_sizes(path, manifest, REFETCH)
    return manifest


def load(folder: str | Path, device: str = "cpu") -> StoredNetwork:
    """The network of a folder, on `device`, float32. Raises CheckpointError, one line, with no fallback.

    The class that the manifest names is imported where Python finds it, but never from the folder itself.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    path = folder / WEIGHTS
    try:
        outline = _outline(folder, manifest, REFETCH)
    except InputError as error:
        raise CheckpointError(f"{folder / MANIFEST}: {error}") from None
    raw = _checked_weights(path, manifest, sum(_bytes(t) for t in outline.values()))
    try:
        tensors = load_tensors(raw)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file ({error}); fetch the model again") from None
    _check_tensors(path, {key: tuple(t.shape) for key, t in tensors.items()}, outline, REFETCH)
    return _restored(folder, manifest, tensors).to(device)


def _restored(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> StoredNetwork:
    """The network that a manifest and its tensors are, float32, by the manifest's name: as its profiles are called."""
    model = _build(folder, manifest)
    model.load_state_dict({key: t.float() if t.is_floating_point() else t for key, t in tensors.items()})
    return model.eval().requires_grad_(False)


def _build(folder: Path, manifest: Manifest) -> StoredNetwork:
    """The network that a manifest describes, with weights of no meaning. Raises InputError."""
    kind = find_class(manifest.network, GROUP, NETWORKS, STORED_METHODS, not_from=folder)
    try:
        network: StoredNetwork = kind.from_architecture(manifest.architecture, manifest.shape.name)
    except InputError:
        raise
    except Exception as error:  # the class may be anybody's
        raise InputError(f"network {manifest.network} cannot be built from its architecture ({error})") from None
    return network


def _outline(folder: Path, manifest: Manifest, cure: str) -> dict[str, torch.Tensor]:
    """The network's tensors by name, without memory: the class builds itself on torch's `meta` device. `cure` is what
    helps where it is of other sizes."""
    with torch.device("meta"):
        network = _build(folder, manifest)
    found = (tuple(network.widths), network.segments, tuple(network.item_shape), network.classes)
    shape = manifest.shape
    if found != (shape.widths, shape.segments, shape.item_shape, shape.classes):
        raise InputError(
            f"the architecture gives (widths, segments, item shape, classes) {found}, the shape beside it says "
            f"{(shape.widths, shape.segments, shape.item_shape, shape.classes)}; {cure}"
        )
    return dict(network.state_dict())


def _check_sizes(path: Path, manifest: Manifest, cure: str) -> None:
    shape = manifest.shape
    expected = {
        "number of class names": (len(manifest.classes), shape.classes),
        "number of means": (len(manifest.mean), shape.item_shape[0]),
        "number of standard deviations": (len(manifest.std), shape.item_shape[0]),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise CheckpointError(f"{path}: {name} is {found}, its network needs {wanted}; {cure}")


def _check_tensors(path: Path, found: dict[str, tuple[int, ...]], outline: dict[str, torch.Tensor], cure: str) -> None:
    wanted = {name: tuple(t.shape) for name, t in outline.items()}
    if wanted != found:
        name = min(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        raise CheckpointError(
            f"{path}: tensor {name} is {found.get(name, 'missing')}, the manifest's architecture needs "
            f"{wanted.get(name, 'none')}; {cure}"
        )


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


def _bytes(tensor: torch.Tensor) -> int:
    """At most so many bytes in the file: floats are stored as float32 or shorter."""
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())


def _checked_weights(path: Path, manifest: Manifest, most_tensor_bytes: int) -> bytes:
    """The file's bytes, if size, header and hash are as the manifest says. Sizes come before reading."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a model folder holds {MANIFEST} and {WEIGHTS}, as `slim fit` writes")
    size, most = path.stat().st_size, most_tensor_bytes + HEADER_ROOM
    if size != manifest.weights_bytes or size > most:
        raise CheckpointError(
            f"{path} has {size} bytes, the manifest says {manifest.weights_bytes} and its architecture allows {most}; "
            "it is truncated or another file: fetch the model again"
        )
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != manifest.weights_sha256:
        raise CheckpointError(
            f"{path} has SHA-256 {found[:16]}..., the manifest says {manifest.weights_sha256[:16]}...; it was changed: "
            "fetch the model again"
        )
    _check_header(path, raw)
    return raw


def _check_header(path: Path, raw: bytes) -> None:
    """Raises CheckpointError where the header promises other sizes than the file has."""
    length = int.from_bytes(raw[:8], "little")
    try:
        header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        promised = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} has no readable safetensors header; fetch the model again") from None
    if 8 + length + promised != len(raw):
        raise CheckpointError(
            f"{path}: its header promises {promised} bytes of tensors, {len(raw) - 8 - length} follow"
        )


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
