"""Training learns, takes other data and other networks, and an interruption changes nothing."""

import os
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from slim_scheduler.core.errors import CheckpointError, DataError, InputError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.accuracy import measure_accuracy, measure_folder
from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.card import write_card
from slim_scheduler.model.data import load_data
from slim_scheduler.model.fit import fit, schedule
from slim_scheduler.model.presets import PRESETS, Preset, Recipe, preset_named
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.setup.accuracy_files import read_accuracy
from tests.model.test_data import write_classes

TINY = Preset(
    name="tiny",
    architecture=Architecture(
        item_shape=(1, 8, 8),
        classes=10,
        channels=(8, 16),
        blocks=(1, 1),
        strides=(2, 2),
        widths=(0.5, 1.0),
        stem_channels=8,
        channels_per_group=4,
    ),
    recipe=Recipe(
        epochs=3,
        batch=64,
        muon_lr=0.05,
        crop=0.125,
        cutout=0.2,
        trivial_augment=True,
        ema_decay=0.9,
        sizes=((0.0, 6), (0.5, 8)),
        held_out=0.2,
    ),
)


class InterruptedRunError(Exception):
    """What the test stops a run with, in place of Ctrl-C."""


def weights(folder):
    return (folder / "weights.safetensors").read_bytes()


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    fit(TINY, "digits", tmp_path / "whole")
    for stop_at in (5, 23):

        def stop(state, stop_at=stop_at):
            if state.step == stop_at:
                raise InterruptedRunError

        with pytest.raises(InterruptedRunError):
            fit(TINY, "digits", tmp_path / "parts", progress=stop)
        assert not (tmp_path / "parts" / "manifest.json").exists()
    fit(TINY, "digits", tmp_path / "parts")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_ctrl_c_saves_a_whole_step_and_the_run_goes_on_from_it(tmp_path):
    fit(TINY, "digits", tmp_path / "whole", epochs=1)

    def press_ctrl_c(state):
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(TINY, "digits", tmp_path / "parts", epochs=1, progress=press_ctrl_c)
    fit(TINY, "digits", tmp_path / "parts", epochs=1)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_a_finished_network_is_trained_further_and_says_so(tmp_path):
    fit(TINY, "digits", tmp_path / "first")
    fit(TINY, "digits", tmp_path / "further", start=tmp_path / "first")
    first, further = (checkpoint.load_manifest(tmp_path / name).training for name in ("first", "further"))
    assert further.started_from == checkpoint.load_manifest(tmp_path / "first").weights_sha256
    assert further.history[: len(first.history)] == first.history
    assert [record.epoch for record in further.history] == [1, 2, 3, 4, 5, 6]
    assert further.history[3].loss < first.history[0].loss, "it did not begin anew"
    with pytest.raises(InputError, match="another architecture than preset tiny"):
        fit(TINY, "digits", tmp_path / "other", start="models/digits")


