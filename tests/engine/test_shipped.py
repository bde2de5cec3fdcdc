"""The shipped digits network, served from its configuration: right answers, and a changed file refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from slim_scheduler.core.errors import CheckpointError
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.model.data import load_data
from slim_scheduler.setup.config import config_from

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "models" / "digits"


def config(path: Path, router: str = "jsq:random"):
    return config_from(
        {
            "model": {"path": str(path)},
            "servers": [{"name": "a", "device": "cpu", "profile": str(ROOT / "profiles" / "cpu-digits.json")}],
            "router": {"name": router},
        }
    )


async def test_real_digits_are_recognised_from_raw_pixels_at_every_width():
    test = load_data("digits").test
    async with SlimEngine.from_config(config(DIGITS)) as engine:
        for width in engine.shape.widths:
            result = await engine.infer(test.pixels[:300], widths=(width,) * engine.shape.segments)
            assert np.mean(result.logits.argmax(axis=1) == test.labels[:300]) > 0.93


async def test_with_the_shipped_profile_power_is_estimated_and_every_item_gets_its_energy():
    async with SlimEngine.from_config(config(DIGITS, "cost-model:0.5")) as engine:
        result = await engine.infer(load_data("digits").test.pixels[:4])
        report = engine.servers["a"].report
    assert report.energy_source == "estimated"
    assert report.power_w > 0
    assert all(item.energy_j > 0 for item in result.items)
    assert all(item.compute_s > 0 for item in result.items)


def test_tampered_weights_are_refused(tmp_path):
    shutil.copytree(DIGITS, tmp_path / "digits")
    weights = tmp_path / "digits" / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="SHA-256"):
        SlimEngine.from_config(config(tmp_path / "digits"))
