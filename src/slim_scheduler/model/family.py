"""A family: ordinary networks of one task, each another cost and accuracy, served as one network of one segment.

Its widths are ranks, 1 the cheapest. Items are images of one size and normalisation, those of the last variant; every
other variant makes its own from them, resized once. On disk a family is a manifest and one checked ONNX file per
variant, each with its SHA-256. `family_import.py` writes it.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.core.shape import ModelShape

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 4 << 20
FLOAT_BYTES = 4
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.onnx")

Measured = Literal["accuracy", "agreement", "nothing"]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One network of a family. `mean` and `std` are per channel, of pixels scaled to [0, 1].

    `size` is (height, width) in pixels; `batch` the only batch size its graph takes, 0 for any; `cost_s` seconds per
    item on one CPU thread, as measured when it was imported.
    """

    name: str
    file: str
    sha256: str
    bytes: int
    source: Literal["onnx", "torch.export"]
    dtype: Literal["float32", "float16", "uint8"]
    layout: Literal["NCHW", "NHWC"]
    size: tuple[int, int]
    batch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weight_bytes: int
    workspace_bytes: int
    macs: int
    cost_s: float


class FamilyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a family says of itself. `variants` in order of rank; `mean` and `std` are those of its items.

    `measured`: whether `accuracy.parquet` holds accuracy on labelled images, or agreement with the last variant on
    images without labels; `accuracy` sums it up, by split and rank.
    """

    format: int
    kind: Literal["family"]
    shape: ModelShape
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    variants: tuple[Variant, ...]
    measured: Measured = "nothing"
    data: str = ""
    accuracy: dict[str, dict[str, float]] = {}

    @property
    def weights_sha256(self) -> str:
        """One hash for all variants: what an accuracy table was measured on."""
        return hashlib.sha256("".join(v.sha256 for v in self.variants).encode()).hexdigest()

    def variant(self, rank: float) -> Variant:
        return self.variants[self.shape.index(rank)]


class Preparation:
    """From items of a family to what one variant takes: normalisation, size, layout and type."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], variant: Variant) -> None:
        self._variant = variant
        factors = np.array(std) / np.array(variant.std)
        shifts = (np.array(mean) - np.array(variant.mean)) / np.array(variant.std)
        if variant.dtype == "uint8":  # back to pixels
            factors, shifts = 255.0 * np.array(std), 255.0 * np.array(mean)
        same = np.allclose(factors, 1.0, atol=1e-6) and np.allclose(shifts, 0.0, atol=1e-6)
        self._affine = None if same else tuple(torch.from_numpy(v).float().view(1, -1, 1, 1) for v in (factors, shifts))

    def __call__(self, x: Tensor) -> npt.NDArray[Any]:
        """(batch, channels, height, width) float32, normalised as the family's items -> the variant's input."""
        variant = self._variant
        if tuple(x.shape[2:]) != variant.size:
            x = functional.interpolate(x, variant.size, mode="bilinear", align_corners=False, antialias=True)
        if self._affine is not None:
            x = x * self._affine[0] + self._affine[1]
        if variant.layout == "NHWC":
            x = x.permute(0, 2, 3, 1)  # (batch, height, width, channels)
        if variant.dtype == "uint8":
            x = x.round().clamp(0, 255).to(torch.uint8)
        elif variant.dtype == "float16":
            x = x.half()
        return x.contiguous().numpy()


class FamilySlice:
    """Implements `SegmentSlice`: one variant, on ONNX Runtime and the CPU."""

    segment = 0

    def __init__(self, family: "Family", rank: float) -> None:
        from slim_scheduler.model.graph_session import GraphSession

        self.width = rank
        self._variant = variant = family.manifest.variant(rank)
        self._prepare = family.preparation(rank)
        threads = torch.get_num_threads()  # what the device set for the thread that loads
        self._session = GraphSession(family.graph(rank), threads, batch=variant.batch, name=variant.name)

    @property
    def weight_bytes(self) -> int:
        return self._variant.weight_bytes

    variant_bytes = 0

    def has_variant(self, previous_width: float | None) -> bool:
        return True

    def build_variant(self, previous_width: float | None) -> int:
        return 0

    def run(self, x: Tensor, previous_width: float | None) -> Tensor:
        return torch.from_numpy(self._session.run(self._prepare(x)))

    def to_host(self) -> None:
        """The weights are in host memory."""

    def to_device(self) -> None:
        """The weights are in host memory."""


