"""ONNX files as they turn up: each is served as it answers itself, or refused in one line with nothing left behind."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.family import load_family
from slim_scheduler.model.family_import import import_family
from slim_scheduler.model.onnx_file import read_onnx
from tests.model.onnx_networks import classifier, model, reference, write

node = helper.make_node
DRAW = np.random.default_rng(3)
IMAGES = DRAW.standard_normal((5, 1, 8, 8)).astype(np.float32)
CONV = {"conv": DRAW.standard_normal((4, 1, 3, 3)).astype(np.float32)}
LINEAR = {
    "linear": DRAW.standard_normal((10, 4)).astype(np.float32),
    "bias": DRAW.standard_normal(10).astype(np.float32),
}


def network(
    before: Sequence[NodeProto] = (), after: Sequence[NodeProto] = (), x: str = "image", shape: Any = ("n", 1, 8, 8),
    **weights: np.ndarray,
) -> ModelProto:  # fmt: skip
    """Nodes of one's own around a convolution and a linear layer; `after` takes `s`."""
    nodes = [
        *before,
        node("Conv", [x, "conv"], ["r"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "linear", "bias"], ["s" if after else "scores"], transB=1),
        *after,
    ]
    outputs = [("scores", ["n", 10])]
    return model(nodes, CONV | LINEAR | weights, [("image", TensorProto.FLOAT, shape)], outputs)


def changed(change: Callable[[ModelProto], object], made: ModelProto | None = None) -> ModelProto:
    made = made or classifier(seed=1)
    change(made)
    return made


def of_opset(version: int, made: ModelProto | None = None) -> ModelProto:
    return changed(lambda m: setattr(m.opset_import[0], "version", version), made)


