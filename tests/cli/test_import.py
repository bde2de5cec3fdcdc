"""`slim import`: what cannot be served is refused in one line, with exit code 2, and leaves nothing behind."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, helper
from PIL import Image

from slim_scheduler.cli.family import cached_family
from slim_scheduler.model.family_import import NO_WISHES
from slim_scheduler.model.onnx_file import external_files
from tests.cli.conftest import Slim
from tests.model.onnx_networks import classifier, family_files, model, write


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(classifier(), tmp_path / "good.onnx")


def refused(slim: Slim, tmp_path: Path, *arguments: str | Path) -> str:
    """The one line; and that nothing is left behind."""
    out = tmp_path / "models/made"
    code, printed, err = slim("import", "--out", out, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("slim: ")]
    assert code == 2, err
    assert len(lines) == 1, err
    assert "Traceback" not in printed + err
    assert not out.exists()
    assert not list(out.parent.glob("*")) + list(out.parent.glob(".*.partial"))
    return lines[0]


def test_a_family_is_made_cheapest_first_with_its_accuracy(slim: Slim, tmp_path: Path) -> None:
    small, middle, large = family_files(tmp_path)
    code, _, err = slim("import", "--out", tmp_path / "fam", "--data", "digits", large, small, middle)
    assert code == 0, err
    manifest = json.loads((tmp_path / "fam/manifest.json").read_text())
    costs = [variant["cost_s"] for variant in manifest["variants"]]
    assert costs == sorted(costs)
    assert manifest["variants"][-1]["name"] == "net2"  # a thousand times as much work as the first
    assert manifest["measured"] == "accuracy"
    assert manifest["shape"]["widths"] == [1.0, 2.0, 3.0]
    assert sorted(manifest["accuracy"]["test"]) == ["1", "2", "3"]
    graphs = {variant["file"] for variant in manifest["variants"]}
    assert {p.name for p in (tmp_path / "fam").iterdir()} == {"manifest.json", "accuracy.parquet", *graphs}


def test_one_variant_alone(slim: Slim, tmp_path: Path, good: Path) -> None:
    assert "1 file is given; a family has 2 to 16" in refused(slim, tmp_path, good)


def test_the_same_network_twice(slim: Slim, tmp_path: Path, good: Path) -> None:
    again = tmp_path / "again.onnx"
    again.write_bytes(good.read_bytes())
    assert "again.onnx holds the same network as good.onnx" in refused(slim, tmp_path, good, again)


def test_a_folder_that_exists(slim: Slim, tmp_path: Path, good: Path) -> None:
    (tmp_path / "fam").mkdir()
    code, _, err = slim("import", "--out", tmp_path / "fam", good, good)
    assert code == 2
    assert "exists already" in err
    assert list((tmp_path / "fam").iterdir()) == []


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 0.999])
def test_a_truncated_file(slim: Slim, tmp_path: Path, good: Path, share: float) -> None:
    whole = good.read_bytes()
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(whole[: int(share * len(whole))])
    assert "cut.onnx" in refused(slim, tmp_path, good, cut)


def test_noise_and_empty_files(slim: Slim, tmp_path: Path, good: Path) -> None:
    for content in (b"", b"hello, this is no network\n" * 40, np.random.default_rng(0).bytes(5000)):
        bad = tmp_path / "bad.onnx"
        bad.write_bytes(content)
        assert "bad.onnx" in refused(slim, tmp_path, good, bad)


def test_a_tensor_that_declares_3_gb(slim: Slim, tmp_path: Path, good: Path) -> None:
    made = classifier(seed=1)
    del made.graph.initializer[1].dims[:]
    made.graph.initializer[1].dims.extend((30_000, 25_000))
    line = refused(slim, tmp_path, good, write(made, tmp_path / "huge.onnx"))
    assert "huge.onnx: declares 3000000" in line


def test_a_result_of_3_gb(slim: Slim, tmp_path: Path, good: Path) -> None:
    """The file is small; running it would not be."""
    made = classifier(seed=1)
    made.graph.node.insert(1, helper.make_node("Tile", ["c", "times"], ["t"]))
    made.graph.node[2].input[0] = "t"
    made.graph.initializer.append(helper.make_tensor("times", TensorProto.INT64, [4], [1, 1, 2000, 1500]))
    line = refused(slim, tmp_path, good, write(made, tmp_path / "blown.onnx"))
    assert "tensor 't' takes 3072000000 bytes" in line


def external(made: ModelProto, location: str, length: int | None = None) -> ModelProto:
    tensor = made.graph.initializer[0]
    size = len(tensor.raw_data) if length is None else length
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return made


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "sub/../../secret.bin", "link.bin"])
def test_external_data_outside_the_folder(slim: Slim, tmp_path: Path, good: Path, location: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\1" * 4096)
    (inside / "link.bin").symlink_to(tmp_path / "secret.bin")
    bad = write(external(classifier(seed=1), location), inside / "bad.onnx")
    assert "which is outside the file's folder" in refused(slim, tmp_path, good, bad)


def test_external_data_beside_the_file_is_taken_inside(slim: Slim, tmp_path: Path, good: Path) -> None:
    made = classifier(seed=1)
    (tmp_path / "weights.bin").write_bytes(made.graph.initializer[0].raw_data)
    other = write(external(made, "weights.bin"), tmp_path / "other.onnx")
    code, _, err = slim("import", "--out", tmp_path / "fam", good, other)
    assert code == 0, err
    assert all(b"weights.bin" not in path.read_bytes() for path in (tmp_path / "fam").glob("*.onnx"))


def test_external_data_is_listed_and_never_from_outside_the_folder(tmp_path: Path, good: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    for folder in (tmp_path, inside):
        (folder / "weights.bin").write_bytes(b"\1" * 4096)
    beside = write(external(classifier(seed=1), "weights.bin"), inside / "beside.onnx")
    outside = write(external(classifier(seed=1), "../weights.bin"), inside / "outside.onnx")
    noise = tmp_path / "noise.onnx"
    noise.write_bytes(b"no network")
    listed = [external_files(path) for path in (good, beside, outside, noise)]
    assert listed == [[], [inside / "weights.bin"], [], []]


@pytest.mark.parametrize("changed", ["nothing", "network", "external data", "labels", "images"])
def test_a_kept_family_is_taken_only_for_the_same_files_labels_and_images(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = classifier(seed=1)
    weights, labels, pictures = tmp_path / "weights.bin", tmp_path / "labels.txt", tmp_path / "pictures"
    weights.write_bytes(made.graph.initializer[0].raw_data)
    other = write(external(made, "weights.bin"), tmp_path / "other.onnx")
    labels.write_text("".join(f"class {i}\n" for i in range(10)))
    pictures.mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(pictures / "0.png")

    def family() -> Path:
        return cached_family([good, other], str(pictures), NO_WISHES._replace(labels=labels))

    before = family()
    match changed:
        case "network":
            write(classifier(seed=2), good)
        case "external data":
            weights.write_bytes((-np.frombuffer(weights.read_bytes(), np.float32)).tobytes())
        case "labels":
            labels.write_text("".join(f"kind {i}\n" for i in range(10)))
        case "images":
            Image.fromarray(np.ones((8, 8), np.uint8)).save(pictures / "1.png")
    assert (family() == before) is (changed == "nothing")


def test_external_data_that_is_too_short(slim: Slim, tmp_path: Path, good: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\0" * 10)
    bad = write(external(classifier(seed=1), "weights.bin"), tmp_path / "bad.onnx")
    assert "weights.bin', which has 10" in refused(slim, tmp_path, good, bad)


def test_a_custom_operator(slim: Slim, tmp_path: Path, good: Path) -> None:
    made = classifier(seed=1)
    made.graph.node[1].CopyFrom(helper.make_node("Magic", ["c"], ["r"], domain="com.example"))
    made.opset_import.append(helper.make_opsetid("com.example", 1))
    line = refused(slim, tmp_path, good, write(made, tmp_path / "magic.onnx"))
    assert "needs the custom operator 'com.example'::'Magic'" in line


def test_an_operator_that_onnx_does_not_have(slim: Slim, tmp_path: Path, good: Path) -> None:
    made = classifier(seed=1)
    made.graph.node[1].op_type = "Reloo"
    assert "Reloo" in refused(slim, tmp_path, good, write(made, tmp_path / "bad.onnx"))


def test_control_flow(slim: Slim, tmp_path: Path, good: Path) -> None:
    made = classifier(seed=1)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["b"])], "b", [], [helper.make_tensor_value_info("b", 1, None)]
    )
    made.graph.node[1].CopyFrom(helper.make_node("If", ["yes"], ["r"], then_branch=branch, else_branch=branch))
    made.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    assert "has control flow ('If')" in refused(slim, tmp_path, good, write(made, tmp_path / "if.onnx"))


def test_two_inputs(slim: Slim, tmp_path: Path, good: Path) -> None:
    made = classifier(seed=1)
    made.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 10]))
    made.graph.node.append(helper.make_node("Add", ["scores", "mask"], ["masked"]))
    made.graph.output[0].name = "masked"
    assert "has 2 inputs ('image', 'mask')" in refused(slim, tmp_path, good, write(made, tmp_path / "two.onnx"))


def test_two_outputs_and_outputs_that_are_no_scores(slim: Slim, tmp_path: Path, good: Path) -> None:
    two = classifier(seed=1)
    two.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, None))
    assert "has 2 outputs" in refused(slim, tmp_path, good, write(two, tmp_path / "two.onnx"))
    boxes = classifier(seed=1)
    boxes.graph.output[0].CopyFrom(helper.make_tensor_value_info("r", TensorProto.FLOAT, ["n", 4, 8, 8]))
    assert "class scores are" in refused(slim, tmp_path, good, write(boxes, tmp_path / "boxes.onnx"))


def test_other_classes(slim: Slim, tmp_path: Path, good: Path) -> None:
    other = write(classifier(classes=7, seed=1), tmp_path / "other.onnx")
    assert "other.onnx has 7 classes and good.onnx 10" in refused(slim, tmp_path, good, other)


def test_data_of_other_classes_leaves_nothing(slim: Slim, tmp_path: Path) -> None:
    files = family_files(tmp_path, 2, classes=7)
    assert "7" in refused(slim, tmp_path, "--data", "digits", *files)


def test_labels_that_do_not_fit(slim: Slim, tmp_path: Path, good: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    other = write(classifier(seed=1), tmp_path / "other.onnx")
    assert "has 2 names" in refused(slim, tmp_path, "--labels", tmp_path / "labels.txt", good, other)


def test_a_size_that_the_file_leaves_open(slim: Slim, tmp_path: Path, good: Path) -> None:
    other = write(classifier(size=("h", "w"), seed=1), tmp_path / "open.onnx")
    assert "--size" in refused(slim, tmp_path, good, other)
    code, _, err = slim("import", "--out", tmp_path / "fam", "--size", "8x8", good, other)
    assert code == 0, err


# ---- what torch writes


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """Where a file would appear if anything of an untrusted file ran."""
    return tmp_path / "ran"


def exported(seed: int = 0) -> io.BytesIO:
    """With an operator that works in place, as torchvision's networks have them."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(inplace=True), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(4, 10),
    ).eval()  # fmt: skip
    shapes = ({0: torch.export.Dim("n", min=1, max=256)},)
    program = torch.export.export(network, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=shapes)
    out = io.BytesIO()
    torch.export.save(program, out)
    return out


