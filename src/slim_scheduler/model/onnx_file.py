"""An ONNX file as somebody else made it: checked without running anything, and brought into the form that is served.

What is served has one image input, one output of class scores, no control flow, only known operators, and all its
weights inside. Sizes are checked before memory is taken for them. Every refusal is one line that names the file, what
is wrong with it, and what to do.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto, helper

from slim_scheduler.core.errors import InputError, first_line
from slim_scheduler.model.graph_session import inferred_shapes

Layout = Literal["NCHW", "NHWC"]
DType = Literal["float32", "float16", "uint8"]

MOST_BYTES = (2 << 30) - 1  # of a file with its external data: protobuf's own limit
MOST_TENSOR_BYTES = 1 << 30  # of one tensor while one item runs
MOST_PIXELS = 4096 * 4096
MICROSOFT = "com.microsoft"
DOMAINS = ("", "ai.onnx", MICROSOFT)  # ONNX itself, and what every ONNX Runtime has besides
CHANNELS = (1, 3, 4)
# Their output's size is an input's value: where it cannot be inferred, it may be anything.
SIZED_BY_VALUE = ("ConstantOfShape", "Expand", "Tile", "Range", "RandomNormal", "RandomUniform")
# Operators that multiply, and which of their inputs are the two factors.
FACTORS = {
    "Conv": (0, 1), "FusedConv": (0, 1), "ConvInteger": (0, 1), "QLinearConv": (0, 3),
    "Gemm": (0, 1), "MatMul": (0, 1), "MatMulInteger": (0, 1), "QLinearMatMul": (0, 3), "QGemm": (0, 3),
}  # fmt: skip
INPUT_TYPES: dict[int, DType] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.UINT8: "uint8",
}


class GraphFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one graph. `size` is (height, width) in pixels; `batch` the only batch size it takes, 0 for any.

    Bytes: `weight_bytes` all weights, `workspace_bytes` the largest sum of intermediate results of one item.
    """

    input: str
    dtype: DType
    layout: Layout
    channels: int
    size: tuple[int, int]
    batch: int
    output: str
    classes: int
    weight_bytes: int
    workspace_bytes: int
    macs: int


class Graph(msgspec.Struct, frozen=True):
    """A checked graph: `content` is the whole ONNX file to serve, `metadata` what its author wrote into it."""

    facts: GraphFacts
    content: bytes
    metadata: dict[str, str]


def read_onnx(path: Path, size: tuple[int, int] | None = None, layout: Layout | None = None) -> Graph:
    """Reads and checks a file. `size` and `layout` say what the file leaves open. Raises InputError, one line."""
    return check_onnx(path, _content(path), size, layout)


def external_files(path: Path) -> list[Path]:
    """The files beside a file in which its weights lie. Empty for what `read_onnx` refuses, which says why."""
    try:
        model = onnx.load_model_from_string(_content(path))
        constants = (node for function in model.functions for node in function.node)
        tensors = (*_tensors(model), *(tensor for node in constants for tensor in _constants(node)))
        found = {_external_file(path, t)[0] for t in tensors if t.data_location == TensorProto.EXTERNAL}
    except (DecodeError, InputError):
        return []
    return sorted(found)


def _content(path: Path) -> bytes:
    length = path.stat().st_size
    if length > MOST_BYTES:
        raise _refuse(path, f"has {length} bytes, at most {MOST_BYTES} are read; serve a smaller network")
    return path.read_bytes()


