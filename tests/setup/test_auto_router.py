"""`auto`: the plan where everything was measured, else the fallback."""

from pathlib import Path

import msgspec
import pytest

from slim_scheduler.setup import routers
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import build_router, load_profiles, load_shape, router_inputs
from tests.sim.clusters import small_cluster


def test_auto_follows_the_plan_where_profiles_and_accuracies_were_measured() -> None:
    config = load_config(Path("examples/reference/below.toml"))
    shape = load_shape(config)
    assert build_router("auto", config, shape, load_profiles(config, shape)).name == "lp"
    assert build_router("auto", config, shape, None).name == "jsq:0.5"


def test_auto_is_the_fallback_where_a_plan_would_have_too_many_width_tuples() -> None:
    config = load_config(Path("examples/reference/below.toml"))
    shape = load_shape(config)
    inputs = router_inputs(config, shape, load_profiles(config, shape))
    many = msgspec.structs.replace(shape, widths=tuple(i / 20 for i in range(1, 21)))
    assert (
        routers.build_router("auto", msgspec.structs.replace(inputs, shape=many, fallback="jsq:0.5")).name == "jsq:0.5"
    )


@pytest.mark.parametrize(("precision", "measured"), [("bf16", True), ("fp16", False)])
def test_a_table_of_the_servers_precision_counts_as_measured(tmp_path: Path, precision: str, measured: bool) -> None:
    config = small_cluster(tmp_path, [{"precision": precision}])
    (tmp_path / "accuracy_heldout-bf16.parquet").touch()
    assert router_inputs(config, load_shape(config), None).measured is measured


def test_auto_is_the_fallback_without_accuracies(tmp_path: Path) -> None:
    config = small_cluster(tmp_path)
    shape = load_shape(config)
    assert build_router("auto", config, shape, load_profiles(config, shape)).name.startswith("cost-model:")