def rewritten(archive: io.BytesIO, path: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """The archive with some of its entries changed."""
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return path


def _trap(path: Path) -> bytes:
    """A pickle that makes a file when it is read."""

    class Here:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
            return open, (str(path), "w")

    return pickle.dumps(Here())


def as_torch_save(content: bytes) -> bytes:
    """What `torch.load` reads, with a pickle of one's own inside."""
    out = io.BytesIO()
    torch.save({}, out)
    out.seek(0)
    made = io.BytesIO()
    with zipfile.ZipFile(out) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, content if entry.filename.endswith("data.pkl") else old.read(entry))
    return made.getvalue()


def test_torch_export_files_are_taken(slim: Slim, tmp_path: Path, good: Path) -> None:
    path = tmp_path / "program.pt2"
    path.write_bytes(exported().getvalue())
    code, _, err = slim("import", "--out", tmp_path / "fam", good, path)
    assert code == 0, err
    manifest = json.loads((tmp_path / "fam/manifest.json").read_text())
    assert {variant["source"] for variant in manifest["variants"]} == {"onnx", "torch.export"}


def test_another_dialect(slim: Slim, tmp_path: Path, good: Path) -> None:
    def change(name: str, old: bytes) -> bytes:
        return old.replace(b'"TRAINING"', b'"EDGE"') if name.endswith("model.json") else old

    path = rewritten(exported(), tmp_path / "p.pt2", change)
    assert "is in the dialect ['EDGE']" in refused(slim, tmp_path, good, path)


