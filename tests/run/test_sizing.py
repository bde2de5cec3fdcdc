"""`slim plan` on made-up servers: what a trace asks for, which servers it needs, and what the command prints."""

import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from slim_scheduler.cli import app
from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.run.sizing import size, trace_load
from slim_scheduler.setup.accuracy_files import read_accuracy, write_accuracy
from slim_scheduler.setup.config import Config, config_from
from slim_scheduler.setup.machines import load_profiles, load_shape
from slim_scheduler.setup.profiles import write_profile
from tests.core.facts import SHAPE, server

# A server: 5 ms per segment narrow, 10 ms wide; so 100 items/s narrow, 50 wide. 100 W at rest, 200 W busy.
TOP1 = {(0.5, 0.5): 0.6, (0.5, 1.0): 0.8, (1.0, 0.5): 0.7, (1.0, 1.0): 0.9}


@pytest.fixture
def config(tmp_path) -> Config:
    """Three servers: `a` and `b` alike, `c` four times as slow."""
    (tmp_path / "manifest.json").write_text(json.dumps({"shape": msgspec.to_builtins(SHAPE)}))
    columns = {widths: np.arange(100) < 100 * top1 for widths, top1 in TOP1.items()}
    sure = {widths: np.ones(100) for widths in columns}
    write_accuracy(AccuracyTable(columns, split="test", data="made up", margins=sure), tmp_path / "accuracy.parquet")
    write_profile(server("a").profile, tmp_path / "device.json")
    same = {"device": "made-up", "profile": str(tmp_path / "device.json"), "max_batch": 8}
    return config_from(
        {
            "model": {"path": str(tmp_path)},
            "servers": [{"name": n, "slowdown": s, **same} for n, s in (("a", 1.0), ("b", 1.0), ("c", 4.0))],
            "network": {"activations": False},
        }
    )


def sized(config: Config, times: np.ndarray, slo: float, accuracy: float, rho: float = 1.0):
    shape = load_shape(config)
    table = read_accuracy(config.model.path)
    return size(config, shape, load_profiles(config, shape), table, trace_load(times, slo), accuracy, rho=rho)


def test_the_peak_is_the_least_rate_that_keeps_everybody_within_the_slo():
    # Ten at once within 0.1 s: 100 items/s, although there are 10 items in 10 s.
    burst = np.concatenate((np.zeros(10), [10.0]))
    assert trace_load(burst, 0.1).peak == pytest.approx(100.0, rel=1e-3)
    # At a steady 100 items/s an item that may wait a second needs hardly more than the mean.
    steady = np.arange(0, 60, 0.01)
    assert trace_load(steady, 1.0).peak == pytest.approx(100.0, rel=0.02)
    assert trace_load(steady, 1.0, items_per_request=3).peak == pytest.approx(300.0, rel=0.02)


def test_levels_hold_all_items_and_the_time_without_work_is_none_of_theirs():
    times = np.concatenate((np.arange(0, 5, 0.1), np.arange(20, 25, 0.01)))
    load = trace_load(times, 0.1)
    assert sum(level.items for level in load.levels) == load.items == len(times)
    assert load.levels[0].load < load.levels[-1].load
    assert load.levels[-1].load <= load.peak


def test_a_calm_load_needs_one_server_and_a_faster_one_two(config):
    assert sized(config, np.arange(0, 60, 1 / 20), 1.0, 0.9).needed.servers == ("a",)
    two = sized(config, np.arange(0, 60, 1 / 80), 1.0, 0.9)
    assert two.needed.servers == ("a", "b")
    assert not two.without["b"].enough
    assert two.without["b"].accuracy < 0.9
    assert two.further["c"].max_load == pytest.approx(225.0)


def test_what_is_needed_follows_the_accuracy(config):
    # 80 items/s: one server carries it at 0.7 on the mean (12.5 ms each: three quarters of a wide last segment).
    times = np.arange(0, 60, 1 / 80)
    assert sized(config, times, 1.0, 0.6).needed.servers == ("a",)
    assert sized(config, times, 1.0, 0.75).needed.servers != ("a",)


def test_a_short_slo_rules_out_slow_servers_and_wide_pieces(config):
    # A wide segment takes 10 ms on a and b, and 40 ms on c; a narrow one 5 and 20.
    assert sized(config, np.arange(0, 60, 1.0), 0.015, 0.9).needed.servers in (("a",), ("b",))
    assert sized(config, np.arange(0, 60, 1.0), 0.006, 0.9).needed is None
    only_narrow = sized(config, np.arange(0, 60, 1.0), 0.012, 0.6, rho=1.0)
    assert "c" not in only_narrow.needed.servers


def test_a_load_that_is_too_much_for_all_says_what_they_carry(config):
    none = sized(config, np.arange(0, 10, 1 / 400), 0.1, 0.6)
    assert none.needed is None
    assert none.everything.max_load == pytest.approx(225.0)
    assert none.everything.accuracy is None


def test_a_surge_may_be_less_accurate_where_the_calm_makes_up_for_it(config):
    calm, surge = np.arange(0, 90, 1 / 10), np.arange(90, 100, 1 / 90)
    sizing = sized(config, np.concatenate((calm, surge)), 1.0, 0.75)
    assert sizing.needed.servers == ("a",)
    assert 0.6 < sizing.needed.accuracy < 0.9


@pytest.mark.parametrize(("slo", "accuracy", "says"), [(0.0, 0.5, "must be above 0"), (1.0, 72.0, "0.72 for 72 %")])
def test_impossible_wishes_are_refused(config, slo, accuracy, says):
    with pytest.raises(ConfigError, match=says):
        sized(config, np.arange(0, 10, 0.1), slo, accuracy)


def test_the_command_says_what_is_needed_why_and_what_more_gives(config, tmp_path):
    (tmp_path / "cluster.toml").write_text(
        f'[model]\npath = "{config.model.path}"\n[network]\nactivations = false\n'
        + "".join(
            f'[[servers]]\nname = "{s.name}"\ndevice = "made-up"\nprofile = "{s.profile}"\nmax_batch = 8\n'
            f"slowdown = {s.slowdown}\n"
            for s in config.servers
        )
    )
    rows = "\n".join(f"{t:.4f}" for t in np.arange(0, 60, 1 / 80))
    (tmp_path / "trace.csv").write_text(f"arrival_s\n{rows}\n")
    asked = ["plan", "--config", str(tmp_path / "cluster.toml"), "--trace", str(tmp_path / "trace.csv")]
    asked += ["--slo", "1000", "--accuracy", "0.9", "--rho", "1"]
    table = CliRunner().invoke(app, asked, catch_exceptions=False).stdout
    assert "needed: a, b" in table
    assert "points short" in table
    assert "and c" in table
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False).stdout)
    assert found["needed"]["servers"] == ["a", "b"]
    assert set(found["without"]) == {"a", "b"}
    refusal = CliRunner().invoke(app, [*asked, "--precision", "bf16"]).exception
    assert "precision in the file" in str(refusal)
