"""A stronger network teaches: its answers to the same images, from a model folder or an ONNX file, on the record."""

import hashlib
import json
import sys

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.linear_model import LogisticRegression

from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.card import training_text
from slim_scheduler.model.data import load_data
from slim_scheduler.model.family_import import import_family
from slim_scheduler.model.fit import fit
from slim_scheduler.model.presets import Recipe
from slim_scheduler.model.sandwich import distillation
from slim_scheduler.model.teacher import TeacherManifest, load_teacher, write_teacher
from tests.model.onnx_networks import family_files, reference
from tests.model.test_fit import TINY, InterruptedRunError, weights

DIGITS = tuple(str(digit) for digit in range(10))
ONLY_TEACHER = msgspec.structs.replace(
    TINY, recipe=Recipe(epochs=10, batch=64, muon_lr=0.05, teacher_weight=1.0, flip=False, bf16=False, held_out=0.2)
)


def linear_network(weight, bias, shape, batch="batch"):
    """The bytes of an ONNX network that flattens its input and multiplies it by `weight`, (classes, inputs)."""
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "weight", "bias"], ["logits"], transB=1),
    ]
    values = [
        numpy_helper.from_array(np.asarray(array, dtype=np.float32), name)
        for name, array in (("weight", weight), ("bias", bias))
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, *shape])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, len(bias)])
    graph = helper.make_graph(nodes, "linear", [x], [logits], values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10).SerializeToString()


def brightness_network(shape=(1, 8, 8), batch="batch"):
    """Answers with the mean brightness of the image, times the class's number."""
    return linear_network(
        np.outer(np.arange(10), np.full(np.prod(shape), 1 / np.prod(shape))), np.zeros(10), shape, batch
    )


def manifest(**changes):
    values = {
        "format": 1,
        "name": "bright",
        "item_shape": (1, 8, 8),
        "classes": DIGITS,
        "mean": (0.0,),
        "std": (0.5,),
        "network_sha256": "",
        "network_bytes": 0,
        "data": "digits",
        "seed": 0,
        "held_out": 0.2,
        "outside_data": "",
        "source": "made here",
    }
    return TeacherManifest(**(values | changes))


def test_an_onnx_teacher_answers_about_the_learners_own_view(tmp_path):
    """The learner's normalisation is undone, the teacher's applied, and another size is resized."""
    write_teacher(tmp_path, brightness_network(), manifest())
    teacher = load_teacher(tmp_path)
    pixels = torch.rand(5, 1, 8, 8)
    logits = teacher.logits((pixels - 0.3) / 0.2, (0.3,), (0.2,))
    brightness = pixels.mean(dim=(1, 2, 3)) / 0.5
    torch.testing.assert_close(logits, brightness[:, None] * torch.arange(10.0), rtol=1e-4, atol=1e-4)
    flat = torch.full((2, 1, 6, 6), 0.4)
    torch.testing.assert_close(teacher.logits(flat, (0.0,), (1.0,))[:, 1], torch.full((2,), 0.8))


def test_a_network_of_the_project_teaches_with_its_widest_tuple():
    teacher, model = load_teacher("models/digits"), checkpoint.load("models/digits")
    saved = checkpoint.load_manifest("models/digits")
    x = torch.from_numpy(load_data("digits").test.pixels[:40]) / 255.0
    expected = model((x - saved.mean[0]) / saved.std[0], (1.0,) * 4)
    torch.testing.assert_close(teacher.logits((x - 0.5) / 0.5, (0.5,), (0.5,)), expected, rtol=1e-3, atol=1e-3)
    assert teacher.record.sha256 == saved.weights_sha256
    assert teacher.record.top1 == saved.accuracy["held-out"]["1,1,1,1"]


def test_a_network_learns_what_only_its_teacher_says(tmp_path):
    """The teacher calls every digit by the next one's name; with weight 1 the learner sees no label but through it."""

    train, test = load_data("digits").train, load_data("digits").test
    linear = LogisticRegression(C=0.1, max_iter=200).fit(train.pixels.reshape(len(train), -1) / 255.0, train.labels)
    shifted = linear_network(np.roll(linear.coef_, 1, axis=0), np.roll(linear.intercept_, 1), (1, 8, 8))
    write_teacher(tmp_path / "teacher", shifted, manifest(std=(1.0,)))
    fit(ONLY_TEACHER, "digits", tmp_path / "taught", teacher=tmp_path / "teacher")
    taught = checkpoint.load_manifest(tmp_path / "taught")
    x = (torch.from_numpy(test.pixels) / 255.0 - taught.mean[0]) / taught.std[0]
    model = checkpoint.load(tmp_path / "taught")
    for widths in ((1.0, 1.0), (0.5, 0.5), (1.0, 0.5)):
        answers = model(x, widths).argmax(dim=1).numpy()
        assert np.mean(answers == (test.labels + 1) % 10) > 0.7, widths
        assert np.mean(answers == test.labels) < 0.2, widths