def test_sample_inputs_are_not_even_looked_at(slim: Slim, tmp_path: Path, good: Path, trapped: Path) -> None:
    trap = as_torch_save(_trap(trapped))
    path = rewritten(exported(), tmp_path / "p.pt2", lambda name, old: trap if "sample_inputs" in name else old)
    code, _, err = slim("import", "--out", tmp_path / "fam", good, path)
    assert code == 0, err
    assert not trapped.exists()


def test_weights_that_are_pickles(slim: Slim, tmp_path: Path, good: Path, trapped: Path) -> None:
    trap = as_torch_save(_trap(trapped))

    def change(name: str, old: bytes) -> bytes:
        if name.endswith("weights_config.json"):
            return old.replace(b'"use_pickle": false', b'"use_pickle": true')
        return trap if "/weight_" in name else old

    path = rewritten(exported(), tmp_path / "p.pt2", change)
    assert "holds a pickle" in refused(slim, tmp_path, good, path)
    assert not trapped.exists()


def test_custom_objects(slim: Slim, tmp_path: Path, good: Path, trapped: Path) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}

    def change(name: str, old: bytes) -> bytes:
        if name.endswith("constants_config.json"):
            return json.dumps({"config": {"x": entry}}).encode()
        return old

    path = rewritten(exported(), tmp_path / "p.pt2", change)
    assert "holds a pickle ('opaque_obj_0')" in refused(slim, tmp_path, good, path)


