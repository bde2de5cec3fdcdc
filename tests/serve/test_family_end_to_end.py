"""From files to answers: three digits networks with true labels, and two ResNets of torchvision's size in `.pt2`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from slim_scheduler.client.client import Constraints, SlimClient
from slim_scheduler.model.data import digits
from slim_scheduler.setup.accuracy_files import read_accuracy
from tests.serve.conftest import ROOT, STARTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DIGITS = ROOT / "models/digits-small"
WIDTHS = (0.25, 0.5, 1)
CONFIG = """
[model]
path = "{model}"
[[servers]]
name = "a"
device = "cpu"
profile = "{profile}"
max_upgrade = 0
[[servers]]
name = "b"
device = "cpu"
profile = "{profile}"
max_upgrade = 0
slowdown = 2.0
[router]
name = "lp"
[workload]
data = "digits"
rate = 300.0
duration_s = 3.0
[training]
decisions = 1600
workers = 1
rollout_decisions = 100
episode_rollouts = 2
observation = "extended"
warm_start = "cost-model:random"
warm_start_decisions = 400
"""


def slim(cache: Path, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "slim_scheduler", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def served(cache: Path, *arguments: object) -> Iterator[tuple[SlimClient, list[str]]]:
    """A client of `slim serve`, and what it printed before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slim_scheduler", "serve", *map(str, arguments), "--port", "0", "--grpc-port", "-1"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line.strip())
            if started := STARTED.fullmatch(printed[-1]):
                break
        else:
            raise AssertionError(f"the server did not start: {printed}")
        with SlimClient(f"http://127.0.0.1:{started[4]}") as client:
            yield client, printed
    finally:
        process.terminate()
        process.wait(60)


def test_three_digits_networks_are_imported_measured_trained_for_compared_and_served(tmp_path: Path) -> None:
    files = [tmp_path / f"digits{width}.onnx" for width in WIDTHS]
    for width, file in zip(WIDTHS, files, strict=True):
        slim(tmp_path, "export", DIGITS, "--widths", width, "--out", file)
    family = tmp_path / "models/three"
    printed = slim(tmp_path, "import", "--out", family, "--data", "digits", files[2], files[0], files[1])
    assert "accuracy %" in printed
    assert "agreement" not in printed
    whole, table = read_accuracy(DIGITS), read_accuracy(family)
    assert table.items == 599
    for rank, width in enumerate(WIDTHS, 1):
        assert table.top1((float(rank),)) == pytest.approx(whole.top1((width,) * 4), abs=0.005)

    profile, config = tmp_path / "three.json", tmp_path / "cluster.toml"
    slim(tmp_path, "measure", "--model", family, "--rounds", 1, "--out", profile)
    config.write_text(CONFIG.format(model=family, profile=profile))
    slim(tmp_path, "train", "--config", config, "--out", tmp_path / "policy")
    routers = f"jsq:1,jsq:3,lp,ppo:{tmp_path / 'policy'}"
    slim(tmp_path, "compare", "--config", config, "--routers", routers, "--seeds", 1, "--out", tmp_path / "compared")
    rows = json.loads((tmp_path / "compared/compare.json").read_text())
    accuracy = {row["router"]: row["metrics"]["accuracy"]["mean"] for row in rows}
    assert len(accuracy) == 4
    # A few hundred items of 599 are drawn: the share that is right may be a few points off.
    assert accuracy["jsq:1"] == pytest.approx(table.top1((1.0,)), abs=0.04)
    assert accuracy["jsq:3"] == pytest.approx(table.top1((3.0,)), abs=0.04)

    test = digits(32).test
    for router in ("lp", f"ppo:{tmp_path / 'policy'}"):
        with served(tmp_path, "--config", config, "--router", router) as (client, _):
            assert client.model == "three"
            answers = [client.infer(test.pixels[start : start + 50]) for start in range(0, 599, 50)]
            right = np.concatenate([answer.classes for answer in answers]) == test.labels
            assert right.mean() >= table.top1((1.0,)) - 0.01  # no rank is worse than the first
            assert {answer.precision for answer in answers} == {"fp32"}


class Block(nn.Module):
    """As in torchvision: two convolutions and a shortcut, activations in place."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += beside
        return self.relu(out)


def resnet(blocks: tuple[int, ...], seed: int) -> nn.Module:
    """ResNet-18 is (2, 2, 2, 2), ResNet-34 (3, 4, 6, 3): 11.7 and 21.8 million weights, 1,000 classes."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    into = 64
    for i, count in enumerate(blocks):
        for j in range(count):
            layers.append(Block(into, 64 << i, 2 if i and not j else 1))
            into = 64 << i
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).eval()


def test_two_resnets_in_pt2_are_served_from_their_files_with_one_command(tmp_path: Path) -> None:
    networks = [resnet((2, 2, 2, 2), 0), resnet((3, 4, 6, 3), 1)]
    files = []
    for name, network in zip(("resnet18", "resnet34"), networks, strict=True):
        assert sum(p.numel() for p in network.parameters()) > 11e6
        shapes = ({0: torch.export.Dim("n", min=1, max=256)},)
        program = torch.export.export(network, (torch.zeros(2, 3, 64, 64),), dynamic_shapes=shapes)
        files.append(tmp_path / f"{name}.pt2")
        torch.export.save(program, files[-1])
    draw = np.random.default_rng(0)
    (tmp_path / "val").mkdir()
    pixels = draw.integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"val/{i}.png")
    with served(tmp_path, files[1], files[0], "--data", tmp_path / "val") as (client, printed):
        assert any("agreement with resnet34 %" in line for line in printed)
        assert not any("accuracy %" in line for line in printed)
        assert client.model == "resnet"
        mean, std = (np.float32(v).reshape(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        items = torch.from_numpy((pixels[:3].transpose(0, 3, 1, 2) / np.float32(255) - mean) / std)
        for rank, network in enumerate(networks, 1):
            with torch.no_grad():
                expected = network(items).numpy()
            given = client.infer(pixels[:3].transpose(0, 3, 1, 2), Constraints(width=float(rank)))
            assert np.abs(given.logits - expected).max() < 1e-3 * np.abs(expected).max()
            assert given.widths == str(rank)