class Family:
    """Implements `SlimmableModel`. `graphs` are the variants' ONNX files, by rank, as their hashes say."""

    segments = 1

    def __init__(self, name: str, manifest: FamilyManifest, graphs: tuple[bytes, ...]) -> None:
        self.name = name
        self.manifest = manifest
        self._graphs = graphs

    @property
    def widths(self) -> tuple[float, ...]:
        return self.manifest.shape.widths

    @property
    def item_shape(self) -> tuple[int, ...]:
        return self.manifest.shape.item_shape

    @property
    def classes(self) -> int:
        return self.manifest.shape.classes

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]:
        self.manifest.shape.index(width)
        return (self.classes,)

    def macs(self, segment: int, previous_width: float | None, width: float) -> int:
        return self.manifest.variant(width).macs

    def workspace_bytes(self, segment: int, width: float) -> int:
        return self.manifest.variant(width).workspace_bytes

    def preparation(self, rank: float) -> Preparation:
        return Preparation(self.manifest.mean, self.manifest.std, self.manifest.variant(rank))

    def graph(self, rank: float) -> bytes:
        """A variant's ONNX file."""
        return self._graphs[self.manifest.shape.index(rank)]

    def slice(self, segment: int, width: float, device: str) -> FamilySlice:
        if segment != 0:
            raise InputError(f"segment {segment} does not exist; a family has segment 0 alone")
        if device != "cpu":
            raise InputError(
                f"device {device} cannot run the family {self.name}: its networks are ONNX graphs; use cpu, "
                "openvino:CPU, or onnxruntime:CUDA for a GPU"
            )
        self.manifest.shape.index(width)
        return FamilySlice(self, width)


def is_family(folder: str | Path) -> bool:
    """Whether a model folder's manifest says that it is a family; what else is wrong with it is for who loads it."""
    path = Path(folder) / MANIFEST
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            return False
        return msgspec.json.decode(path.read_bytes(), type=_Kind).kind == "family"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


class _Kind(msgspec.Struct):
    kind: str = ""


def load_family_manifest(folder: str | Path) -> FamilyManifest:
    """Reads and checks a family's manifest. Raises CheckpointError, one line."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a family's folder is written by `slim import`")
    if path.stat().st_size > MOST_MANIFEST_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, at most {MOST_MANIFEST_BYTES} are read")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=FamilyManifest)
        manifest.shape.check()
    except (msgspec.DecodeError, UnicodeDecodeError, InputError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); import the family again") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}, this version reads {FORMAT}; import it again")
    channels, ranks = manifest.shape.item_shape[0], tuple(float(i + 1) for i in range(len(manifest.variants)))
    per_channel = [manifest.mean, manifest.std, *(p for v in manifest.variants for p in (v.mean, v.std))]
    if manifest.shape.widths != ranks or manifest.shape.segments != 1 or {len(p) for p in per_channel} != {channels}:
        raise CheckpointError(f"{path}: its variants, ranks and normalisation do not belong together; import it again")
    if any(not FILE_NAME.fullmatch(variant.file) for variant in manifest.variants):
        raise CheckpointError(f"{path} names a file that is not one of its folder; import the family again")
    return manifest


def load_family(folder: str | Path) -> Family:
    """The family of a folder, its graphs checked as `slim import` does. Raises CheckpointError where a file is not what
    the manifest says."""
    folder = Path(folder)
    manifest = load_family_manifest(folder)
    return Family(manifest.shape.name, manifest, tuple(_graph(folder / v.file, v, manifest) for v in manifest.variants))


def _graph(path: Path, variant: Variant, manifest: FamilyManifest) -> bytes:
    """A variant's file, which may come from anybody, hash and all."""
    from slim_scheduler.model.onnx_file import check_onnx

    content = _content(path, variant)
    try:
        facts = check_onnx(path, content, variant.size, variant.layout, alone=True).facts
    except InputError as error:
        raise CheckpointError(f"{path.parent}: {error}") from None
    found = (facts.dtype, facts.channels, *facts.size, facts.batch, facts.classes)
    said = (variant.dtype, manifest.shape.item_shape[0], *variant.size, variant.batch, manifest.shape.classes)
    if found != said:
        raise CheckpointError(
            f"{path} has (type, channels, height, width, batch, classes) {found}, its manifest says {said}; import the "
            "family again"
        )
    return content


def _content(path: Path, variant: Variant) -> bytes:
    """A variant's file, if size and hash are as the manifest says. The size comes before reading."""
    if not path.is_file() or path.stat().st_size != variant.bytes:
        raise CheckpointError(
            f"{path} is missing or has not the {variant.bytes} bytes of its manifest; import it again"
        )
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != variant.sha256:
        raise CheckpointError(
            f"{path} has SHA-256 {found[:16]}..., the manifest says {variant.sha256[:16]}...; it was changed: "
            "import the family again"
        )
    return content


def family_shape(name: str, variants: tuple[Variant, ...], item_shape: tuple[int, ...], classes: int) -> ModelShape:
    """A family as numbers: one segment, one rank per variant."""
    return ModelShape(
        name=name,
        segments=1,
        widths=tuple(float(i + 1) for i in range(len(variants))),
        classes=classes,
        item_shape=item_shape,
        input_bytes=FLOAT_BYTES * math.prod(item_shape),
        activation_bytes=((FLOAT_BYTES * classes,) * len(variants),),
        weight_bytes=(tuple(v.weight_bytes for v in variants),),
        variant_bytes=(((0,) * len(variants),),),
        workspace_bytes=(tuple(v.workspace_bytes for v in variants),),
        macs=((tuple(v.macs for v in variants),),),
    )
