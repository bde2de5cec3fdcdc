"""What is found out without a configuration: engine, profile and router, each measured once."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.profile import Curve, Latency, LatencyTable, Profile
from slim_scheduler.engine import automatic
from slim_scheduler.engine.automatic import (
    automatic_config,
    close_enough,
    fastest,
    largest_batch,
    measured_profile,
    with_fastest_devices,
)
from slim_scheduler.engine.devices.openvino import precisions
from slim_scheduler.engine.slices import slices_of
from slim_scheduler.model.family import load_family
from slim_scheduler.model.family_import import import_family, measure_family
from slim_scheduler.model.shape import shape_of
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy, write_accuracy
from slim_scheduler.setup.config import ModelConfig
from slim_scheduler.setup.machines import load_shape
from slim_scheduler.setup.profiles import read_profile
from tests.engine.live import NETWORK, SHAPE, config_of
from tests.model.onnx_networks import family_files
from tests.model.plain_networks import Raises

DIGITS = Path(__file__).parents[2] / "models/digits"


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_auto_never_leaves_the_precision(tmp_path: Path, precision: str) -> None:
    _, found = fastest(NETWORK, SHAPE, tmp_path, "auto", precision, 1, 1.0)
    assert found == precision


def test_a_precision_that_nothing_here_has(family: Path) -> None:
    model = load_family(family)
    with pytest.raises(ConfigError, match="no engine here runs three in fp16; tried: openvino:CPU in fp16"):
        fastest(model, model.manifest.shape, family, "auto", "fp16", 1, 1.0)


def test_memory_that_is_not_there_and_a_device_that_is_not_are_tried_again(tmp_path: Path, cache: Path) -> None:
    for device, memory_gib, said in (
        ("cpu", 1e-6, r"tried: cpu in fp32; cpu: instance of segment 0 at width 1 needs \d+ bytes"),
        ("openvino:GPU", 1.0, r"tried: openvino:GPU in fp32; device openvino:GPU is not there"),
    ):
        with pytest.raises(ConfigError, match=said):
            fastest(NETWORK, SHAPE, tmp_path, device, "auto", 1, memory_gib)
    assert not list(cache.rglob("*.json"))
    assert fastest(NETWORK, SHAPE, tmp_path, "cpu", "auto", 1, 1.0) == ("cpu", "fp32")
    assert len(list(cache.rglob("*.json"))) == 1


def test_a_network_that_does_not_run_is_not_tried_twice_in_the_same_memory(tmp_path: Path, cache: Path) -> None:
    network = Raises()
    for memory_gib, trials in ((1.0, 1), (1.5, 1), (2.0, 2)):
        with pytest.raises(ConfigError, match=r"no engine here runs raises in auto; .*; not written yet"):
            fastest(network, shape_of(network), tmp_path, "cpu", "auto", 1, memory_gib)
        assert len(list(cache.rglob("*.json"))) == trials


def digits_with(folder: Path, wrong: int | None) -> Path:
    """The digits network with a bf16 table beside it, in which so many more answers are wrong; None: without."""
    shutil.copytree(DIGITS, folder)
    if wrong is not None:
        full = read_accuracy(folder)
        worse = {widths: full.correct(widths).copy() for widths in full.tuples}
        for right in worse.values():
            right[np.flatnonzero(right)[:wrong]] = False
        margins = {widths: full.margin(widths) for widths in full.tuples}
        table = AccuracyTable(worse, split="test", data=full.data, margins=margins, precision="bf16")
        write_accuracy(table, folder / "accuracy-bf16.parquet")
    return folder


@pytest.mark.parametrize(("wrong", "allowed"), [(None, ["fp32"]), (1, ["fp32", "bf16"]), (2, ["fp32"])])
def test_auto_takes_a_lower_precision_only_where_it_was_measured_to_lose_nothing(
    tmp_path: Path, wrong: int | None, allowed: list[str]
) -> None:
    """One of 599 images is less than 0.2 points, two are more."""
    assert close_enough(digits_with(tmp_path / "digits", wrong)) == allowed


def test_auto_takes_the_fastest_of_what_it_tried(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {("cpu", "fp32"): 3.0, ("cpu", "bf16"): 1.0, ("openvino:CPU", "fp32"): 2.0, ("openvino:CPU", "bf16"): 9.0}
    monkeypatch.setattr(
        automatic, "_trial_once", lambda m, s, device, precision, *rest: times.get((device, precision), 8.0)
    )
    folder = digits_with(tmp_path / "digits", 0)
    config = config_of([{"device": "auto", "precision": "auto"}, {"device": "openvino:CPU", "precision": "auto"}])
    config = msgspec.structs.replace(config, model=ModelConfig(path=str(folder)))
    chosen = with_fastest_devices(config, NETWORK, SHAPE).servers
    assert [(server.device, server.precision) for server in chosen] == [("cpu", "bf16"), ("openvino:CPU", "fp32")]


@pytest.mark.skipif("bf16" not in precisions("CPU"), reason="this CPU does not compute in bf16")
def test_accuracy_that_was_not_measured_in_the_precision_is_named(family: Path) -> None:
    config, said = automatic_config(family, "bf16")
    assert config.servers[0].precision == "bf16"
    assert "accuracy in bf16 was not measured, fp32's is taken" in said[-1]
    with slices_of(family, "openvino:CPU", "bf16") as load:
        table = measure_family(family, "digits", "bf16", load)
    assert table.precision == "bf16"
    assert accuracy_path(config) == family / "accuracy-bf16.parquet"
    assert "not measured" not in automatic_config(family, "bf16")[1][-1]


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