def test_another_seed_gives_another_network_and_the_same_seed_the_same(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(TINY, "digits", tmp_path / name, seed=seed, epochs=1)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_a_state_of_another_run_is_not_continued(tmp_path):
    fit(TINY, "digits", tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=r"belongs to the run tiny-seed0-.* choose another --out"):
        fit(TINY, "digits", tmp_path, epochs=1, seed=5)


def test_a_finished_network_without_its_state_is_not_trained_over(tmp_path):
    fit(TINY, "digits", tmp_path, epochs=1)
    shutil.rmtree(tmp_path / ".training")
    before = weights(tmp_path)
    with pytest.raises(CheckpointError, match="holds a finished network; choose another --out"):
        fit(TINY, "digits", tmp_path, epochs=1, seed=5)
    assert weights(tmp_path) == before


def test_a_damaged_state_says_so(tmp_path):
    fit(TINY, "digits", tmp_path, epochs=1)
    path = tmp_path / ".training" / "training.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="no usable training state"):
        fit(TINY, "digits", tmp_path, epochs=1)


def test_a_run_by_the_clock_ends_in_time_with_a_finished_schedule(tmp_path):
    seen = []
    result = fit(TINY, "digits", tmp_path, minutes=0.02, progress=seen.append)
    assert seen[-1].share == 1.0
    assert seen[-2].seconds < 1.2 <= result.seconds, "it ended with the first step after its time"
    assert checkpoint.load(tmp_path).classes == 10


def test_class_folders_train_a_network_of_another_size_and_number_of_segments(tmp_path):
    data = write_classes(tmp_path / "shades", classes=("dark", "light", "white"), images=20)
    preset = Preset(
        name="shades",
        architecture=Architecture(
            item_shape=(3, 12, 12),
            classes=3,
            channels=(8, 8, 16),
            blocks=(1, 1, 1),
            strides=(1, 2, 2),
            widths=(0.5, 1.0),
            stem_channels=8,
            channels_per_group=4,
        ),
        recipe=Recipe(epochs=40, batch=8, sgd_lr=0.1, held_out=0.1),
    )
    fit(preset, data, tmp_path / "model")
    tables = measure_folder(tmp_path / "model", data)
    assert len(tables["test"].tuples) == 8
    assert min(tables["test"].top1(widths) for widths in tables["test"].tuples) == 1.0


def pets_network(folder: Path) -> Path:
    """An untrained network of two classes that says it was trained on `pets`."""
    architecture = msgspec.structs.replace(TINY.architecture, classes=2)
    training = checkpoint.Training(
        preset="tiny", recipe=TINY.recipe, seed=0, data="pets", source="made up", seconds=0.0, history=()
    )
    network = SlimResNet(architecture, "pets").eval()
    checkpoint.save(network, folder, classes=("cat", "dog"), training=training)
    return folder


def test_without_held_out_images_the_test_table_calibrates(tmp_path):
    write_classes(tmp_path / "pets" / "train", images=1)
    write_classes(tmp_path / "pets" / "test", images=2)
    tables = measure_folder(pets_network(tmp_path / "model"), tmp_path / "pets")
    assert set(tables) == {"test"}
    assert tables["test"].items == 4
    assert tables["test"].calibration.split == "test"


def test_data_without_test_images_is_refused_with_what_gives_some(tmp_path):
    data = write_classes(tmp_path / "pets", images=1)
    with pytest.raises(DataError, match=rf"data {data} has no test images: a class folder gives some from two"):
        measure_folder(pets_network(tmp_path / "model"), data)


def test_classes_size_and_names_come_from_the_data(tmp_path):
    data = write_classes(tmp_path / "shades", classes=("dark", "light", "white"), images=20, size=(16, 16))
    fit(None, data, tmp_path / "model", channels=(8,), segments=2, epochs=3)
    manifest = checkpoint.load_manifest(tmp_path / "model")
    assert manifest.classes == ("dark", "light", "white")
    assert manifest.shape.item_shape == (3, 16, 16)
    assert (manifest.shape.segments, manifest.shape.classes) == (2, 3)
    assert manifest.architecture["channels"] == [8, 16]
    assert len(manifest.mean) == len(manifest.std) == 3
    assert checkpoint.load(tmp_path / "model").item_shape == (3, 16, 16)


def test_the_table_says_what_the_network_answers(tmp_path):
    fit(TINY, "digits", tmp_path, epochs=1)
    tables = measure_folder(tmp_path, "digits")
    model, manifest, data = checkpoint.load(tmp_path), checkpoint.load_manifest(tmp_path), load_data("digits")
    x = (torch.from_numpy(data.test.pixels) / 255 - manifest.mean[0]) / manifest.std[0]
    for widths in ((0.5, 0.5), (1.0, 0.5)):
        logits = model(x, widths)
        right = (logits.argmax(dim=1).numpy() == data.test.labels).tolist()
        highest = np.sort(logits.softmax(dim=1).detach().numpy(), axis=1)
        written = read_accuracy(tmp_path)
        assert np.mean(written.correct(widths) == right) > 0.995
        assert np.abs(written.margin(widths) - (highest[:, -1] - highest[:, -2])).max() < 0.01
    assert tables["held-out"].items == read_accuracy(tmp_path / "accuracy_heldout.parquet").items
    assert manifest.accuracy["test"]["0.5,1"] == pytest.approx(tables["test"].top1((0.5, 1.0)), abs=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: fit("cifar", "digits", out), "preset cifar does not exist; nearest: cifar100"),
        (lambda out: fit("digits", "digits", out, device="openvino:CPU"), "cannot train; give cpu or cuda:N"),
        (lambda out: fit("digits", "digits", out, device="cuda:99"), "device cuda:99 is not there: torch .* sees"),
        (lambda out: fit("digits", "digits", out, epochs=0), "epochs 0 must be at least 1"),
        (lambda out: fit("digits", "digits", out, minutes=-1), "minutes -1 must be more than 0"),
        (lambda out: fit("digits", "digits", out, minutes=float("nan")), "minutes nan must be more than 0"),
        (lambda out: fit("digits", "digits", out.with_name("my net")), "'my net' cannot be a model's name"),
        (lambda out: fit(PRESETS["cifar100"], "digits", out), "images of 1x8x8, the network takes 3x32x32"),
        (lambda out: fit("digits", "digits", out, channels=(8,)), "preset digits is a whole network"),
        (lambda out: fit(None, "digits", out, channels=(6,)), "channels 6, 12, 24, 48 must be multiples of 4"),
        (
            lambda out: fit(None, "digits", out, channels=(8, 16), blocks=(1, 1, 1)),
            "channels has 2 numbers, there are 3",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, call, message):
    with pytest.raises(InputError, match=message):
        call(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_learning_rate_warms_up_and_ends_at_zero():
    recipe = Recipe(warmup=0.1)
    factors = [schedule(share, recipe) for share in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert factors == pytest.approx([0.01, 0.505, 1.0, 0.5, 0.0], abs=0.01)


def test_presets_travel_through_json():
    for name, preset in PRESETS.items():
        assert msgspec.json.decode(msgspec.json.encode(preset), type=Preset) == preset_named(name)


def test_the_shipped_digits_network_keeps_its_promise():
    """At least 97 % at width 1.00 and 95 % at 0.25 on the held-out third, and the shipped table says the truth."""
    folder = "models/digits"
    model, manifest, data = checkpoint.load(folder), checkpoint.load_manifest(folder), load_data("digits")
    right, margins = measure_accuracy(model, data.test, manifest.mean, manifest.std)
    shipped = read_accuracy(folder)
    assert shipped.split == "test"
    assert shipped.weights_sha256 == manifest.weights_sha256
    assert right[(1.0,) * 4].mean() >= 0.97
    assert right[(0.25,) * 4].mean() >= 0.95
    for widths, answers in right.items():
        assert np.mean(answers == shipped.correct(widths)) > 0.99
        assert np.abs(margins[widths] - shipped.margin(widths)).max() < 0.01
        assert shipped.top1(widths) >= shipped.top1((0.25,) * 4) - 0.02


@pytest.mark.parametrize(("name", "most_bytes"), [("cifar100", 50e6), ("cifar100-lean", 25e6)])
def test_a_shipped_cifar_network_is_small_and_its_table_belongs_to_it(name, most_bytes):
    folder = Path("models") / name
    assert sum(path.stat().st_size for path in folder.glob("*.*")) < most_bytes
    manifest, shipped = checkpoint.load_manifest(folder), read_accuracy(folder)
    assert shipped.weights_sha256 == manifest.weights_sha256
    assert (len(shipped.tuples), shipped.items) == (256, 5000)
    data = os.environ.get("SLIM_CIFAR100")
    if data:
        few = load_data(data).test.take(np.arange(100))
        right, _ = measure_accuracy(checkpoint.load(folder), few, manifest.mean, manifest.std)
        assert min(np.mean(answers == shipped.correct(t)[:100]) for t, answers in right.items()) > 0.99


def test_the_model_card_is_written_from_the_manifests(tmp_path):
    text = write_card(["models/digits"], tmp_path / "card.md")
    manifest = checkpoint.load_manifest("models/digits")
    assert manifest.weights_sha256 in text
    assert f"| 1 | 2.1 | 0.124 | {100 * manifest.accuracy['test']['1,1,1,1']:.2f} |" in text
    assert manifest.confidence is not None
    assert f"{100 * manifest.confidence.error['test']['1,1,1,1']:.2f} |" in text
    assert "CC BY 4.0" in text
