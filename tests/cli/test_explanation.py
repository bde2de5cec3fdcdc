"""`slim doctor --config`: what a configuration means, and what is wrong with it."""

import json
from pathlib import Path

import pytest

from slim_scheduler.cli.explanation import explain
from slim_scheduler.model.checkpoint import save
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import carried_by_width
from tests.cli.conftest import ROOT, Slim
from tests.model.plain_networks import HalfLowered, PlainResNet

BELOW = Path("examples/reference/below.toml")
DEMO = Path("examples/demo/cluster.toml")
SHIPPED = sorted(
    path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.toml") if "[[servers]]" in path.read_text()
)


@pytest.fixture(autouse=True)
def _in_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found(*overrides: str, subject: str = "", path: Path = DEMO):
    return [finding for finding in explain(load_config(path, overrides)) if finding.subject == subject]


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_no_shipped_configuration_has_a_problem(path):
    assert not [finding for finding in explain(load_config(path)) if finding.status == "problem"]


def test_the_capacity_at_each_width_is_the_simulators():
    carried = carried_by_width(load_config(DEMO))
    for width, rate in carried.items():
        (finding,) = found(subject=f"width {width:g}")
        assert finding.found.startswith(f"{rate:,.0f} items/s")


def test_a_width_that_is_no_faster_than_the_next_is_told(tmp_path):
    profile = json.loads(Path("profiles/cpu-digits.json").read_text())
    assert {finding.status for w in (0.25, 0.5, 0.75, 1) for finding in found(subject=f"width {w}")} == {"ok"}
    for row in profile["latency_rows"]:
        if row["width"] == 0.5:
            row["seconds"] = [2 * seconds for seconds in row["seconds"]]
    (tmp_path / "slow.json").write_text(json.dumps(profile))
    slow = (f"servers.0.profile={tmp_path / 'slow.json'}",)
    statuses = [finding.status for w in (0.25, 0.5, 0.75) for finding in found(*slow, subject=f"width {w}")]
    assert statuses == ["ok", "note", "ok"]
    assert "as fast at fast:" in found(*slow, subject="width 0.5")[0].advice


def test_a_budget_is_told_in_instances_and_one_that_holds_none_is_a_problem():
    assert "at every width 1 times" in found("servers.0.vram_budget_gib=0.006", subject="server fast")[1].found
    note = found("servers.0.vram_budget_gib=0.004", subject="server fast")[1]
    assert (note.status, "at every width 0 times" in note.found) == ("note", True)
    assert found("servers.0.vram_budget_gib=0.0001", subject="server fast")[1].status == "problem"


def test_a_server_that_is_to_keep_to_a_profile_that_it_has_not_is_a_problem():
    missing = found("servers.0.profile=no-such.json", subject="server fast")[0]
    assert missing.status == "note"
    missing = found("servers.0.profile=no-such.json", 'servers.0.slowdown_of="profile"', subject="server fast")[0]
    assert (missing.status, "no profile" in missing.found) == ("problem", True)
    assert missing.advice == "slim measure --model models/digits --device cpu"


def test_a_load_beyond_what_is_carried_and_a_time_that_nobody_can_keep_are_told():
    (load,) = found("workload.rate=1e6", subject="load")
    assert load.status == "note"
    assert "expect queues" in load.advice
    (time,) = found("workload.deadline_ms=0.01", subject="time")
    assert (time.status, time.advice) == ("problem", "no item can be in time: raise workload.deadline_ms")


def test_a_trace_is_a_load_where_it_is_replayed_at_a_rate():
    trace = ("workload.kind=trace", "workload.trace=hour.csv.gz", "workload.rate=1e6")
    (recorded,) = found(*trace, subject="load")
    assert (recorded.status, "as hour.csv.gz says" in recorded.found) == ("ok", True)
    (at_rate,) = found(*trace, "workload.trace_at_rate=true", subject="load")
    assert "expect queues" in at_rate.advice


def test_what_the_defaults_come_to_is_told():
    (router,) = found("router.name=auto", subject="router")
    assert router.found == "auto, here lp; where it fails cost-model:0.5 decides"
    batches = found("servers.0.max_batch=8", "servers.0.max_upgrade=1", subject="server fast")[2]
    assert batches.found == "1 batch of up to 8 at a time, 16 tasks on the way; tasks start at once"
    cut = found("servers.0.max_batch=8", subject="server fast")[3]
    assert cut.found == "groups of 32 are cut to the 16 tasks it may be sent"


def test_a_missing_profile_leaves_the_rest_to_be_told():
    findings = explain(load_config(DEMO, ("servers.0.profile=nowhere", "router.name=jsq:0.5")))
    assert [f.status for f in findings if "no profile" in f.found] == ["note"]
    assert not [f for f in findings if f.subject.startswith("width")]
    assert [f.found for f in findings if f.subject == "router"] == ["jsq:0.5; where it fails jsq:0.5 decides"]


def test_a_network_that_has_neither_profile_nor_accuracy_lacks_both(tmp_path: Path):
    save(PlainResNet().eval(), tmp_path / "plain")
    findings = explain(load_config(DEMO, (f"model.path={tmp_path / 'plain'}", "router.name=lp")))
    (accuracy,) = [finding for finding in findings if finding.subject == "accuracy"]
    assert accuracy.advice == f"slim accuracy --model {tmp_path / 'plain'} --data DIR"
    assert next(finding.subject for finding in findings if "no profile" in finding.found) == "server fast"
    (router,) = [finding for finding in findings if finding.subject == "router"]
    assert (router.status, "make the missing ones with `slim measure`" in router.found) == ("problem", True)


