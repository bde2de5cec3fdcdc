"""A family's networks answer as their own files do, from one image that each makes its own input of."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from PIL import Image

from slim_scheduler.core.errors import CheckpointError, DataError, InputError
from slim_scheduler.model.data import digits
from slim_scheduler.model.family import Family, FamilyManifest, load_family
from slim_scheduler.model.family_import import Wishes, _labelled, import_family
from slim_scheduler.model.folder import load_model
from slim_scheduler.setup.accuracy_files import read_accuracy
from tests.model.onnx_networks import classifier, family_files, reference, write


def made(tmp_path: Path, *networks: ModelProto, data: str | None = None, **wishes: object) -> FamilyManifest:
    files = [write(network, tmp_path / f"net{i}.onnx") for i, network in enumerate(networks)]
    return import_family(files, tmp_path / "fam", data, Wishes(**wishes))  # type: ignore[arg-type]


def answers(family: Family, name: str, images: np.ndarray) -> np.ndarray:
    rank = next(float(i) for i, v in enumerate(family.manifest.variants, 1) if v.name == name)
    return family.slice(0, rank, "cpu").run(torch.from_numpy(images), None).numpy()


def pictures(count: int, channels: int, height: int, width: int) -> np.ndarray:
    """Smooth random pixels, uint8 (count, channels, height, width)."""
    coarse = np.random.default_rng(0).integers(0, 256, (count * channels, 6, 6)).astype(np.uint8)
    sides = [np.asarray(Image.fromarray(part).resize((width, height), Image.Resampling.BICUBIC)) for part in coarse]
    return np.stack(sides).reshape(count, channels, height, width)


def test_every_variant_answers_as_its_file_does(tmp_path: Path) -> None:
    networks = [classifier(features=2 * 32**i, seed=i) for i in range(3)]
    made(tmp_path, *networks)
    family = load_model(tmp_path / "fam")
    assert isinstance(family, Family)
    images = np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)
    for i, network in enumerate(networks):
        assert np.allclose(answers(family, f"net{i}", images), reference(network, images), atol=1e-4)


def test_a_copied_family_keeps_the_name_that_profiles_have(tmp_path: Path) -> None:
    made(tmp_path, classifier(features=2), classifier(features=64, seed=1))
    shutil.copytree(tmp_path / "fam", tmp_path / "other")
    assert load_family(tmp_path / "other").name == "fam"


def test_each_variant_has_its_own_size_normalisation_layout_and_type(tmp_path: Path) -> None:
    """All from the same pixels: what each is given is what a client of its own would give it."""
    large = classifier(channels=3, size=(32, 32), features=256, seed=0)
    small = classifier(channels=3, size=(20, 16), layout="NHWC", features=2, seed=1)
    raw = classifier(channels=3, size=(32, 32), dtype=TensorProto.UINT8, features=4, seed=2)
    means, stds = ((0.5,), (0.4, 0.5, 0.6), (0.0,)), ((0.25,), (0.2, 0.3, 0.4), (1.0,))
    manifest = made(tmp_path, large, small, raw, means=means, stds=stds)
    assert manifest.shape.item_shape == (3, 32, 32)
    family = load_family(tmp_path / "fam")
    pixels = pictures(4, 3, 32, 32)
    shares = pixels.astype(np.float32) / 255
    mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (manifest.mean, manifest.std))
    items = (shares - mean) / std

    assert np.allclose(answers(family, "net0", items), reference(large, (shares - 0.5) / 0.25), atol=1e-3)
    resized = np.stack(
        [
            np.asarray(Image.fromarray(image.transpose(1, 2, 0)).resize((16, 20), Image.Resampling.BILINEAR))
            for image in pixels
        ]
    ).astype(np.float32)
    own = (resized / 255 - np.array(means[1], np.float32)) / np.array(stds[1], np.float32)  # (4, 20, 16, 3)
    expected = reference(small, own.astype(np.float32))
    assert (
        np.abs(answers(family, "net1", items) - expected).max() < 0.02 * np.abs(expected).max()
    )  # PIL rounds to bytes
    # Exactly the pixels, though they came as normalised numbers.
    assert np.allclose(answers(family, "net2", items), reference(raw, pixels), rtol=1e-4, atol=1e-2)


def test_a_fixed_batch_size_is_opened_where_answers_stay_the_same(tmp_path: Path) -> None:
    networks = [classifier(batch=1, features=2, seed=0), classifier(batch=2, features=256, seed=1)]
    manifest = made(tmp_path, *networks)
    assert [variant.batch for variant in manifest.variants] == [0, 0]
    images = np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)
    family = load_family(tmp_path / "fam")
    opened = classifier(features=2, seed=0)
    assert np.allclose(answers(family, "net0", images), reference(opened, images), atol=1e-4)


def test_a_batch_size_that_is_built_in_is_kept_and_any_number_is_answered(tmp_path: Path) -> None:
    built_in = classifier(batch=2, features=256, seed=1)
    built_in.graph.node[3].op_type = "Reshape"
    built_in.graph.node[3].input.append("two")
    del built_in.graph.node[3].attribute[:]
    built_in.graph.initializer.append(helper.make_tensor("two", TensorProto.INT64, [2], [2, 256]))
    manifest = made(tmp_path, classifier(features=2), built_in)
    assert {variant.name: variant.batch for variant in manifest.variants} == {"net0": 0, "net1": 2}
    images = np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)
    same = classifier(features=256, seed=1)
    assert np.allclose(answers(load_family(tmp_path / "fam"), "net1", images), reference(same, images), atol=1e-4)


def test_a_final_softmax_is_taken_away(tmp_path: Path) -> None:
    made(tmp_path, classifier(features=2, softmax=True), classifier(features=256, seed=1))
    images = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
    expected = reference(classifier(features=2), images)
    assert np.allclose(answers(load_family(tmp_path / "fam"), "net0", images), expected, atol=1e-4)


def test_accuracy_is_per_item_against_true_labels(tmp_path: Path) -> None:
    networks = [classifier(features=2 * 32**i, seed=i) for i in range(3)]
    manifest = made(tmp_path, *networks, data="digits")
    table = read_accuracy(tmp_path / "fam")
    test = digits().test
    for rank, variant in enumerate(manifest.variants, 1):
        network = networks[int(variant.name[-1])]
        right = reference(network, test.pixels.astype(np.float32) / 255).argmax(1) == test.labels
        assert (table.correct((float(rank),)) != right).sum() <= 1  # a tie may fall either way
        assert manifest.accuracy["test"][str(rank)] == round(table.top1((float(rank),)), 4)
    assert table.weights_sha256 == manifest.weights_sha256


def folders(root: Path, names: list[str]) -> Path:
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for j, pixels in enumerate(pictures(2, 3, 20, 30)):
            Image.fromarray(np.roll(pixels, 3 * i + j, 1).transpose(1, 2, 0)).save(root / name / f"{j}.png")
    return root


def test_folders_are_classes_by_label_or_by_number(tmp_path: Path) -> None:
    networks = [classifier(channels=3, size=(16, 16), features=f, seed=f) for f in (2, 256)]
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(["tabby cat", "espresso", "rocket", *(f"other {i}" for i in range(7))]))
    by_label = folders(tmp_path / "by-label", ["Espresso", "tabby_cat"])
    manifest = made(tmp_path, *networks, data=str(by_label), labels=labels)
    assert manifest.measured == "accuracy"
    first = read_accuracy(tmp_path / "fam")
    by_number = folders(tmp_path / "by-number", ["1", "0"])
    import_family([tmp_path / f"net{i}.onnx" for i in range(2)], tmp_path / "other", str(by_number))
    assert first.items == read_accuracy(tmp_path / "other").items == 4
    with pytest.raises(DataError, match="folder 'zebra' is no class of the networks"):
        import_family(
            [tmp_path / f"net{i}.onnx" for i in range(2)],
            tmp_path / "third",
            str(folders(tmp_path / "z", ["zebra", "1"])),
        )
    assert not (tmp_path / "third").exists()


def test_labels_that_are_given_are_the_classes_whatever_the_data_call_them(tmp_path: Path) -> None:
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(names))
    networks = [classifier(features=f, seed=f) for f in (2, 256)]
    assert list(made(tmp_path, *networks, data="digits", labels=labels).classes) == names


@pytest.mark.parametrize("text", ["[" * 100_000, '["\\ud800"]'])
def test_odd_labels_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text(text)
    networks = [classifier(features=f, seed=f) for f in (2, 256)]
    with pytest.raises(InputError, match="the networks have 10 classes"):
        made(tmp_path, *networks, labels=labels)
    assert not (tmp_path / "fam").exists()


def test_a_folder_whose_name_could_not_be_served_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'a b' cannot be a model's name"):
        import_family([tmp_path / "none.onnx"], tmp_path / "a b", None)


@pytest.mark.parametrize(
    ("labels", "names", "found"),
    [
        (["日本", "Ελλάδα", "Россия"], ["ελλάδα", "россия", "日本"], [1, 2, 0]),
        (["C++", "C#", "C", "Go"], ["C", "C++", "C#", "go"], [2, 0, 1, 3]),
        (["C++", "C#", "Go"], ["c", "go"], [None, 2]),
        (["Straße", "caf\u00e9"], ["STRASSE", "cafe\u0301"], [0, 1]),
        (["tabby_cat", "crane", "crane"], ["Tabby cat", "crane"], [0, 1]),
    ],
)
def test_a_folder_is_a_class_by_its_exact_label_or_by_one_that_no_other_is_like(
    labels: list[str], names: list[str], found: list[int | None]
) -> None:
    known = _labelled(names, labels)
    assert [known.get(name) for name in names] == found


def test_without_labels_it_is_agreement_and_is_called_so(tmp_path: Path) -> None:
    networks = [classifier(channels=3, size=(16, 16), features=f, seed=f) for f in (2, 256)]
    images = folders(tmp_path / "val", ["a"]) / "a"
    manifest = made(tmp_path, *networks, data=str(images))
    assert manifest.measured == "agreement"
    assert manifest.data == "agreement with net1 on a"
    assert manifest.accuracy["test"]["2"] == 1.0  # with itself
    table = read_accuracy(tmp_path / "fam")
    assert table.data == table.agreement == manifest.data


def test_a_changed_file_and_a_file_outside_are_refused(tmp_path: Path) -> None:
    made(tmp_path, classifier(features=2), classifier(features=256, seed=1))
    folder = tmp_path / "fam"
    graph = next(folder.glob("1-*.onnx"))
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="it was changed"):
        load_family(folder)
    graph.write_bytes(whole)
    load_family(folder)
    tree = json.loads((folder / "manifest.json").read_text())
    tree["variants"][0]["file"] = "../net0.onnx"
    (folder / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="not one of its folder"):
        load_family(folder)


def elsewhere(network: ModelProto) -> None:
    """A weight that ONNX Runtime would read from the working directory."""
    weight = network.graph.initializer[0]
    length = len(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "secret.bin"), ("offset", "0"), ("length", str(length))):
        weight.external_data.add(key=key, value=value)


def bomb(network: ModelProto) -> None:
    """Scores to which the sum of 2^33 numbers is added."""
    end = network.graph.output[0].name
    network.graph.initializer.append(numpy_helper.from_array(np.array([2**33]), "size"))
    network.graph.node.extend(
        [
            helper.make_node("ConstantOfShape", ["size"], ["large"]),
            helper.make_node("ReduceSum", ["large"], ["sum"], keepdims=0),
            helper.make_node("Add", [end, "sum"], ["more"]),
        ]
    )
    network.graph.output[0].name = "more"


def function(network: ModelProto) -> None:
    body = [helper.make_node("Relu", ["x"], ["y"])]
    network.functions.append(helper.make_function("mine", "F", ["x"], ["y"], body, [helper.make_opsetid("", 17)]))


def sparse(network: ModelProto) -> None:
    """A constant of 2^40 zeros and a number."""
    values, indices = (numpy_helper.from_array(np.array([1]).astype(t), t) for t in ("float32", "int64"))
    constant = helper.make_node("Constant", [], ["s"])
    constant.attribute.append(
        helper.make_attribute("sparse_value", helper.make_sparse_tensor(values, indices, [2**40]))
    )
    network.graph.node.insert(0, constant)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (elsewhere, "has its data in another file, which the hash does not cover"),
        (bomb, "tensor 'large' takes 34359738368 bytes for 1 items; that is too large"),
        (function, "has functions of its own"),
        (sparse, "has sparse weights"),
        (lambda network: network.graph.node[0].ClearField("op_type"), "is no valid ONNX graph"),
        (lambda network: setattr(network.graph.node[0], "domain", "mine"), "needs the custom operator 'mine'"),
        (lambda network: setattr(network.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 9), "9, 8, 0, 10"),
    ],
)
def test_a_graph_that_import_would_refuse_is_refused_when_its_hash_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[ModelProto], None], said: str
) -> None:
    made(tmp_path, classifier(features=2), classifier(features=256, seed=1))
    tree = json.loads((tmp_path / "fam/manifest.json").read_text())
    variant = tree["variants"][0]
    path = tmp_path / "fam" / variant["file"]
    network = onnx.load(path)
    damage(network)
    content = write(network, path).read_bytes()
    variant["sha256"], variant["bytes"] = hashlib.sha256(content).hexdigest(), len(content)
    (tmp_path / "fam/manifest.json").write_text(json.dumps(tree))
    for folder in (tmp_path, path.parent):
        (folder / "secret.bin").write_bytes(bytes(1 << 16))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "fam")
    assert said in str(caught.value)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpu_of_torch_is_refused_with_what_to_use(tmp_path: Path) -> None:
    files = family_files(tmp_path, 2)
    import_family(files, tmp_path / "fam", None)
    with pytest.raises(InputError, match="onnxruntime:CUDA for a GPU"):
        load_family(tmp_path / "fam").slice(0, 1.0, "cuda:0")
