from pathlib import Path

import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.setup.config import config_from, documented, load_config
from slim_scheduler.setup.reference import sections
from slim_scheduler.setup.removed import REMOVED

SERVER = {"name": "a", "device": "cpu"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, r"no server is configured; add at least one \[\[servers\]\]"),
        ({"servrs": []}, "unknown key servrs; the nearest valid one is servers"),
        ({"servers": [{**SERVER, "max_bach": 1}]}, "servers.0.max_bach; the nearest valid one is servers.0.max_batch"),
        ({"servers": [SERVER], "workload": {"rat": 1}}, "workload.rat; the nearest valid one is workload.rate"),
        ({"servers": [{**SERVER, "max_batch": 0}]}, "servers.0.max_batch is 0; it must be above 0"),
        ({"servers": [{**SERVER, "vram_budget_gib": -1.0}]}, "servers.0.vram_budget_gib is -1"),
        ({"servers": [{**SERVER, "credit_tasks": -4}]}, 'credit_tasks is -4; it must be "auto", or 1 or more'),
        ({"servers": [{**SERVER, "batch_window_ms": -1.0}]}, 'batch_window_ms is -1; it must be "auto", or 0'),
        ({"servers": [{**SERVER, "batch_window_ms": float("nan")}]}, "servers.0.batch_window_ms is nan"),
        ({"servers": [{**SERVER, "resources": {"GPU": -1}}]}, "servers.0.resources.GPU is -1; it must be above 0"),
        ({"servers": [{**SERVER, "resources": {"CPU": 1}}]}, "servers.0.resources has CPU, which is Ray's own"),
        ({"servers": [{**SERVER, "resources": {"card": 0}}]}, "servers.0.resources.card is 0; it must be above 0"),
        ({"servers": [{**SERVER, "max_batch": "many"}]}, "max_batch must be integer, above 0: Expected int, got"),
        ({"servers": [{**SERVER, "precision": "int8"}]}, r'servers\.0\.precision must be "fp32", "bf16", "fp16"'),
        ({"servers": [SERVER], "workload": {"kind": "foo"}}, 'workload.kind must be "poisson", "steps", .*: Invalid'),
        ({"servers": [SERVER], "router": {"groups": [1, "x"]}}, r"router\.groups\.1 must be list of integers"),
        ({"servers": [SERVER], "reward": {"alpha": float("nan")}}, "reward.alpha is nan; it must be finite"),
        ({"servers": [SERVER, SERVER]}, "server names repeat: a, a"),
        ({"servers": [SERVER], "workload": {"rate": float("nan")}}, "workload.rate is nan"),
        ({"servers": [SERVER], "workload": {"warmup_s": 40}}, "workload.warmup_s is 40"),
        ({"servers": [SERVER], "workload": {"kind": "trace"}}, "workload.trace names no file"),
        ({"servers": [SERVER], "workload": {"kind": "steps"}}, "workload.steps is empty; give some"),
        ({"servers": [SERVER], "workload": {"steps": [[0, 1]]}}, "a step's seconds is 0; it must be above 0"),
        ({"servers": [SERVER], "workload": {"steps": [[1, -1]]}}, "a factor is -1; it must be 0 or more"),
        ({"servers": [SERVER], "router": {"groups": []}}, "router.groups is empty"),
        ({"servers": [SERVER], "router": {"fallback": "auto"}}, 'router.fallback is "auto", which itself takes the'),
        ({"servers": [SERVER], "faults": [{"server": "z", "at_s": 1, "kind": "crash"}]}, "z is not configured; there"),
        ({"servers": [SERVER], "telemetry": {"period_s": 1.0}}, "heartbeat_timeout_s is 0.8; it must be"),
    ],
)  # fmt: skip
def test_bad_configuration_is_one_clear_line(tree, message):
    with pytest.raises(ConfigError, match=message) as raised:
        config_from(tree)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"servers": [{**SERVER, "num_gpus": 1}]}, r"servers\.0\.num_gpus does not exist any more; say resources ="),
        ({"servers": [SERVER], "router": {"patience_s": 0.05}}, "any more; set servers.N.batch_window_ms instead"),
        ({"servers": [SERVER], "dispatch": {"max_retries": 5}}, "any more; leave it out: 3 is what everybody ran"),
    ],
)
def test_a_key_that_is_gone_is_refused_with_what_to_do_instead(tree, message):
    with pytest.raises(ConfigError, match=message):
        config_from(tree)


def test_no_key_is_there_and_gone():
    there = {f"{section}.{name}" for section, kind, _ in sections() for name, _ in documented(kind)}
    assert not there & set(REMOVED)


def test_overrides_reach_into_lists_and_tables(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[[servers]]\nname = "a"\ndevice = "cpu"\n')
    config = load_config(path, ("servers.0.max_batch=64", "workload.kind=bursty", "router.groups=[8]"))
    assert config.servers[0].max_batch == 64
    assert (config.workload.kind, config.router.groups) == ("bursty", (8,))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("servers.3.max_batch=1", "--set servers.3.max_batch: no such place"),
        ("servers.-1.max_batch=1", "--set servers.-1.max_batch: no such place"),
        ("servers.-1={}", "--set servers.-1: no such place"),
        ("servers", "expected key.path=value"),
        ("servers.0.max_bach=1", "nearest valid one is servers.0.max_batch"),
    ],
)
def test_a_bad_override_names_itself(tmp_path, override, message):
    path = tmp_path / "c.toml"
    path.write_text('[[servers]]\nname = "a"\ndevice = "cpu"\n')
    with pytest.raises(ConfigError, match=message):
        load_config(path, (override,))


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"c.toml does not exist"):
        load_config(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("[[servers")
    with pytest.raises(ConfigError, match=r"c.toml: not valid TOML"):
        load_config(tmp_path / "c.toml")


def test_concurrency_has_the_methods_defaults():
    config = config_from({"servers": [{"name": "a", "device": "cpu"}, {"name": "b", "device": "cuda:0"}]})
    assert [s.concurrency for s in config.servers] == [1, 2]


def test_a_relative_path_starts_from_the_files_folder_where_it_exists_there(tmp_path, monkeypatch):
    (tmp_path / "project" / "models" / "net").mkdir(parents=True)
    (tmp_path / "project" / "policies" / "calm").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "project" / "c.toml"
    path.write_text(
        '[model]\npath = "models/net"\n[[servers]]\nname = "a"\ndevice = "cpu"\n'
        '[router]\nname = "ppo:policies/calm"\nfallback = "jsq:1"\n[workload]\ndata = "digits"\n'
    )
    config = load_config(path)
    assert config.model.path == str(tmp_path / "project" / "models" / "net")
    assert config.router.name == f"ppo:{tmp_path / 'project' / 'policies' / 'calm'}"
    assert (config.router.fallback, config.workload.data) == ("jsq:1", "digits")
    assert load_config(path, ("model.path=models/net",)).model.path == "models/net", "a flag's: from where one stands"
    monkeypatch.chdir(tmp_path)
    relative = load_config(Path("project/c.toml"))
    assert relative.model.path == "project/models/net"
    path.write_text(path.read_text().replace("models/net", "elsewhere/net"))
    assert load_config(path).model.path == "elsewhere/net", "neither: from the working directory"