def check_onnx(
    path: Path,
    raw: bytes,
    size: tuple[int, int] | None = None,
    layout: Layout | None = None,
    alone: bool = False,
) -> Graph:
    """`read_onnx` for content that was read already; `path` names it, and is where its external data lies.

    `alone`: a file whose hash was checked, and which may have neither external data, which it does not cover, nor
    functions.
    """
    try:
        model = onnx.load_model_from_string(raw)
    except DecodeError:
        raise _refuse(path, "is no ONNX file, or is truncated; export or fetch it again") from None
    if not model.graph.node or not model.opset_import:
        raise _refuse(path, "holds no ONNX graph, or is truncated; export or fetch it again")
    if alone:
        _check_alone(path, model)
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
            raise _invalid(path, error) from None
    _check_nodes(path, model)
    _take_weights(path, model)
    source, output = _ends(path, model)
    _drop_softmax(path, model, output)
    if not output.type.tensor_type.HasField("shape"):
        output.type.tensor_type.shape.dim.extend([TensorShapeProto.Dimension()] * 2)
    dtype, found, order, channels, batch = _image(path, source, size, layout)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise _invalid(path, error) from None
    image = (batch or 1, channels, *found) if order == "NCHW" else (batch or 1, *found, channels)
    shapes = _shapes(path, model, source.name, image)
    if _flattened(model, shapes):
        shapes = _shapes(path, model, source.name, image)
    workspace, macs, classes = _sizes(path, model, shapes, batch or 1)
    facts = GraphFacts(
        input=source.name,
        dtype=dtype,
        layout=order,
        channels=channels,
        size=found,
        batch=batch,
        output=model.graph.output[0].name,
        classes=classes,
        weight_bytes=sum(_declared_bytes(tensor) for tensor in _tensors(model)),
        workspace_bytes=workspace,
        macs=macs,
    )
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    return Graph(facts, model.SerializeToString(), metadata)


def with_any_batch(graph: Graph) -> Graph:
    """The same graph, its first dimension declared open. Whether it really is must be tried."""
    model = onnx.load_model_from_string(graph.content)
    for value in (*_inputs(model), *model.graph.output):
        value.type.tensor_type.shape.dim[0].Clear()
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    model.graph.ClearField("value_info")
    facts = msgspec.structs.replace(graph.facts, batch=0)
    return Graph(facts, model.SerializeToString(), graph.metadata)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---- what is refused


def _check_alone(path: Path, model: ModelProto) -> None:
    if model.functions:
        raise _refuse(path, "has functions of its own, which `slim import` would have taken apart; import it again")
    for tensor in _tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            raise _refuse(
                path,
                f"tensor {_quote(tensor.name)} has its data in another file, which the hash does not cover; store the "
                "weights inside",
            )


def _check_nodes(path: Path, model: ModelProto) -> None:
    if model.training_info:
        raise _refuse(path, "holds training information; export it for inference")
    sparse = (a.HasField("sparse_tensor") or a.sparse_tensors for node in model.graph.node for a in node.attribute)
    if model.graph.sparse_initializer or any(sparse):
        raise _refuse(path, "has sparse weights; export it with dense ones")
    latest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > latest:
            raise _refuse(path, f"is of opset {opset.version}, at most {latest} is read; export it with an older opset")
    for node in model.graph.node:
        if node.domain not in DOMAINS:
            raise _refuse(
                path,
                f"needs the custom operator {_quote(node.domain)}::{_quote(node.op_type)}; "
                "export it with standard ONNX operators alone",
            )
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise _refuse(
                path,
                f"has control flow ({_quote(node.op_type)}); export it with fixed shapes, so that every item takes the "
                "same path",
            )
        if any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute):
            raise _refuse(path, f"has {_quote(node.op_type)} in training mode; export it in evaluation mode")


def _take_weights(path: Path, model: ModelProto) -> None:
    """Checks every tensor's size against what it holds, and brings external data inside."""
    total = 0
    for tensor in _tensors(model):
        if tensor.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
            raise _refuse(path, f"tensor {_quote(tensor.name)} is no tensor of numbers; export it again")
        declared = _declared_bytes(tensor)
        total += declared
        if total > MOST_BYTES:
            raise _refuse(
                path,
                f"declares {total} bytes of weights up to tensor {_quote(tensor.name)}, at most {MOST_BYTES} are read",
            )
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.raw_data = _external(path, tensor, declared)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        try:
            held = len(tensor.raw_data) if tensor.HasField("raw_data") else _typed_bytes(tensor)
        except KeyError:
            raise _refuse(path, f"tensor {_quote(tensor.name)} has the unknown type {tensor.data_type}") from None
        if held != declared:
            raise _refuse(
                path,
                f"tensor {_quote(tensor.name)} declares {declared} bytes and holds {held}; it is truncated or damaged: "
                "export or fetch it again",
            )