def in_half_precision() -> ModelProto:
    made = classifier(seed=1)
    for tensor in made.graph.initializer:
        half = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in (made.graph.input[0], made.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return made


def with_a_function(body: Sequence[NodeProto]) -> ModelProto:
    made = classifier(seed=1)
    del made.graph.node[:2]
    made.graph.node.insert(0, node("Block", ["image", "conv"], ["r"], domain="mine"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    made.functions.append(helper.make_function("mine", "Block", ["x", "w"], ["y"], body, opsets))
    made.opset_import.append(opsets[1])
    return made


def scores_with_sides_of_one() -> ModelProto:
    nodes = [
        node("Conv", ["image", "conv"], ["c"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["c"], ["p"]),
        node("Conv", ["p", "last"], ["scores"]),
    ]
    last = LINEAR["linear"][:, :, None, None]
    shape = ["n", 10, 1, 1]
    return model(nodes, CONV | {"last": last}, [("image", TensorProto.FLOAT, ["n", 1, 8, 8])], [("scores", shape)])


QUANTIZED = {
    "conv_q": DRAW.integers(-127, 127, (4, 1, 3, 3)).astype(np.int8),
    "conv_s": np.array(0.01, np.float32), "conv_z": np.array(0, np.int8),
    "xs": np.array(0.02, np.float32), "xz": np.array(128, np.uint8),
    "ys": np.array(0.05, np.float32), "yz": np.array(128, np.uint8),
}  # fmt: skip


def quantized(operator: bool) -> ModelProto:
    """int8 as exporters write it: rounding around a convolution (QDQ), or a convolution of integers."""
    first = node("QuantizeLinear", ["image", "xs", "xz"], ["q"])
    if operator:
        middle = [
            node("QLinearConv", ["q", "xs", "xz", "conv_q", "conv_s", "conv_z", "ys", "yz"], ["yq"], pads=[1] * 4),
            node("DequantizeLinear", ["yq", "ys", "yz"], ["r"]),
        ]
    else:
        middle = [
            node("DequantizeLinear", ["q", "xs", "xz"], ["d"]),
            node("DequantizeLinear", ["conv_q", "conv_s", "conv_z"], ["w"]),
            node("Conv", ["d", "w"], ["r"], pads=[1] * 4),
        ]
    made = network(**QUANTIZED)
    made.graph.node.remove(made.graph.node[0])
    for each in reversed((first, *middle)):
        made.graph.node.insert(0, each)
    return of_opset(19, made)  # what ONNX's own evaluator has


def of_microsoft() -> ModelProto:
    """Gelu under ONNX Runtime's own name: ONNX cannot infer its shape."""
    gelu = node("Gelu", ["image"], ["x"], domain="com.microsoft")
    made = network([gelu], x="x")
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


RESIZED = {"a": np.array([0]), "b": np.array([2]), "sides": np.array([16, 16])}
RESIZE = [
    node("Shape", ["image"], ["all"]),
    node("Slice", ["all", "a", "b"], ["first"]),
    node("Concat", ["first", "sides"], ["wanted"], axis=0),
    node("Resize", ["image", "", "", "wanted"], ["big"], mode="linear"),
]
TWICE = np.array([1, 1, 2, 2], np.float32)
SERVED: dict[str, Callable[[], ModelProto]] = {
    **{f"opset {version}": lambda version=version: of_opset(version) for version in (7, 9, 11, 13, 15, 18, 20)},
    "weights among the inputs": lambda: changed(
        lambda m: m.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in m.graph.initializer
        )
    ),
    "batch of -1": lambda: classifier(seed=1, batch=-1),
    "batch without a name": lambda: changed(lambda m: m.graph.input[0].type.tensor_type.shape.dim[0].Clear()),
    "output without a shape": lambda: changed(lambda m: m.graph.output[0].type.tensor_type.ClearField("shape")),
    "output with another shape": lambda: changed(
        lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[1], "dim_value", 7)
    ),
    "scores of 10x1x1": scores_with_sides_of_one,
    "names that need quoting": lambda: changed(
        lambda m: (setattr(m.graph.input[0], "name", "Bild/ä:0"), m.graph.node[0].input.__setitem__(0, "Bild/ä:0"))
    ),
    "resize by a factor": lambda: network([node("Resize", ["image", "", "two"], ["x"])], x="x", two=TWICE),
    "resize to a computed size": lambda: network(RESIZE, x="big", **RESIZED),
    "log-softmax": lambda: network(after=[node("LogSoftmax", ["s"], ["scores"], axis=1)]),
    "int8, rounding around floats": lambda: quantized(False),
    "int8, integer operators": lambda: quantized(True),
    "a function of its own": lambda: with_a_function(
        [node("Conv", ["x", "w"], ["c"], pads=[1] * 4), node("Relu", ["c"], ["y"])]
    ),
    "weights as constants": lambda: changed(
        lambda m: (
            [m.graph.node.insert(0, node("Constant", [], [t.name], value=t)) for t in m.graph.initializer],
            m.graph.ClearField("initializer"),
        )
    ),
}


def imported(tmp_path: Path, odd: ModelProto) -> np.ndarray:
    """What the odd file answers as the variant of a family, float32 (5, classes)."""
    good = write(classifier(features=64), tmp_path / "good.onnx")
    manifest = import_family([good, write(odd, tmp_path / "odd.onnx")], tmp_path / "made" / "fam", None)
    rank = next(i for i, variant in enumerate(manifest.variants, 1) if variant.name == "odd")
    return (
        load_family(tmp_path / "made" / "fam").slice(0, float(rank), "cpu").run(torch.from_numpy(IMAGES), None).numpy()
    )


@pytest.mark.parametrize("name", SERVED)
def test_it_is_served_as_it_answers_itself(tmp_path: Path, name: str) -> None:
    expected = reference(SERVED[name](), IMAGES).reshape(5, 10)
    # A step of 0.05 of an integer convolution may fall either way.
    assert np.allclose(imported(tmp_path, SERVED[name]()), expected, atol=0.02 if "integer" in name else 1e-4)


@pytest.mark.parametrize(
    "after",
    [
        [node("Softmax", ["s"], ["scores"], axis=1)],
        [node("Softmax", ["s"], ["scores"])],
        [node("Softmax", ["s"], ["t"], axis=1), node("Identity", ["t"], ["scores"])],
        [node("Softmax", ["s"], ["t"], axis=1), node("Cast", ["t"], ["scores"], to=TensorProto.FLOAT)],
    ],
)
def test_a_softmax_is_taken_away_also_behind_what_changes_nothing(tmp_path: Path, after: list[NodeProto]) -> None:
    logits = reference(network(), IMAGES)
    assert np.allclose(imported(tmp_path, network(after=after)), logits, atol=1e-4)


def test_half_precision_answers_to_its_own_digits(tmp_path: Path) -> None:
    expected = reference(classifier(seed=1), IMAGES)
    assert np.abs(imported(tmp_path, in_half_precision()) - expected).max() < 0.01 * np.abs(expected).max()


def test_operators_of_onnx_runtime_are_served(tmp_path: Path) -> None:
    from onnxruntime import InferenceSession

    session = InferenceSession(of_microsoft().SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"image": IMAGES})
    assert np.allclose(imported(tmp_path, of_microsoft()), expected, atol=1e-4)


def test_integer_convolutions_count_as_work(tmp_path: Path) -> None:
    files = [write(made, tmp_path / f"{i}.onnx") for i, made in enumerate((network(), quantized(True)))]
    plain, integer = map(read_onnx, files)
    assert plain.facts.macs == integer.facts.macs > 0


def drop(m: ModelProto) -> None:
    """Dropout that drops: what `export(..., training=TRAINING)` leaves behind."""
    m.graph.node.insert(0, node("Dropout", ["image", "ratio", "yes"], ["d"]))
    m.graph.node[1].input[0] = "d"
    for name, value in (("ratio", np.array(0.5, np.float32)), ("yes", np.array(True))):
        m.graph.initializer.append(numpy_helper.from_array(value, name))


NORMS = {name: np.ones(1, np.float32) for name in ("g", "b", "m", "v")}
REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "no nodes": (lambda: changed(lambda m: m.graph.ClearField("node")), "holds no ONNX graph"),
    "no opset": (lambda: changed(lambda m: m.ClearField("opset_import")), "holds no ONNX graph"),
    "an opset to come": (lambda: of_opset(99), "is of opset 99, at most"),
    "a version to come": (lambda: changed(lambda m: setattr(m, "ir_version", 99)), "ir_version 99"),
    "batches of none": (lambda: classifier(batch=0), "takes batches of 0; 1 to 1024, or any, are served"),
    "input without a shape": (
        lambda: changed(lambda m: m.graph.input[0].type.tensor_type.ClearField("shape")),
        "input 'image' has no shape",
    ),
    "images of integers": (lambda: classifier(dtype=TensorProto.INT64), "input 'image' is INT64; served are"),
    "images in double precision": (lambda: classifier(dtype=TensorProto.DOUBLE), "input 'image' is DOUBLE"),
    "two channels": (lambda: classifier(channels=2), "no layout is clear; give --layout"),
    "one class": (lambda: classifier(classes=1), "output 'scores' is 1x1; class scores are"),
    "the best class alone": (
        lambda: changed(
            lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", TensorProto.INT64),
            network(after=[node("ArgMax", ["s"], ["scores"], axis=1)]),
        ),
        "output 'scores' is 1x1; class scores are",
    ),
    "a single number": (
        lambda: network(after=[node("ReduceSum", ["s"], ["scores"], keepdims=0)]),
        "output 'scores' is a single number",
    ),
    "a softmax over the batch": (
        lambda: network(after=[node("Softmax", ["s"], ["scores"], axis=0)]),
        "its softmax is over the images of a batch",
    ),
    "a loop": (
        lambda: network([node("Loop", ["n3", "", "image"], ["x"], body=loop())], x="x", n3=np.array(3)),
        "has control flow ('Loop')",
    ),
    "sizes that depend on values": (
        lambda: network(
            [node("NonZero", ["image"], ["at"]), node("Shape", ["at"], ["far"]),
             node("Gather", ["far", "one"], ["side"]), node("Unsqueeze", ["side", "axis"], ["sides"]),
             node("Concat", ["rest", "sides"], ["size"], axis=0), node("Reshape", ["image", "size"], ["x"])],
            x="x", one=np.array(1), axis=np.array([0]), rest=np.array([-1, 1, 1]),
        ),
        "is not known before it runs, from operator",
    ),
    "a function that calls itself": (
        lambda: with_a_function([node("Block", ["x", "w"], ["y"], domain="mine")]),
        "is no valid ONNX graph",
    ),
    "a name used twice": (
        lambda: network([node("Relu", ["image"], ["r"])]),
        "is no valid ONNX graph",
    ),
    "an input from nowhere": (lambda: network(x="nowhere"), "is no valid ONNX graph"),
    "dropout that drops": (lambda: changed(drop), "answers one image differently each time"),
    "noise": (
        lambda: network([node("RandomNormalLike", ["image"], ["e"]), node("Add", ["image", "e"], ["x"])], x="x"),
        "answers one image differently each time",
    ),
    "batch norm in training": (
        lambda: network(
            [node("BatchNormalization", ["image", "g", "b", "m", "v"], ["x", "m2", "v2"], training_mode=1)],
            x="x", **NORMS,
        ),
        "has 'BatchNormalization' in training mode",
    ),
    "not a number": (
        lambda: changed(
            lambda m: m.graph.initializer[0].CopyFrom(
                numpy_helper.from_array(np.full((4, 1, 3, 3), np.nan, np.float32), "conv")
            )
        ),
        "gives scores that are not finite",
    ),
    "double precision inside": (
        lambda: network([node("Cast", ["image"], ["x"], to=TensorProto.DOUBLE)], x="x"),
        "",
    ),
    "an operator that fails": (
        lambda: changed(
            lambda m: (
                m.graph.node[1].CopyFrom(node("FusedConv", ["c", "conv"], ["r"], domain="com.microsoft")),
                m.opset_import.append(helper.make_opsetid("com.microsoft", 1)),
            )
        ),
        "does not run on",
    ),
}  # fmt: skip


def loop() -> Any:
    value = helper.make_tensor_value_info
    return helper.make_graph(
        [node("Add", ["x_in", "x_in"], ["x_out"]), node("Identity", ["c_in"], ["c_out"])],
        "body",
        [
            value("i", TensorProto.INT64, []),
            value("c_in", TensorProto.BOOL, []),
            value("x_in", TensorProto.FLOAT, None),
        ],
        [value("c_out", TensorProto.BOOL, []), value("x_out", TensorProto.FLOAT, None)],
    )


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    build, said = REFUSED[name]
    with pytest.raises(InputError) as caught:
        imported(tmp_path, build())
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("odd.onnx")
    assert said in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.onnx", "odd.onnx"]
    assert capfd.readouterr().err == ""  # nothing of the libraries' own besides


def test_files_of_one_name_take_their_folders_names(tmp_path: Path) -> None:
    files = []
    for i, folder in enumerate(("small", "large")):
        (tmp_path / folder).mkdir()
        files.append(write(classifier(features=2 * 64**i, seed=i), tmp_path / folder / "model.onnx"))
    manifest = import_family(files, tmp_path / "fam", None)
    assert [variant.name for variant in manifest.variants] == ["small-model", "large-model"]
