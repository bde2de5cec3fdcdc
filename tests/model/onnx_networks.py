"""Small ONNX networks, built node by node, so that tests can also build what no exporter would."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper


def classifier(
    *,
    channels: int = 1,
    size: tuple[Any, Any] = (8, 8),
    classes: int = 10,
    features: int = 4,
    batch: Any = "n",
    layout: str = "NCHW",
    dtype: int = TensorProto.FLOAT,
    softmax: bool = False,
    seed: int = 0,
    metadata: dict[str, str] | None = None,
) -> ModelProto:
    """Convolution, ReLU, mean, linear: random weights from `seed`."""
    draw = np.random.default_rng(seed)
    weights = {
        "conv": draw.standard_normal((features, channels, 3, 3)).astype(np.float32),
        "linear": draw.standard_normal((classes, features)).astype(np.float32),
        "bias": draw.standard_normal(classes).astype(np.float32),
    }
    nodes: list[NodeProto] = []
    x = "image"
    if dtype != TensorProto.FLOAT:
        nodes.append(helper.make_node("Cast", [x], ["numbers"], to=TensorProto.FLOAT))
        x = "numbers"
    if layout == "NHWC":
        nodes.append(helper.make_node("Transpose", [x], ["first"], perm=[0, 3, 1, 2]))
        x = "first"
    scores = "before" if softmax else "scores"
    nodes += [
        helper.make_node("Conv", [x, "conv"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "linear", "bias"], [scores], transB=1),
    ]
    if softmax:
        nodes.append(helper.make_node("Softmax", ["before"], ["scores"], axis=1))
    shape = [batch, channels, *size] if layout == "NCHW" else [batch, *size, channels]
    return model(nodes, weights, [("image", dtype, shape)], [("scores", [batch, classes])], metadata)


def model(
    nodes: Sequence[NodeProto],
    weights: dict[str, np.ndarray],
    inputs: Sequence[tuple[str, int, Sequence[Any]]],
    outputs: Sequence[tuple[str, Sequence[Any]]],
    metadata: dict[str, str] | None = None,
    domains: Sequence[str] = (),
) -> ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "network",
        [helper.make_tensor_value_info(name, kind, list(shape)) for name, kind, shape in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name, shape in outputs],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in domains)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    if metadata:
        helper.set_model_props(made, metadata)
    return made


def write(made: ModelProto, path: Path) -> Path:
    path.write_bytes(made.SerializeToString())
    return path


def family_files(folder: Path, count: int = 3, **options: Any) -> list[Path]:
    """Networks of one task, each with more features than the one before it."""
    return [write(classifier(features=2 * 32**i, seed=i, **options), folder / f"net{i}.onnx") for i in range(count)]


def reference(made: ModelProto, images: np.ndarray) -> np.ndarray:
    """What ONNX's own evaluator answers."""
    from onnx.reference import ReferenceEvaluator

    (scores,) = ReferenceEvaluator(made).run(None, {made.graph.input[0].name: images})
    return np.asarray(scores)
