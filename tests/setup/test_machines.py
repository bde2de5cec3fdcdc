"""A load in multiples of what the cluster carries becomes items per second; a server finds its own profile."""

from pathlib import Path

import msgspec
import pytest

from slim_scheduler.core.errors import ProfileError
from slim_scheduler.setup.config import NetworkConfig
from slim_scheduler.setup.machines import (
    allowed_tasks,
    build_dispatcher,
    carried_by_width,
    find_profile,
    in_items_per_second,
    load_profiles,
    load_shape,
)
from tests.sim.clusters import small_cluster
from tests.sim.devices import SEGMENTS, small_shape

FULL_BATCH = 8  # takes 12 ms at width 0.5 and 24 ms at width 1, per segment


def test_what_a_cluster_carries_is_the_sum_of_its_servers_full_batches(tmp_path: Path) -> None:
    carried = carried_by_width(small_cluster(tmp_path, [{}, {"slowdown": 2.0}]))
    assert carried == pytest.approx(
        {0.5: 1.5 * FULL_BATCH / (SEGMENTS * 0.012), 1.0: 1.5 * FULL_BATCH / (SEGMENTS * 0.024)}
    )


def test_a_rate_in_multiples_of_the_narrowest_width_follows_the_servers(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, [{"slowdown": 4.0}], workload={"rate": 0.5, "rate_unit": "narrowest"})
    workload = in_items_per_second(config).workload
    assert workload.rate == pytest.approx(0.5 * FULL_BATCH / (SEGMENTS * 0.012 * 4.0))
    assert workload.rate_unit == "items/s"


def test_a_rate_in_items_per_second_stays(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, workload={"rate": 50.0})
    assert in_items_per_second(config) is config


@pytest.mark.parametrize(("asked", "credit"), [(None, 16), (5, 5), ("auto", 32)])
def test_credit_is_the_methods_or_what_is_asked_for_or_covers_the_link(
    tmp_path: Path, asked: int | str | None, credit: int
) -> None:
    config = small_cluster(tmp_path, [{"credit_tasks": asked}], network={"latency_ms": 10.0})
    shape = load_shape(config)
    assert allowed_tasks(config, config.servers[0], shape, load_profiles(config, shape)["a"]) == credit
    assert allowed_tasks(config, config.servers[0], shape, None) == (5 if asked == 5 else 16)
    near = msgspec.structs.replace(config, network=NetworkConfig())
    assert allowed_tasks(near, near.servers[0], shape, load_profiles(config, shape)["a"]) == (5 if asked == 5 else 16)


PROFILES = ("cpu-small", "cpu-bf16-small", "openvino-small", "gtx-980-ti", "rtx-2080-ti-small")


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ({"device": "cpu"}, "cpu-small"),
        ({"device": "cpu", "precision": "bf16"}, "cpu-bf16-small"),
        ({"device": "cpu", "precision": "fp16"}, None),
        ({"device": "cpu", "precision": "auto"}, "cpu-small"),
        ({"device": "openvino:CPU"}, "openvino-small"),
        ({"device": "openvino:CPU", "precision": "bf16"}, None),
        ({"device": "openvino:CPU", "precision": "bf16", "profile": "cpu-small"}, "cpu-small"),
        ({"device": "gtx-980-ti", "precision": "fp16"}, "gtx-980-ti"),
        ({"device": "rtx-2080-ti", "precision": "bf16"}, "rtx-2080-ti-small"),
    ],
)
def test_a_live_server_takes_no_profile_of_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, str], found: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    for name in PROFILES:
        (tmp_path / f"profiles/{name}.json").write_text("{}")
    config = small_cluster(tmp_path / "models/small", [{"profile": None, **server}])
    path = find_profile(config.servers[0], small_shape(), Path(config.model.path))
    assert (path and path.stem) == found


@pytest.mark.parametrize(("address", "asks"), [("", False), ("auto", True)])
def test_a_cluster_that_servers_may_join_is_ready_for_windows(tmp_path: Path, address: str, asks: bool) -> None:
    """A server that is added later may have one though no first one has."""
    config = small_cluster(tmp_path, cluster={"address": address})
    assert build_dispatcher(config, small_shape(), "random", None, 0)._limits.batch_windows is asks


def test_a_profile_that_is_missing_is_named_with_the_command_that_measures_it_in_its_precision(tmp_path: Path) -> None:
    config = small_cluster(tmp_path / "models/small", [{"profile": None, "device": "cpu", "precision": "bf16"}])
    with pytest.raises(ProfileError, match=r"no profile for cpu .* --device cpu --precision bf16`"):
        load_profiles(config, small_shape())
