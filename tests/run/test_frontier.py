"""`slim frontier` on a made-up cluster: points, what cannot be carried, distances of runs, command and figure."""

import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from slim_scheduler.cli import app
from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.run.frontier import distance, distances, frontier, program
from slim_scheduler.setup.accuracy_files import read_accuracy, write_accuracy
from slim_scheduler.setup.config import Config, config_from
from slim_scheduler.setup.machines import load_profiles, load_shape
from slim_scheduler.setup.profiles import write_profile
from tests.core.facts import SHAPE, server

# One device: 5 ms per segment narrow, 10 ms wide; so 100 items/s narrow, 50 wide. 100 W at rest, 200 W busy.
TOP1 = {(0.5, 0.5): 0.6, (0.5, 1.0): 0.8, (1.0, 0.5): 0.7, (1.0, 1.0): 0.9}


@pytest.fixture
def config(tmp_path) -> Config:
    (tmp_path / "manifest.json").write_text(json.dumps({"shape": msgspec.to_builtins(SHAPE)}))
    columns = {widths: np.arange(100) < 100 * top1 for widths, top1 in TOP1.items()}
    sure = {widths: np.ones(100) for widths in columns}
    write_accuracy(AccuracyTable(columns, split="test", data="made up", margins=sure), tmp_path / "accuracy.parquet")
    write_profile(server("a").profile, tmp_path / "device.json")
    return config_from(
        {
            "model": {"path": str(tmp_path)},
            "servers": [{"name": "a", "device": "made-up", "profile": str(tmp_path / "device.json"), "max_batch": 8}],
            "network": {"activations": False},
        }
    )


def parts(config: Config):
    shape = load_shape(config)
    return config, shape, load_profiles(config, shape), read_accuracy(config.model.path)


def test_points_are_the_best_accuracy_and_the_energy_it_takes(config):
    narrow, wide = frontier(*parts(config), [100.0, 50.0])
    assert (narrow.accuracy, wide.accuracy) == (pytest.approx(0.6), pytest.approx(0.9))
    assert (narrow.energy_per_item_j, wide.energy_per_item_j) == (pytest.approx(2.0), pytest.approx(4.0))


def test_a_load_that_cannot_be_carried_says_what_could(config):
    (point,) = frontier(*parts(config), [120.0])
    assert point.to_json() == {
        "load_items_s": 120.0,
        "accuracy": None,
        "known_accuracy": None,
        "energy_per_item_j": None,
        "max_load_items_s": pytest.approx(100.0),
        "second_pass": None,
        "shares": None,
    }


def test_loads_go_up_to_the_highest_where_none_are_named(config):
    points = frontier(*parts(config))
    assert points[-1].load_items_s == pytest.approx(100.0)
    accuracies = [point.accuracy for point in points]
    assert accuracies == sorted(accuracies, reverse=True)
    assert None not in accuracies


def test_a_load_must_be_above_zero(config):
    with pytest.raises(ConfigError, match="load 0 must be above 0"):
        frontier(*parts(config), [0.0])


def test_what_can_be_known_is_the_other_tables_plan_judged_by_this_one(config):
    """By the other table a wide first segment is worth more than a wide last one, and here it is not."""
    swapped = {**TOP1, (0.5, 1.0): TOP1[1.0, 0.5], (1.0, 0.5): TOP1[0.5, 1.0]}
    other = AccuracyTable(
        {w: np.arange(100) < 100 * top1 for w, top1 in swapped.items()}, split="held-out", data="made up"
    )
    (point,) = frontier(*parts(config), [200 / 3], planned_on=other)
    assert point.accuracy == pytest.approx(0.8)
    assert point.known == pytest.approx(0.7)


def test_more_accuracies_cost_more_energy(config):
    points = frontier(*parts(config), [50.0], levels=4)
    assert [p.accuracy for p in points] == pytest.approx([0.6, 0.7, 0.8, 0.9], abs=1e-5)
    # Half busy narrow; each wide last segment adds 5 ms: 150, 162.5, 175 and, wide throughout, 200 W.
    assert [p.energy_per_item_j for p in points] == pytest.approx([3.0, 3.25, 3.5, 4.0], abs=1e-4)


def test_how_far_a_run_is_from_the_bound(config):
    asked = program(*parts(config))
    summary = {"throughput_items_s": 50.0, "accuracy": 0.8, "energy_per_item_j": 4.2}
    found = distance(asked, summary)
    assert found.accuracy == pytest.approx(0.1)
    assert found.energy == pytest.approx(4.2 / 3.5 - 1)
    beyond = distance(asked, {**summary, "throughput_items_s": 120.0})
    assert (beyond.accuracy, beyond.beyond) == (None, True)
    nothing = distance(asked, {"throughput_items_s": 0.0, "accuracy": None, "energy_per_item_j": None})
    assert (nothing.accuracy, nothing.beyond) == (None, False)


def test_routers_are_judged_by_the_mean_of_their_runs(config):
    runs = [{"throughput_items_s": 50.0, "accuracy": a, "energy_per_item_j": 4.2} for a in (0.75, 0.85)]
    unknown = [{**runs[0], "accuracy": None}, runs[1]]
    found = distances(config, {"seen": runs, "unseen": unknown})
    assert found["seen"].accuracy == pytest.approx(0.1)
    assert found["unseen"].accuracy is None


def test_the_command_prints_the_points_and_writes_the_figure(config, tmp_path):
    (tmp_path / "cluster.toml").write_text(
        f'[model]\npath = "{config.model.path}"\n[network]\nactivations = false\n'
        f'[[servers]]\nname = "a"\ndevice = "made-up"\nprofile = "{config.servers[0].profile}"\nmax_batch = 8\n'
    )
    out = tmp_path / "bound"
    asked = ["frontier", "--config", str(tmp_path / "cluster.toml"), "--load", "50", "--load", "120"]
    printed = CliRunner().invoke(app, [*asked, "--json", "--out", str(out)], catch_exceptions=False)
    points = json.loads(printed.stdout)
    assert [point["load_items_s"] for point in points] == [50.0, 120.0]
    assert points[0]["accuracy"] == pytest.approx(0.9)
    assert points[1]["accuracy"] is None
    assert json.loads((out / "frontier.json").read_text()) == points
    assert "<svg" in (out / "frontier.svg").read_text()
    table = CliRunner().invoke(app, asked).stdout
    assert "cannot be carried" in table
    assert "at most 100 items/s" in table