def test_the_manifest_and_the_card_say_who_taught_and_what_it_had_seen(tmp_path):
    write_teacher(tmp_path / "teacher", brightness_network(), manifest(outside_data="ImageNet-1k", top1=0.81))
    fit(TINY, "digits", tmp_path / "taught", teacher=tmp_path / "teacher", epochs=1)
    training = checkpoint.load_manifest(tmp_path / "taught").training
    raw = (tmp_path / "teacher" / "network.onnx").read_bytes()
    assert training.teacher.name == "bright"
    assert training.teacher.sha256 == hashlib.sha256(raw).hexdigest()
    assert training.outside_data == "ImageNet-1k"
    text = training_text(checkpoint.load_manifest(tmp_path / "taught"))
    assert "Taught by bright" in text
    assert "81.00 %" in text
    assert "Outside data behind these weights: ImageNet-1k." in text
    fit(TINY, "digits", tmp_path / "further", start=tmp_path / "taught", epochs=1)
    further = checkpoint.load_manifest(tmp_path / "further").training
    assert (further.teacher, further.outside_data) == (None, "ImageNet-1k"), "what was seen once stays seen"
    assert load_teacher(tmp_path / "further").record.outside_data == "ImageNet-1k"
    plain = training_text(checkpoint.load_manifest("models/digits"))
    assert "No outside data" in plain
    assert "Taught" not in plain


def test_a_teacher_that_saw_the_held_out_images_is_named_as_such(tmp_path):
    write_teacher(tmp_path / "teacher", brightness_network(), manifest(seed=3))
    fit(TINY, "digits", tmp_path / "taught", teacher=tmp_path / "teacher", epochs=1)
    assert "had seen some of the held-out images" in training_text(checkpoint.load_manifest(tmp_path / "taught"))
    write_teacher(tmp_path / "honest", brightness_network(), manifest())
    fit(TINY, "digits", tmp_path / "kept", teacher=tmp_path / "honest", epochs=1)
    assert "held-out images" not in training_text(checkpoint.load_manifest(tmp_path / "kept"))


def test_a_resumed_run_with_a_teacher_equals_an_uninterrupted_one_and_keeps_its_teacher(tmp_path):
    teacher = tmp_path / "teacher"
    write_teacher(teacher, brightness_network(), manifest())
    fit(TINY, "digits", tmp_path / "whole", teacher=teacher, epochs=1)

    def stop(state):
        if state.step == 5:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        fit(TINY, "digits", tmp_path / "parts", teacher=teacher, epochs=1, progress=stop)
    with pytest.raises(CheckpointError, match="belongs to the run"):
        fit(TINY, "digits", tmp_path / "parts", epochs=1)
    fit(TINY, "digits", tmp_path / "parts", teacher=teacher, epochs=1)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_plain_distillation_is_hintons_divergence():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(6, 5, generator=generator) * 3 for _ in range(2))
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    recipe = Recipe(teacher_temperature=2.0)
    p, q = (ours / 2).softmax(1), (theirs / 2).softmax(1)
    expected = 4 * (q * (q / p).log()).sum(1).mean()
    assert float(distillation(ours, theirs, labels, recipe)) == pytest.approx(float(expected), rel=1e-5)
    assert float(distillation(theirs, theirs, labels, recipe)) == pytest.approx(0.0, abs=1e-6)


def test_decoupled_distillation_weighted_by_the_teachers_doubt_is_the_plain_one():
    """Zhao et al. 2022, eq. 6: KD = target part + (1 - p of the label) times the non-target part."""
    ours, theirs = torch.tensor([[1.0, -2.0, 0.5, 3.0]]), torch.tensor([[0.2, 1.5, -1.0, 2.0]])
    labels, temperature = torch.tensor([3]), 4.0
    doubt = 1 - float((theirs / temperature).softmax(1)[0, 3])
    plain = distillation(ours, theirs, labels, Recipe(teacher_temperature=temperature))
    decoupled = Recipe(teacher_temperature=temperature, teacher_non_target=doubt)
    assert float(distillation(ours, theirs, labels, decoupled)) == pytest.approx(float(plain), rel=1e-5)
    heavier = msgspec.structs.replace(decoupled, teacher_non_target=8.0)
    assert float(distillation(ours, theirs, labels, heavier)) > float(plain)
    ours.requires_grad_()
    distillation(ours, theirs, labels, heavier).backward()
    assert torch.isfinite(ours.grad).all()


