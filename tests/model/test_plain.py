"""A network of another class is saved, found by its name, and served by its slices; what is no network is refused."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.shape import shape_of
from slim_scheduler.setup.config import Config, ModelConfig
from slim_scheduler.setup.machines import load_shape
from tests.model.plain_networks import (
    Descending,
    ForgetsVariants,
    NoCosts,
    PlainResNet,
    Raises,
    Tensors,
    WithoutMoves,
    WrongSize,
    WrongSlices,
)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[PlainResNet, Path]:
    torch.manual_seed(1)
    network = PlainResNet(7, channels=4)
    network.train()
    network(torch.randn(16, 1, 8, 8))  # the running statistics of its norms are part of it
    checkpoint.save(network.eval(), tmp_path / "mine")
    return network, tmp_path / "mine"


def change(folder: Path, **entries: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | entries))


def test_a_loaded_network_and_its_slices_compute_what_the_saved_one_did(saved):
    network, folder = saved
    loaded = checkpoint.load(folder)
    assert type(loaded) is PlainResNet
    assert loaded.name == "mine"
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        expected = network(x)
        assert torch.equal(loaded(x), expected)
    first, second = (loaded.slice(segment, 1.0, "cpu") for segment in range(2))
    assert torch.equal(second.run(first.run(x, None), 1.0), expected)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (WrongSlices(), r"segment 0 at width 1 gives \(8, 8, 8\) an item, `activation_shape` says \(1, 2, 3\)"),
        (Raises(), r"segment 0 at width 1 does not run: RuntimeError: not written yet"),
        (Descending(), r"widths \(1\.0, 0\.5\); let them ascend"),
        (ForgetsVariants(), r"has_variant\(1\) is False after build_variant\(1\)"),
        (WithoutMoves(), r"segment 1 at width 1 does not run: .* no to_host, to_device"),
        (NoCosts(), r"network NoCosts does not tell its sizes: KeyError: 0"),
        (Tensors(), r"architecture\(\) gives no JSON values by name .* tensors belong to state_dict\(\)"),
    ],
)
def test_a_class_that_tells_other_than_it_does_is_not_saved(tmp_path, network, said):
    with pytest.raises(InputError, match=said):
        checkpoint.save(network, tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_means_that_do_not_fit_the_channels_are_told_to_who_saves(tmp_path):
    with pytest.raises(InputError, match=r"number of means is 3, its network needs 1; give as many"):
        checkpoint.save(PlainResNet(), tmp_path / "mine", mean=(0.5, 0.5, 0.5))


def test_a_copied_folder_keeps_the_name_that_profiles_have(saved, tmp_path):
    """What `slim measure` writes for the copy is what commands look for."""
    shutil.copytree(saved[1], tmp_path / "other")
    config = Config(model=ModelConfig(path=str(tmp_path / "other")))
    assert checkpoint.load(tmp_path / "other").name == load_shape(config).name == "mine"


def test_its_sizes_are_those_of_its_layers(saved):
    shape = shape_of(saved[0])
    block = 64 * (9 * 1 * 4 + 9 * 4 * 4 + 1 * 4)
    assert shape.macs[0] == ((block,),)
    assert shape.activation_bytes == ((4 * 4 * 64,), (4 * 7,))
    weights = 9 * 4 + 4 * 4 + (9 * 16 + 4) + (4 + 4)  # convolutions with biases; norm: scale, shift, mean, variance
    assert shape.weight_bytes[0] == (4 * weights + 8,)  # and its count of batches, an int64
    activation = 4 * 4 * 64
    assert 2 * activation <= shape.workspace_bytes[0][0] <= 5 * activation


def test_the_manifest_names_the_class_and_what_builds_it(saved):
    manifest = checkpoint.load_manifest(saved[1])
    assert manifest.network == "tests.model.plain_networks:PlainResNet"
    assert manifest.architecture == {"classes": 7, "channels": 4}
    assert manifest.shape.name == "mine"


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("subprocess:Popen", "has no from_architecture"),
        ("os:system", "has no from_architecture"),
        ("tests.model.plain_networks:Unstored", "has no from_architecture"),
        ("tests.model.plain_networks:Missing", "has no Missing"),
        ("nowhere.at.all:Network", "no module nowhere; install it, or put its folder on PYTHONPATH"),
        ("slim-resnext", "slim-resnext is unknown; give module:Class"),
        ("../escape:Network", "is unknown"),
    ],
)
def test_a_name_that_is_no_stored_network_is_refused_before_anything_is_called(saved, network, said):
    change(saved[1], network=network, architecture={"args": ["touch", str(saved[1] / "called")]})
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        checkpoint.load(saved[1])
    assert said in str(caught.value)
    assert not (saved[1] / "called").exists()


def test_code_in_the_models_folder_is_not_imported(saved):
    (saved[1] / "evil.py").write_text("raise SystemExit('imported')\n")
    change(saved[1], network="evil:Network")
    with pytest.raises(CheckpointError, match="no module evil"):
        checkpoint.load(saved[1])


@pytest.mark.parametrize(
    ("start", "file", "network"),
    [
        (".", "net.py", "mine.net:Network"),
        (".", "deep/net.py", "mine.deep.net:Network"),
        (".", "__init__.py", "mine:Network"),
        (".", "package/__init__.py", "mine.package.net:Network"),
        ("mine", "net.py", "net:Network"),
        ("mine/deep", "deep/net.py", "net:Network"),
    ],
)
def test_code_in_the_models_folder_is_not_imported_where_python_would_find_it(
    saved, tmp_path, monkeypatch, start, file, network
):
    monkeypatch.syspath_prepend(tmp_path / start)
    (saved[1] / file).parent.mkdir(exist_ok=True)
    (saved[1] / file).write_text("raise SystemExit('imported')\n")
    change(saved[1], network=network)
    with pytest.raises(
        CheckpointError, match=r"is code of the model's own folder \(.*\), which is never run"
    ) as caught:
        checkpoint.load(saved[1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("link", ["net.py", "deep"])
def test_a_link_in_the_models_folder_is_code_of_it(saved, tmp_path, monkeypatch, link):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deep").mkdir()
    code = tmp_path / "deep" / "net.py"
    code.write_text("raise SystemExit('imported')\n")
    (saved[1] / link).symlink_to(code if link == "net.py" else code.parent)
    change(saved[1], network="mine.net:Network" if link == "net.py" else "mine.deep.net:Network")
    with pytest.raises(CheckpointError, match="is code of the model's own folder"):
        checkpoint.load(saved[1])


def test_an_architecture_of_other_sizes_is_refused_before_memory_is_taken(saved):
    change(saved[1], architecture={"classes": 7, "channels": 1 << 22})  # 1.3 PB of weights
    with pytest.raises(CheckpointError, match=r"parts\..* is .*, the manifest's architecture needs"):
        checkpoint.load(saved[1])


def test_an_architecture_that_its_class_does_not_know_is_one_line(saved):
    change(saved[1], architecture={"classes": 7, "chanels": 4})
    with pytest.raises(CheckpointError, match=r"cannot be built from its architecture .*chanels"):
        checkpoint.load(saved[1])


def test_other_weights_are_refused_by_their_hash(saved):
    path = saved[1] / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert hashlib.sha256(raw).hexdigest() != checkpoint.load_manifest(saved[1]).weights_sha256
    with pytest.raises(CheckpointError, match="it was changed"):
        checkpoint.load(saved[1])


def test_a_network_that_nobody_could_import_or_that_gives_no_logits_is_not_saved(tmp_path):
    class Local(PlainResNet):
        pass

    with pytest.raises(InputError, match="cannot be imported by name"):
        checkpoint.save(Local(), tmp_path / "local")
    with pytest.raises(InputError, match=r"gives \(64,\) per item, 10 classes"):
        checkpoint.save(WrongSize(), tmp_path / "wrong")
    forgetful = PlainResNet(10, channels=4)
    forgetful.parts[0] = nn.Sequential(forgetful.parts[0], nn.Conv2d(4, 4, 1))
    with pytest.raises(CheckpointError, match=r"tensor parts\.0"):
        checkpoint.save(forgetful, tmp_path / "forgetful")
    assert not list(tmp_path.glob("*/manifest.json"))
