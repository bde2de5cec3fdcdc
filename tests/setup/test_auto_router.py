"""`auto`: the plan where everything was measured, else the fallback."""

from pathlib import Path

from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import build_router, load_profiles, load_shape
from tests.sim.clusters import small_cluster


def test_auto_follows_the_plan_where_profiles_and_accuracies_were_measured() -> None:
    config = load_config(Path("examples/reference/below.toml"))
    shape = load_shape(config)
    assert build_router("auto", config, shape, load_profiles(config, shape)).name == "lp"
    assert build_router("auto", config, shape, None).name == "jsq:0.5"


def test_auto_is_the_fallback_without_accuracies(tmp_path: Path) -> None:
    config = small_cluster(tmp_path)
    shape = load_shape(config)
    assert build_router("auto", config, shape, load_profiles(config, shape)).name.startswith("cost-model:")
