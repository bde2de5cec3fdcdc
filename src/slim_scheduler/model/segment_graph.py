"""One segment at one width, for one previous width, as an ONNX graph: what an execution engine compiles.

A family's graphs are its files. A slimmable network's are exported from its slices, once per machine: they are kept in
the user's cache under a hash of the weights and of everything else that decides about their content.
"""

import hashlib
import inspect
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.checkpoint import NETWORKS
from slim_scheduler.model.family import Family
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel, StoredNetwork
from slim_scheduler.setup.cache import cache_folder, write_whole

FORMAT = 1  # of what is exported; another one makes everything new
OPSET = 18
DIGEST = 64  # characters of a SHA-256

Prepare = Callable[[Tensor], npt.NDArray[Any]]


class SegmentGraph(NamedTuple):
    """`content` is an ONNX file with one input and one output; `batch` the only batch size it takes, 0 for any."""

    content: bytes
    batch: int
    prepare: Prepare


class GraphExporter:
    """Makes the graphs of one network, or finds them in the cache."""

    def __init__(self, model: SlimmableModel) -> None:
        self._model = model
        self._network = "" if isinstance(model, Family) else network_hash(model)

    def graph(self, segment: int, previous_width: float | None, width: float) -> SegmentGraph:
        """The graph of one piece. Raises InputError for a network that cannot be exported."""
        model = self._model
        if isinstance(model, Family):
            return SegmentGraph(model.graph(width), model.manifest.variant(width).batch, model.preparation(width))
        key = f"{FORMAT} {OPSET} {torch.__version__} {self._network} {segment} {previous_width} {width}"
        name = hashlib.sha256(key.encode()).hexdigest()
        folder = cache_folder("graphs")
        for path in folder.glob(f"{name}-*.onnx") if self._network else ():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == path.stem[-DIGEST:]:
                return SegmentGraph(content, 0, _as_it_is)
            path.unlink(missing_ok=True)  # cut off, or changed
        content = export_segment(model, segment, previous_width, width)
        if self._network:
            write_whole(folder / f"{name}-{hashlib.sha256(content).hexdigest()}.onnx", content)
        return SegmentGraph(content, 0, _as_it_is)


def export_segment(model: SlimmableModel, segment: int, previous_width: float | None, width: float) -> bytes:
    """One segment with its weights inside, for any batch size. Raises InputError, one line."""
    piece = model.slice(segment, width, "cpu")
    piece.build_variant(previous_width)
    item = model.item_shape if previous_width is None else model.activation_shape(segment - 1, previous_width)
    return _exported(_Piece([(piece, previous_width)]), item, f"segment {segment} of {model.name}")


def export_network(model: SlimmableModel, widths: tuple[float, ...]) -> bytes:
    """The whole network at one width tuple, from image to logits. Raises InputError, one line."""
    return _exported(network_at(model, widths), model.item_shape, f"network {model.name}")


def network_at(model: SlimmableModel, widths: tuple[float, ...]) -> nn.Module:
    """The network at one width tuple as a torch module."""
    pieces: list[tuple[SegmentSlice, float | None]] = []
    for segment, width in enumerate(widths):
        previous = widths[segment - 1] if segment else None
        piece = model.slice(segment, width, "cpu")
        piece.build_variant(previous)
        pieces.append((piece, previous))
    return _Piece(pieces)


class _Piece(nn.Module):
    def __init__(self, pieces: list[tuple[SegmentSlice, float | None]]) -> None:
        super().__init__()
        self._pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        for piece, previous in self._pieces:
            x = piece.run(x, previous)
        return x


def _exported(module: nn.Module, item: tuple[int, ...], what: str) -> bytes:
    out = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # The newer exporter takes 30 times as long per graph, and a network has up to 52 (docs/decisions.md).
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (torch.zeros(2, *item),),
                out,  # type: ignore[arg-type]
                dynamo=False,
                opset_version=OPSET,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            )
    except Exception as error:  # a network may be anybody's, and the exporter raises whatever it likes
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise InputError(
            f"{what} cannot be exported to ONNX ({type(error).__name__}: {line[:200]}); serve it on cpu or cuda:N"
        ) from None
    return out.getvalue()


def network_hash(model: SlimmableModel) -> str:
    """SHA-256 over names and values of all tensors, and over the source of the class's module where it is not ours.

    Empty for a network that does not show its tensors, or whose source cannot be read: nothing of it is kept.
    """
    source = _source_hash(type(model))
    if source is None or not hasattr(model, "state_dict"):
        return ""
    stored: StoredNetwork = model  # type: ignore[assignment]
    digest = hashlib.sha256(repr((type(model).__qualname__, *source, model.segments, model.item_shape)).encode())
    digest.update(repr(stored.architecture()).encode())
    for name, tensor in stored.state_dict().items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


def _source_hash(kind: type) -> tuple[str, ...] | None:
    """The module of a class and its file's SHA-256; () for a network of ours, None where there is no such file."""
    if f"{kind.__module__}:{kind.__qualname__}" in NETWORKS.values():
        return ()
    try:
        file = inspect.getsourcefile(kind)
        return None if file is None else (kind.__module__, hashlib.sha256(Path(file).read_bytes()).hexdigest())
    except (TypeError, OSError):  # built in, or typed at a prompt
        return None


def _as_it_is(x: Tensor) -> npt.NDArray[Any]:
    return x.contiguous().numpy()
