"""What is found out without a configuration: engine, profile and router, each measured once."""

from pathlib import Path

import msgspec
import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.profile import Curve, Latency, LatencyTable, Profile
from slim_scheduler.engine import automatic
from slim_scheduler.engine.automatic import (
    automatic_config,
    fastest_device,
    largest_batch,
    measured_profile,
    with_fastest_devices,
)
from slim_scheduler.engine.devices.openvino import precisions
from slim_scheduler.model.family import load_family
from slim_scheduler.model.family_import import import_family
from slim_scheduler.setup.machines import load_shape
from slim_scheduler.setup.profiles import read_profile
from tests.engine.live import NETWORK, SHAPE, config_of
from tests.model.onnx_networks import family_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/slim-scheduler"


@pytest.fixture
def family(tmp_path: Path) -> Path:
    import_family(family_files(tmp_path), tmp_path / "three", "digits")
    return tmp_path / "three"


def test_a_family_gets_devices_a_profile_and_lp(family: Path, cache: Path) -> None:
    config, said = automatic_config(family)
    (server,) = config.servers
    assert server.device in ("cpu", "openvino:CPU")
    assert server.max_upgrade == 0
    assert config.router.name == "lp"
    assert server.profile is not None
    profile = read_profile(Path(server.profile))
    assert profile.model == "three"
    assert LatencyTable(profile, server.max_batch).seconds(0, None, 3.0, 32) > 0
    assert load_shape(config).widths == (1.0, 2.0, 3.0)
    assert "measured now" in said[0]


def test_it_is_measured_once(family: Path, cache: Path) -> None:
    first, _ = automatic_config(family)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.json")}
    second, said = automatic_config(family)
    assert "kept" in said[0]
    assert [s.device for s in first.servers] == [s.device for s in second.servers]
    assert before == {path: path.stat().st_mtime_ns for path in cache.rglob("*.json")}


def test_other_weights_are_measured_again(tmp_path: Path, family: Path) -> None:
    import_family(family_files(tmp_path, 2), tmp_path / "other/three", None)
    paths = {
        measured_profile(load_family(folder), "cpu", "fp32", 1, 1.0)[0] for folder in (family, tmp_path / "other/three")
    }
    assert len(paths) == 2


def test_without_accuracy_the_widest_serves(tmp_path: Path) -> None:
    import_family(family_files(tmp_path), tmp_path / "unmeasured", None)
    config, said = automatic_config(tmp_path / "unmeasured")
    assert config.router.name == "cost-model:3"
    assert "nothing says what a width gets right" in said[-1]


def test_the_models_own_policy_is_taken(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/manifest.json").write_text("{}")
    assert automatic._router(tmp_path, SHAPE)[0] == f"ppo:{tmp_path / 'policy'}"


def test_auto_is_one_of_the_engines_that_run_the_precision() -> None:
    config = config_of([{"device": "auto"}, {"device": "cpu"}])
    chosen = with_fastest_devices(config, NETWORK, SHAPE)
    assert chosen.servers[0].device in ("cpu", "onnxruntime:CPU", "openvino:CPU")
    assert chosen.servers[1].device == "cpu"


@pytest.mark.skipif("bf16" not in precisions("CPU"), reason="this CPU does not compute in bf16")
def test_auto_never_leaves_the_precision() -> None:
    assert fastest_device(NETWORK, SHAPE, "bf16", 1, 1.0) == "openvino:CPU"
    with pytest.raises(ConfigError, match="no engine here runs tiny in fp16"):
        fastest_device(NETWORK, SHAPE, "fp16", 1, 1.0)


def test_batches_end_within_a_quarter_of_a_second() -> None:
    rows = (Latency(0, None, 1.0, (0.01, 0.05, 0.1)), Latency(0, None, 2.0, (0.06, 0.24, 0.48)))
    profile = Profile(
        device="cpu", model="m", source="measured", batches=(1, 4, 8), latency_rows=rows, load_s=0.0,
        load_bytes_per_s=1e9, memory_bytes=1, power=Curve((0.0,), (1.0,)),
    )  # fmt: skip
    assert largest_batch(profile) == 4
    slow = Latency(0, None, 2.0, (0.6, 2.4, 4.8))
    assert largest_batch(msgspec.structs.replace(profile, latency_rows=(slow,))) == 1


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no model folder"):
        automatic_config(tmp_path)
