"""A checkpoint comes back as it was saved, or is refused with one line that says why."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import CheckpointError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.setup.accuracy_files import write_accuracy
from tests.model.test_slices import TWO_SEGMENTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(3)
    model = SlimResNet(TWO_SEGMENTS)
    checkpoint.save(model, folder, classes=("a", "b", "c"), mean=(0.5,), std=(0.2,))
    return model, folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "copy")


def refused(folder, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_a_loaded_network_computes_what_the_saved_one_did(saved):
    model, folder = saved
    loaded = checkpoint.load(folder)
    x = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(x, (0.5, 1.0)), model(x, (0.5, 1.0)))
    assert loaded.name == "tiny"


def test_accuracy_tables_go_when_another_network_is_saved_into_their_folder(folder):
    def measured(sha256):
        right = {(1.0, 1.0): np.array([True, False])}
        table = AccuracyTable(right, split="test", data="none", weights_sha256=sha256,
                              margins={(1.0, 1.0): np.array([0.5, 0.25], np.float16)})  # fmt: skip
        write_accuracy(table, folder / "accuracy.parquet")

    model, before = checkpoint.load(folder), checkpoint.load_manifest(folder)
    checkpoint.write_manifest(folder, msgspec.structs.replace(before, accuracy={"test": {"1/1": 0.5}}))
    same = {"classes": before.classes, "mean": before.mean, "std": before.std}

    measured(before.weights_sha256)
    checkpoint.save(model, folder, **same)
    assert (folder / "accuracy.parquet").is_file(), "the network is the same"
    assert checkpoint.load_manifest(folder).accuracy == {"test": {"1/1": 0.5}}

    measured("of weights before")
    checkpoint.save(model, folder, **same)
    assert not (folder / "accuracy.parquet").is_file()

    measured(before.weights_sha256)
    checkpoint.save(model, folder, **{**same, "std": (0.3,)})
    assert not (folder / "accuracy.parquet").is_file(), "it answers otherwise"

    measured(before.weights_sha256)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    checkpoint.save(model, folder, **{**same, "std": (0.3,)})
    assert not (folder / "accuracy.parquet").is_file()
    assert checkpoint.load_manifest(folder).accuracy == {}


def test_the_manifest_gives_the_shape_without_torch(saved):
    manifest = checkpoint.load_manifest(saved[1])
    assert manifest.shape.segments == 2
    assert manifest.classes == ("a", "b", "c")
    raw = json.loads((saved[1] / "manifest.json").read_text())
    assert raw["shape"]["widths"] == [0.5, 1.0]


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, name, "missing", "slim fit")


def test_truncated_weights_are_refused_by_their_size(folder):
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, "weights.safetensors", "bytes, the manifest says", "truncated")


def test_a_single_changed_bit_is_refused_by_the_hash(folder):
    path = folder / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    refused(folder, "SHA-256", "it was changed")


def test_a_huge_file_is_refused_before_it_is_read(folder):
    with (folder / "weights.safetensors").open("r+b") as stream:
        stream.truncate(1 << 40)  # sparse: takes no disk, and reading it would take all memory
    refused(folder, "1099511627776 bytes")


def test_weights_of_another_architecture_are_refused(folder):
    import hashlib

    from safetensors.torch import load, save

    path = folder / "weights.safetensors"
    tensors = load(path.read_bytes())
    tensors["classifier.bias"] = torch.zeros(5)
    raw = save(tensors)
    path.write_bytes(raw)
    edit(folder, weights_sha256=hashlib.sha256(raw).hexdigest(), weights_bytes=len(raw))
    refused(folder, "classifier.bias is (5,)", "needs (3,)")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 9}, "format 9"),
        ({"classes": ["a", "b"]}, "number of class names is 2"),
        ({"mean": []}, "number of means is 0"),
        ({"architecture": {"channels": [7, 16]}}, "blocks (2, 2, 2, 2) must be 2 positive numbers"),
        ({"architecture": {"channel": [7, 16]}}, "unknown field `channel`"),
        ({"architecture": {}}, "the architecture gives"),
        ({"weights_bytes": "many"}, "damaged"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder, change, word):
    edit(folder, **change)
    refused(folder, "manifest.json", word)


def test_a_manifest_that_is_no_json_is_refused(folder):
    (folder / "manifest.json").write_bytes(b"\x80\x04pickle")
    refused(folder, "manifest.json", "damaged")


def edit(folder, **change) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