def test_the_command_prints_it_and_counts_problems(slim: Slim):
    outcome = slim("doctor", "--config", DEMO)
    assert (outcome.code, "this configuration can be served" in outcome.out) == (0, True)
    outcome = slim("doctor", "-c", DEMO, "--set", "router.name=ppo:nowhere")
    assert (outcome.code, "problems: 1" in outcome.out) == (2, True)
    assert slim("doctor", "-c", DEMO, "--set", "router.name=ppo:nowhere", "--json").code == 2
    assert slim("doctor", "-c", DEMO, "--json").code == 0


def test_what_commands_would_refuse_is_a_problem(tmp_path: Path):
    """Data for another network, a class that is nowhere, a precision that slices do not have."""
    (data,) = found("workload.data=pictures", subject="data")
    assert data.status == "note"
    assert "simulate, compare and bench refuse it: workload.data is pictures, but" in data.found
    assert found("workload.data=digits", subject="data") == []
    save(PlainResNet().eval(), tmp_path / "plain")
    copied = (f"model.path={tmp_path / 'plain'}", "router.name=jsq:1", "router.fallback=jsq:1")
    assert [finding.status for finding in found(*copied, subject="model")] == ["ok"]
    manifest = tmp_path / "plain/manifest.json"
    manifest.write_text(manifest.read_text().replace("tests.model.plain_networks", "nowhere.to_be_found"))
    _, model = found(*copied, subject="model")
    assert (model.status, "nowhere" in model.found) == ("problem", True)


def test_what_auto_takes_here_is_told(tmp_path: Path):
    save(PlainResNet().eval(), tmp_path / "plain")
    plain = (f"model.path={tmp_path / 'plain'}", "router.name=jsq:1", "router.fallback=jsq:1")
    for key in ("servers.0.precision=auto", 'servers.0.device="auto"'):
        first, second, *_ = found(*plain, key, subject="server fast")
        assert (first.status, first.found.endswith("in fp32 is the fastest here")) == ("ok", True)
        device = first.found.removesuffix(" in fp32 is the fastest here")
        assert second.found == f"{device}: no profile, so its speed is not known"
    (accuracy,) = found("servers.0.device=openvino:CPU", "servers.0.precision=bf16", subject="accuracy")
    assert accuracy.advice == "slim accuracy --model models/digits --data DIR --device openvino:CPU --precision bf16"


def test_a_simulated_device_is_not_tried():
    findings = explain(load_config(BELOW, ["servers.0.precision=auto"]))
    assert not [finding for finding in findings if finding.status == "problem"]


def test_auto_without_weights_is_one_problem(tmp_path: Path):
    save(PlainResNet().eval(), tmp_path / "plain")
    (tmp_path / "plain/weights.safetensors").unlink()
    plain = (f"model.path={tmp_path / 'plain'}", "router.name=jsq:1", "router.fallback=jsq:1", "servers.0.device=auto")
    problems = [finding for finding in explain(load_config(DEMO, plain)) if finding.status == "problem"]
    assert [finding.subject for finding in problems] == ["model"]


def test_a_precision_that_slices_do_not_run_in_is_a_problem(tmp_path: Path):
    save(HalfLowered().eval(), tmp_path / "half")
    half = (f"model.path={tmp_path / 'half'}", "router.name=jsq:1", "router.fallback=jsq:1")
    first = found(*half, "servers.0.precision=bf16", subject="server fast")[0]
    assert (first.status, "segment 0 at width 1 does not run" in first.found) == ("problem", True)
    assert found(*half, "servers.0.precision=bf16", subject="server middle")[0].status == "note"


def test_a_device_that_nothing_computes_on_is_a_problem():
    first = found("servers.0.device=gpu", subject="server fast")[0]
    assert (first.status, first.found) == ("problem", "gpu: no device that computes, and no profile of that name")


def test_too_few_tasks_on_the_way_to_a_server_behind_a_link_are_told():
    ok, note = found("servers.0.credit_tasks=64", subject="server turing-1", path=BELOW)[-2:]
    assert (ok.status, "64 tasks on the way" in ok.found) == ("ok", True)
    assert (note.status, "automatic are 384" in note.found) == ("note", True)
    near = ("network.latency_ms=0", "network.mbps=1e6", "servers.0.credit_tasks=64")
    assert [finding.status for finding in found(*near, subject="server turing-1", path=BELOW)] == ["ok"] * 3


def test_a_profile_without_latencies_is_one_servers_problem(tmp_path):
    profile = json.loads(Path("profiles/rtx-2080-ti.json").read_text())
    (tmp_path / "none.json").write_text(json.dumps({**profile, "latency_rows": []}))
    findings = explain(load_config(BELOW, (f"servers.0.profile={tmp_path / 'none.json'}",)))
    assert "no latency rows" in next(f for f in findings if f.status == "problem" and "turing-1" in f.subject).found
    assert {"server turing-1", "server turing-2", "server maxwell"} <= {finding.subject for finding in findings}