def _external_file(path: Path, tensor: TensorProto) -> tuple[Path, dict[str, str]]:
    """The other file of the same folder that holds a tensor, and what the tensor says of its place there."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    folder = path.parent.resolve()
    target = folder / location
    if not location or os.path.isabs(location) or not target.resolve().is_relative_to(folder):
        raise _refuse(
            path,
            f"tensor {_quote(tensor.name)} wants its data from {_quote(location)}, which is outside the file's folder; "
            "put the data beside the file",
        )
    if not target.is_file():
        raise _refuse(path, f"its external data {_quote(location)} is missing; put it beside the file")
    return target, said


def _external(path: Path, tensor: TensorProto, declared: int) -> bytes:
    """The bytes of a tensor that lie in another file of the same folder."""
    target, said = _external_file(path, tensor)
    location = said["location"]
    try:
        offset, length = int(said.get("offset", 0)), int(said.get("length", declared))
    except ValueError:
        raise _refuse(path, f"tensor {_quote(tensor.name)} has no readable place in {_quote(location)}") from None
    size = target.stat().st_size
    if offset < 0 or length != declared or offset + length > size:
        raise _refuse(
            path,
            f"tensor {_quote(tensor.name)} needs {declared} bytes at {offset} of {_quote(location)}, which has {size}; "
            "fetch it again",
        )
    with target.open("rb") as file:
        file.seek(offset)
        content: bytes = file.read(length)
        return content


def _ends(path: Path, model: ModelProto) -> tuple[ValueInfoProto, ValueInfoProto]:
    inputs, outputs = _inputs(model), list(model.graph.output)
    for what, values in (("inputs", inputs), ("outputs", outputs)):
        if len(values) != 1:
            names = ", ".join(_quote(value.name) for value in values[:4]) or "none"
            advice = "a network takes one image" if what == "inputs" else "export the class scores alone"
            raise _refuse(path, f"has {len(values)} {what} ({names}); {advice}")
    return inputs[0], outputs[0]


def _image(
    path: Path, source: ValueInfoProto, size: tuple[int, int] | None, layout: Layout | None
) -> tuple[DType, tuple[int, int], Layout, int, int]:
    """The input's type, size, layout, channels and batch size (0: any)."""
    kind = source.type.tensor_type
    dtype = INPUT_TYPES.get(kind.elem_type)
    if dtype is None:
        name = TensorProto.DataType.Name(kind.elem_type) if kind.elem_type else "no tensor"
        raise _refuse(path, f"input {_quote(source.name)} is {name}; served are float32, float16 and uint8 images")
    if not kind.HasField("shape"):
        raise _refuse(path, f"input {_quote(source.name)} has no shape; export it with one")
    # Some exporters write -1 for any size.
    dims = [dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None for dim in kind.shape.dim]
    said = _by(dims)
    if len(dims) != 4:
        raise _refuse(path, f"input {_quote(source.name)} is {said}; an image batch has 4 dimensions")
    order = layout or ("NCHW" if dims[1] in CHANNELS else "NHWC" if dims[3] in CHANNELS else None)
    if order is None:
        raise _refuse(path, f"input {_quote(source.name)} is {said}, no layout is clear; give --layout NCHW or NHWC")
    channels, sides = (dims[1], dims[2:]) if order == "NCHW" else (dims[3], dims[1:3])
    if channels not in CHANNELS:
        raise _refuse(path, f"input {_quote(source.name)} has {channels or 'unknown'} channels; images have 1, 3 or 4")
    height, width = (known or asked for known, asked in zip(sides, size or (None, None), strict=True))
    if not height or not width:
        raise _refuse(path, f"input {_quote(source.name)} is {said}; say how large its images are with --size")
    if height * width > MOST_PIXELS:
        raise _refuse(path, f"input {_quote(source.name)} is {height}x{width} pixels, at most {MOST_PIXELS} are served")
    if dims[0] is not None and not 1 <= dims[0] <= 1024:
        raise _refuse(path, f"input {_quote(source.name)} takes batches of {dims[0]}; 1 to 1024, or any, are served")
    return dtype, (height, width), order, channels, dims[0] or 0


