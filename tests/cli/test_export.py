"""`slim export`: what the file answers is what the model answers, and `slim import` takes it back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession

from slim_scheduler.model.family_import import import_family
from slim_scheduler.model.folder import load_model
from slim_scheduler.model.protocol import SlimmableModel
from tests.cli.conftest import ROOT, Slim
from tests.model.onnx_networks import family_files

DIGITS = ROOT / "models/digits-small"
ITEMS = torch.randn(5, 1, 32, 32, generator=torch.Generator().manual_seed(0))


def answers(model: SlimmableModel, widths: tuple[float, ...]) -> np.ndarray:
    x = ITEMS
    for segment, width in enumerate(widths):
        piece = model.slice(segment, width, "cpu")
        previous = widths[segment - 1] if segment else None
        piece.build_variant(previous)
        x = piece.run(x, previous)
    return x.numpy()


@pytest.mark.parametrize(("said", "widths"), [("0.5", (0.5,) * 4), ("0.25/0.5/0.75/1", (0.25, 0.5, 0.75, 1.0))])
@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_the_file_answers_as_the_network_does(
    slim: Slim, tmp_path: Path, said: str, widths: tuple[float, ...], form: str
) -> None:
    path = tmp_path / f"network.{form}"
    code, out, err = slim("export", DIGITS, "--widths", said, "--format", form, "--out", path)
    assert code == 0, err
    assert out.strip() == str(path)
    expected = answers(load_model(DIGITS), widths)
    if form == "onnx":
        (given,) = InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"]).run(
            None, {"x": ITEMS.numpy()}
        )
    else:
        given = torch.export.load(path).module()(ITEMS).detach().numpy()
    assert np.allclose(given, expected, atol=1e-4)


def test_exported_widths_make_a_family_with_its_normalisation_and_labels(slim: Slim, tmp_path: Path) -> None:
    files = []
    for width, form in (("0.25", "onnx"), ("1", "onnx")):
        files.append(tmp_path / f"w{width}.{form}")
        assert slim("export", DIGITS, "--widths", width, "--format", form, "--out", files[-1]).code == 0
    code, _, err = slim("import", "--out", tmp_path / "fam", "--data", "digits", *files)
    assert code == 0, err
    manifest, own = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "fam", DIGITS))
    for key in ("classes", "mean", "std"):
        assert manifest[key] == pytest.approx(own[key]) if key != "classes" else manifest[key] == own[key]
    top1 = own["accuracy"]["test"]
    assert manifest["accuracy"]["test"]["1"] == pytest.approx(top1["0.25,0.25,0.25,0.25"], abs=0.002)
    assert manifest["accuracy"]["test"]["2"] == pytest.approx(top1["1,1,1,1"], abs=0.002)


def test_a_rank_of_a_family_is_its_own_file(slim: Slim, tmp_path: Path) -> None:
    import_family(family_files(tmp_path, size=(32, 32)), tmp_path / "fam", None)
    code, _, err = slim("export", tmp_path / "fam", "--widths", "2", "--out", tmp_path / "second.onnx")
    assert code == 0, err
    session = InferenceSession((tmp_path / "second.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {session.get_inputs()[0].name: ITEMS.numpy()})
    assert np.allclose(given, answers(load_model(tmp_path / "fam"), (2.0,)), atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--widths", "0.6"), "width 0.6 is not served; available: 0.25, 0.5, 0.75, 1"),
        (("--widths", "0.5/0.5"), "2 widths are given, digits-small has 4 segments; give 1 or all"),
        (("--widths", "wide"), "widths wide are no numbers"),
        (("--widths", "0.5", "--format", "tflite"), "format tflite is not known; give onnx or pt2"),
    ],
)
def test_what_cannot_be_exported_is_one_line(slim: Slim, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = slim("export", DIGITS, "--out", tmp_path / "made", *arguments)
    assert code == 2
    assert said in err
    assert list(tmp_path.iterdir()) == []