@pytest.mark.parametrize("target", ["torch.hub.load", "torch.ops.aten.from_file.default", "torch.save", "os.system"])
def test_operators_that_are_not_atens(slim: Slim, tmp_path: Path, good: Path, target: str) -> None:
    def change(name: str, old: bytes) -> bytes:
        return old.replace(b"torch.ops.aten.relu_.default", target.encode()) if name.endswith("model.json") else old

    path = rewritten(exported(), tmp_path / "p.pt2", change)
    assert f"needs the operator '{target}'" in refused(slim, tmp_path, good, path)


def test_sizes_that_are_code(slim: Slim, tmp_path: Path, good: Path, trapped: Path) -> None:
    code = f"open('{trapped}', 'w')"

    def change(name: str, old: bytes) -> bytes:
        if not name.endswith("model.json"):
            return old
        return _with_expressions(json.loads(old), code)

    path = rewritten(exported(), tmp_path / "p.pt2", change)
    assert "no arithmetic of sizes" in refused(slim, tmp_path, good, path)
    assert not trapped.exists()


@pytest.mark.parametrize(
    "size",
    [
        "9**9**9**9", "Pow(9, Pow(9, Pow(9, 9)))", "1<<9999999999", "1>>1", "99999999999", "1+" * 100 + "1",
        "1+\n1",
    ],
)  # fmt: skip
def test_sizes_that_take_for_ever_to_calculate(slim: Slim, tmp_path: Path, good: Path, size: str) -> None:
    def change(name: str, old: bytes) -> bytes:
        return _with_expressions(json.loads(old), size) if name.endswith("model.json") else old

    path = rewritten(exported(), tmp_path / "p.pt2", change)
    assert "which is no arithmetic of sizes" in refused(slim, tmp_path, good, path)


def _with_expressions(tree: object, code: str) -> bytes:
    def walk(node: object) -> object:
        if isinstance(node, dict):
            return {key: code if key == "expr_str" else walk(value) for key, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    return json.dumps(walk(tree)).encode()


def test_a_pt_of_torch_save_or_torchscript(slim: Slim, tmp_path: Path, good: Path, trapped: Path) -> None:
    saved = tmp_path / "model.pt"
    saved.write_bytes(as_torch_save(_trap(trapped)))
    assert "is a pickle of torch.save, which is never loaded" in refused(slim, tmp_path, good, saved)
    script = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), str(script))
    assert "is TorchScript, which is never loaded" in refused(slim, tmp_path, good, script)
    plain = tmp_path / "plain.pkl"
    plain.write_bytes(_trap(trapped))
    assert "is a pickle, which is never loaded" in refused(slim, tmp_path, good, plain)
    assert not trapped.exists()


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_truncated_archive(slim: Slim, tmp_path: Path, good: Path, share: float) -> None:
    whole = exported().getvalue()
    path = tmp_path / "cut.pt2"
    path.write_bytes(whole[: int(share * len(whole))])
    assert "cut.pt2: is damaged or truncated" in refused(slim, tmp_path, good, path)


def test_a_network_that_is_not_a_graph_of_images(slim: Slim, tmp_path: Path, good: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["scores"])]
    flat = model(nodes, {}, [("x", TensorProto.FLOAT, ["n", 10])], [("scores", ["n", 10])])
    assert "an image batch has 4 dimensions" in refused(slim, tmp_path, good, write(flat, tmp_path / "flat.onnx"))