def weights_beside(folder):
    """A network whose last weights lie in another file of its folder."""
    network = onnx.load_model_from_string(brightness_network())
    bias = network.graph.initializer[1]
    (folder / "bias.bin").write_bytes(bias.raw_data)
    bias.ClearField("raw_data")
    bias.data_location = TensorProto.EXTERNAL
    bias.external_data.add(key="location", value="bias.bin")
    return network.SerializeToString()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "teacher.json").unlink(), r"has neither manifest.json nor teacher.json"),
        (lambda f: (f / "network.onnx").unlink(), r"network.onnx is missing"),
        (lambda f: (f / "network.onnx").write_bytes(b"x"), r"has 1 bytes, its teacher.json says"),
        (lambda f: flip_last_byte(f / "network.onnx"), r"has SHA-256 .* it was changed"),
        (lambda f: (f / "teacher.json").write_text("{}"), r"teacher.json is damaged"),
        (lambda f: edit(f, format=9), r"has format 9, this version reads 1"),
        (lambda f: edit(f, mean=[0.1, 0.2]), r"must have 1 entries, one per channel"),
        (lambda f: edit(f, std=[0.0]), r"standard deviations above 0"),
        (lambda f: write_teacher(f, b"no network", manifest()), r"is no ONNX file, or is truncated"),
        (lambda f: write_teacher(f, weights_beside(f), manifest()), r"'bias' has its data in another file"),
        (lambda f: edit(f, classes=["0", "1"]), r"takes 1x8x8 and knows 10 classes, its teacher.json says 1x8x8 and 2"),
    ],
)
def test_what_cannot_teach_is_refused_in_one_line(tmp_path, damage, message):
    write_teacher(tmp_path, brightness_network(), manifest())
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_teacher(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": DIGITS[::-1]}, r"knows 10 classes \(9, 8, 7, ...\), the data has 10 \(0, 1, 2, ...\)"),
        ({"item_shape": (3, 8, 8), "mean": (0.0,) * 3, "std": (1.0,) * 3}, "takes 3 channels, the network 1"),
    ],
)
def test_a_teacher_of_something_else_is_refused_before_training(tmp_path, changes, message):
    shape = changes.get("item_shape", (1, 8, 8))
    write_teacher(tmp_path / "teacher", brightness_network(shape), manifest(**changes))
    with pytest.raises(InputError, match=message):
        fit(TINY, "digits", tmp_path / "out", teacher=tmp_path / "teacher")
    assert not (tmp_path / "out").exists()


def test_the_last_rank_of_a_family_teaches_and_what_it_has_seen_is_unknown(tmp_path):
    files = family_files(tmp_path)
    family = import_family(files, tmp_path / "family", None)
    teacher = load_teacher(tmp_path / "family")
    last = next(path for path in files if path.stem == family.variants[-1].name)
    images = np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)
    expected = reference(onnx.load(last), (images * 0.5 + 0.2 - np.array(family.mean)) / np.array(family.std))
    answers = teacher.logits(torch.from_numpy(images), (0.2,), (0.5,))
    np.testing.assert_allclose(answers.numpy(), expected, rtol=1e-3, atol=1e-3)
    assert teacher.record.outside_data.startswith("unknown")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    write_teacher(tmp_path, brightness_network(), manifest())
    monkeypatch.delitem(sys.modules, "slim_scheduler.model.graph_session", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r'onnxruntime is not installed; pip install "slim-scheduler\[onnx\]"'):
        load_teacher(tmp_path)


def test_a_teacher_that_takes_one_batch_size_is_asked_in_parts(tmp_path):
    write_teacher(tmp_path / "any", brightness_network(), manifest())
    write_teacher(tmp_path / "two", brightness_network(batch=2), manifest())
    images = torch.rand(5, 1, 8, 8)
    answers = [load_teacher(tmp_path / name).logits(images, (0.0,), (1.0,)) for name in ("any", "two")]
    torch.testing.assert_close(answers[0], answers[1])


def edit(folder, **changes):
    path = folder / "teacher.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip_last_byte(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