def _drop_softmax(path: Path, model: ModelProto, output: ValueInfoProto) -> None:
    """A final softmax over classes goes: what is served are logits, and confidence is taken from them."""
    made = {name: node for node in model.graph.node for name in node.output}
    used = Counter(name for node in model.graph.node for name in node.input)
    name = output.name
    while (last := made.get(name)) is not None and not used[name] and last.domain in ("", "ai.onnx"):
        if last.op_type == "Softmax":
            axis = next((a.i for a in last.attribute if a.name == "axis"), -1)
            if axis == 0:
                raise _refuse(
                    path, "its softmax is over the images of a batch (axis 0); export it over classes (axis 1)"
                )
            if axis in (1, -1):
                last.op_type = "Identity"
                last.ClearField("attribute")
            return
        if last.op_type not in ("Identity", "Cast"):
            return
        name = last.input[0]
        used[name] -= 1


# ---- sizes


class _Shapes(NamedTuple):
    """Shapes by tensor name, as far as they are known before anything runs, and bytes of a number likewise."""

    graph: onnx.GraphProto
    shapes: dict[str, tuple[int, ...]]
    widths: dict[str, int]

    @property
    def scores(self) -> tuple[int, ...] | None:
        return self.shapes.get(self.graph.output[0].name)


def _shapes(path: Path, model: ModelProto, source: str, image: tuple[int, ...]) -> _Shapes:
    """What can be inferred when the input has the shape `image`."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in _inputs(fixed):
        for dim, size in zip(value.type.tensor_type.shape.dim, image, strict=True):
            dim.Clear()
            dim.dim_value = size
    fixed.graph.ClearField("value_info")
    fixed.graph.output[0].type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise _refuse(path, f"its shapes do not fit together ({first_line(error)}); export it again") from None
    graph = inferred.graph
    shapes = {source: image} | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    widths: dict[str, int] = {source: _item_bytes(graph.input, source)}
    for value in (*graph.value_info, *graph.output):
        kind = value.type.tensor_type
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
        if kind.HasField("shape") and min(dims, default=1) >= 0:
            shapes[value.name] = dims
        widths[value.name] = _bytes_of(kind.elem_type)
    if graph.output[0].name not in shapes and any(node.domain == MICROSOFT for node in graph.node):
        shapes |= inferred_shapes(fixed, path.name)  # ONNX itself does not know these operators' shapes
    return _Shapes(graph, shapes, widths)


def _flattened(model: ModelProto, shapes: _Shapes) -> bool:
    """Scores with sides of 1 besides, such as 1x1000x1x1, become one row per image."""
    scores = shapes.scores
    if scores is None or len(scores) < 3 or sum(side != 1 for side in scores[1:]) != 1:
        return False
    output = model.graph.output[0]
    row = helper.make_tensor_value_info(f"{output.name}_rows", output.type.tensor_type.elem_type, [None, None])
    model.graph.node.append(helper.make_node("Flatten", [output.name], [row.name], axis=1))
    output.CopyFrom(row)
    return True


def _sizes(path: Path, model: ModelProto, found: _Shapes, count: int) -> tuple[int, int, int]:
    """(workspace bytes, multiply-adds, classes) of one item."""
    graph, shapes, scores = found.graph, found.shapes, found.scores
    output = _quote(graph.output[0].name)
    if scores is None:
        first = next(node for node in graph.node if any(name and name not in shapes for name in node.output))
        raise _refuse(
            path,
            f"the shape of output {output} is not known before it runs, from operator {_quote(first.op_type)} on; "
            "export it with fixed shapes",
        )
    if len(scores) != 2 or scores[0] != count or scores[1] < 2:
        raise _refuse(path, f"output {output} is {_by(scores)}; class scores are {count} x at least 2, one per class")
    held = {name: math.prod(shape) * found.widths.get(name, 4) for name, shape in shapes.items()}
    for node in graph.node:
        for name in node.output:
            if held.get(name, 0) > MOST_TENSOR_BYTES * count:
                raise _refuse(
                    path, f"tensor {_quote(name)} takes {held[name]} bytes for {count} items; that is too large"
                )
            if name and name not in held and node.op_type in SIZED_BY_VALUE:
                raise _refuse(path, f"the size of tensor {_quote(name)} ({node.op_type}) is not known before it runs")
    return _workspace(graph, held) // count, sum(_macs(node, shapes) for node in graph.node) // count, scores[1]


def _workspace(graph: onnx.GraphProto, held: dict[str, int]) -> int:
    """The largest sum of results that are needed at the same time; weights are not among them."""
    weights = {tensor.name for tensor in graph.initializer}
    last = {name: i for i, node in enumerate(graph.node) for name in node.input}
    live = {value.name: held.get(value.name, 0) for value in graph.input if value.name not in weights}
    most = sum(live.values())
    ends = {value.name for value in graph.output}
    for i, node in enumerate(graph.node):
        for name in node.output:
            live[name] = held.get(name, 0)
        most = max(most, sum(live.values()))
        for name in (*node.input, *node.output):
            if name in live and last.get(name, i) <= i and name not in ends:
                del live[name]
    return most


def _macs(node: NodeProto, shapes: dict[str, tuple[int, ...]]) -> int:
    """Multiply-adds of convolutions and matrix products; everything else is small beside them."""
    out = shapes.get(node.output[0]) if node.output else None
    at = FACTORS.get(node.op_type)
    if out is None or at is None or len(node.input) <= at[1]:
        return 0
    first, second = (shapes.get(node.input[i]) for i in at)
    if not first or not second:
        return 0
    if "Conv" in node.op_type:
        return math.prod(out) * math.prod(second[1:])
    transposed = any(a.name == "transA" and a.i for a in node.attribute)
    return math.prod(out) * first[0 if transposed else -1]


# ---- small things


def _inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Inputs that a caller gives; old files list their weights among the inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor that the file holds: weights, and constants of nodes."""
    yield from model.graph.initializer
    for node in model.graph.node:
        yield from _constants(node)


def _constants(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors


def _declared_bytes(tensor: TensorProto) -> int:
    if min(tensor.dims, default=0) < 0:
        return -1
    bits: int = math.prod(tensor.dims) * _bits_of(tensor.data_type)
    return -(-bits // 8)


def _typed_bytes(tensor: TensorProto) -> int:
    """Bytes of the values that the file holds in the field of their type."""
    field = helper.tensor_dtype_to_field(tensor.data_type)
    per_value = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
    values = len(getattr(tensor, field)) // per_value
    if _bits_of(tensor.data_type) < 8:
        return values  # packed, several to a byte
    return values * _bytes_of(tensor.data_type)


def _item_bytes(values: "list[ValueInfoProto]", name: str) -> int:
    return next(_bytes_of(value.type.tensor_type.elem_type) for value in values if value.name == name)


def _bits_of(data_type: int) -> int:
    if data_type in (TensorProto.INT4, TensorProto.UINT4):
        return 4
    return 8 * _bytes_of(data_type)


def _bytes_of(data_type: int) -> int:
    try:
        size: int = helper.tensor_dtype_to_np_dtype(data_type).itemsize
        return size
    except (KeyError, AttributeError):
        return 4


def _by(dims: Sequence[int | None]) -> str:
    return "x".join("?" if dim is None else str(dim) for dim in dims) or "a single number"


def _invalid(path: Path, error: Exception) -> InputError:
    return _refuse(path, f"is no valid ONNX graph ({first_line(error)}); export it again")


def _refuse(path: Path, why: str) -> InputError:
    return InputError(f"{path.name}: {why}")


def _quote(text: str) -> str:
    """A name from a stranger's file, fit for one line."""
    return repr(text[:80])
