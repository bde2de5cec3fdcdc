"""Whatever a user gets wrong: exit code 2, one line that says what is wrong and what to do, no traceback."""

import shutil
from pathlib import Path

import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.model.cifar import RECORD_BYTES
from tests.cli.conftest import ROOT, Slim

DEMO = ROOT / "examples/demo/cluster.toml"
DIGITS = ROOT / "models/digits"


def refused(slim: Slim, *arguments: str | Path) -> str:
    """The one line that the command is refused with."""
    code, out, err = slim(*arguments)
    lines = [line for line in err.splitlines() if line.startswith("slim: ")]
    assert code == 2
    assert len(lines) == 1
    assert "Traceback" not in out + err
    return lines[0]


def simulate(slim: Slim, tmp_path: Path, *settings: str, config: Path = DEMO) -> str:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return refused(slim, "simulate", "--config", config, "--out", tmp_path / "run", *flags)


def test_an_unknown_key_names_the_nearest_valid_one(slim: Slim, tmp_path: Path) -> None:
    assert "unknown key servers.0.max_bach; the nearest valid one is servers.0.max_batch" in simulate(
        slim, tmp_path, "servers.0.max_bach=3"
    )


@pytest.mark.parametrize("router", ["jsq:0.3", "cost-model:0.25/0.5/0.75/0.8"])
def test_a_width_that_is_not_served_lists_those_that_are(slim: Slim, tmp_path: Path, router: str) -> None:
    line = refused(slim, "simulate", "--config", DEMO, "--router", router, "--out", tmp_path)
    assert "is not served; available: 0.25, 0.5, 0.75, 1" in line


def test_an_unknown_router_lists_the_names(slim: Slim, tmp_path: Path) -> None:
    line = refused(slim, "simulate", "--config", DEMO, "--router", "fastest", "--out", tmp_path)
    assert "router 'fastest' is unknown; available: auto, random" in line


def test_a_comparison_reads_all_names_before_the_first_run(slim: Slim, tmp_path: Path) -> None:
    line = refused(slim, "compare", "--config", DEMO, "--routers", "random,fastest", "--out", tmp_path)
    assert "router 'fastest' is unknown" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("router", "wrong"), [("lp:many", "'many' is no share"), ("lp:2.5", "rho is 2.5")])
def test_a_plan_takes_a_share_of_a_devices_time(slim: Slim, tmp_path: Path, router: str, wrong: str) -> None:
    assert wrong in refused(slim, "simulate", "--config", DEMO, "--router", router, "--out", tmp_path)


def test_a_teacher_needs_a_network(slim: Slim, tmp_path: Path) -> None:
    line = refused(
        slim, "fit", "--preset", "digits", "--data", "digits", "--teacher", tmp_path, "--out", tmp_path / "taught"
    )
    assert "has neither manifest.json nor teacher.json" in line


def test_a_cluster_needs_a_server(slim: Slim, tmp_path: Path) -> None:
    config = tmp_path / "empty.toml"
    config.write_text("[workload]\nrate = 10\n")
    assert "no server is configured" in simulate(slim, tmp_path, config=config)


@pytest.mark.parametrize(
    "setting",
    [
        "servers.0.max_batch=0",
        "servers.1.vram_budget_gib=-1",
        "servers.0.credit_tasks=0",
        "dispatch.max_waiting_items=0",
        "dispatch.max_activation_mib=-5",
        "workload.rate=0",
        "workload.duration_s=-3",
        "router.groups=[0]",
    ],
)
def test_limits_must_be_positive(slim: Slim, tmp_path: Path, setting: str) -> None:
    key, _, value = setting.partition("=")
    line = simulate(slim, tmp_path, setting)
    assert key in line
    assert f"is {value.strip('[]')}" in line


def test_a_configuration_must_exist_and_be_toml(slim: Slim, tmp_path: Path) -> None:
    assert "does not exist" in simulate(slim, tmp_path, config=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[workload\nrate = 3")
    assert "not valid TOML" in simulate(slim, tmp_path, config=broken)


def test_a_setting_must_be_key_and_value(slim: Slim, tmp_path: Path) -> None:
    assert "expected key.path=value" in simulate(slim, tmp_path, "workload.rate")


def test_a_missing_option_is_one_line(slim: Slim) -> None:
    assert "--config" in refused(slim, "simulate")
    assert "--nosuch" in refused(slim, "simulate", "--nosuch")
    assert "nosuch" in refused(slim, "nosuch")


@pytest.mark.parametrize("command", ["bench", "accuracy", "simulate"])
def test_a_missing_checkpoint_says_how_to_get_one(slim: Slim, tmp_path: Path, command: str) -> None:
    if command == "accuracy":
        line = refused(slim, command, "--model", tmp_path / "none", "--data", "digits")
    else:
        setting = f"model.path={tmp_path / 'none'}"
        line = refused(slim, command, "--config", DEMO, "--set", setting, "--out", tmp_path / "run")
    assert "manifest.json" in line
    assert "slim fit" in line


def damaged_model(folder: Path, damage: str) -> Path:
    shutil.copytree(DIGITS, folder)
    weights = folder / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        content = content[:-100]
    else:
        content[-1] ^= 1
    weights.write_bytes(content)
    return folder


@pytest.mark.parametrize(("damage", "said"), [("truncated", "bytes"), ("tampered", "SHA-256")])
def test_a_damaged_checkpoint_is_refused_before_it_serves(slim: Slim, tmp_path: Path, damage: str, said: str) -> None:
    model = damaged_model(tmp_path / "model", damage)
    line = refused(slim, "bench", "--config", DEMO, "--set", f"model.path={model}", "--out", tmp_path / "run")
    assert "weights.safetensors" in line
    assert said in line


def test_a_damaged_manifest_is_refused_by_the_simulator_too(slim: Slim, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DIGITS, model)
    (model / "manifest.json").write_text((model / "manifest.json").read_text()[:200])
    assert "manifest" in simulate(slim, tmp_path, f"model.path={model}")


def test_images_of_another_shape_are_refused(slim: Slim, tmp_path: Path) -> None:
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(bytes(RECORD_BYTES))
    line = refused(slim, "bench", "--config", DEMO, "--set", f"workload.data={tmp_path}", "--out", tmp_path / "run")
    assert "3x32x32" in line
    assert "1x8x8" in line


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cpux", "device cpux is not known; give cpu, cuda:N, openvino:CPU or onnxruntime:CPU"),
        ("cuda:x", "device cuda:x is not known"),
        ("cuda:99", "device cuda:99 is not there: torch"),
    ],
)
def test_accuracy_on_a_device_that_is_not_there_is_one_line(slim: Slim, device: str, said: str) -> None:
    assert said in refused(slim, "accuracy", "--model", DIGITS, "--data", "digits", "--device", device)


def test_accuracy_of_a_family_is_not_measured_on_a_gpu_that_would_not_be_used(slim: Slim, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"kind": "family"}')
    line = refused(slim, "accuracy", "--model", tmp_path, "--data", "digits", "--device", "cuda:0")
    assert "device cuda:0 runs no families" in line


def test_a_network_that_is_larger_than_the_memory_is_not_measured(
    slim: Slim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slim_scheduler.engine.measure._memory", lambda device: 100_000)
    line = refused(slim, "measure", "--model", DIGITS, "--device", "cpu", "--out", tmp_path / "profile.json")
    assert "digits cannot be measured in a budget of 100000 bytes" in line
    assert "on a device with more memory" in line
    few = ("--memory-gib", "0.00005")
    line = refused(slim, "measure", "--model", DIGITS, "--device", "cpu", "--out", tmp_path / "profile.json", *few)
    assert "5e-05 GiB were asked for" in line
    assert not (tmp_path / "profile.json").exists()


def test_missing_images_say_what_can_be_given(slim: Slim, tmp_path: Path) -> None:
    line = refused(slim, "accuracy", "--model", DIGITS, "--data", tmp_path / "none")
    assert "does not exist; give `digits`" in line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.csv", None, "does not exist"),
        ("binary.csv", b"\xff\xfe\x00arrival", "not readable as CSV"),
        ("broken.parquet", b"PAR1 and nothing else", "not readable as Parquet"),
        ("column.csv", b"time\n1\n2\n", "has no column arrival_s"),
        ("words.csv", b"arrival_s\n0.5\nsoon\n", "soon"),
        ("negative.csv", b"arrival_s\n-1\n2\n", "-1"),
        ("unsorted.csv", b"arrival_s\n2\n1\n", "1"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused(
    slim: Slim, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    trace = tmp_path / name
    if content is not None:
        trace.write_bytes(content)
    line = simulate(slim, tmp_path, "workload.kind=trace", f"workload.trace={trace}")
    assert f"trace {trace}" in line
    assert said in line


def test_a_report_needs_a_record(slim: Slim, tmp_path: Path) -> None:
    assert "record.parquet does not exist" in refused(slim, "report", tmp_path)
    (tmp_path / "record.parquet").write_bytes(b"PAR1")
    assert "summary.json does not exist" in refused(slim, "report", tmp_path)


def test_comparing_needs_routers_and_seeds(slim: Slim, tmp_path: Path) -> None:
    compare = ("compare", "--config", DEMO, "--out", tmp_path, "--routers")
    assert "no router to compare" in refused(slim, *compare, ",")
    assert "named twice" in refused(slim, *compare, "random,random")
    assert "at least 1" in refused(slim, *compare, "random", "--seeds", "-3")


def test_a_folder_that_cannot_be_written_is_named(slim: Slim, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    short = ("--set", "workload.duration_s=0.2", "--set", "workload.warmup_s=0")
    line = refused(slim, "simulate", "--config", DEMO, "--out", tmp_path / "file" / "run", *short)
    assert str(tmp_path / "file") in line


def test_a_policy_of_another_network_is_named_as_such_at_the_start_of_a_server(
    slim: Slim, caplog: pytest.LogCaptureFixture
) -> None:
    router = "ppo:examples/reference/policies/efficiency"
    line = refused(slim, "serve", "--config", DEMO, "--router", router, "--port", 0, "--grpc-port", -1)
    assert f"digits cannot be served with router {router}: " in line
    assert "network cifar100-lean" in line
    assert "was not changed" not in line
    assert router not in caplog.text


@pytest.mark.parametrize(
    ("served", "options", "said"),
    [
        (("--config", DEMO), ("--precision", "bf16"), "--precision beside --config"),
        (("--config", DEMO), ("--data", "val"), "--data beside --config"),
        ((DIGITS,), ("--labels", "absent.txt", "--mean", "0.5"), "--labels, --mean beside a model folder"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(slim: Slim, served, options, said) -> None:
    assert f"{said} would change nothing" in refused(slim, "serve", *served, *options)


def test_who_may_connect_is_asked_before_anything_is_measured(slim: Slim, monkeypatch) -> None:
    monkeypatch.setattr("slim_scheduler.cli.serving.found_here", lambda *_: pytest.fail("it measures"))
    monkeypatch.delenv("SLIM_TOKEN", raising=False)
    assert "opens the server to the network" in refused(slim, "serve", DIGITS, "--host", "0.0.0.0")


def test_a_profile_stays_where_the_one_that_was_asked_for_cannot_be_made(slim: Slim, tmp_path: Path, monkeypatch):
    profile = tmp_path / "profile.json"
    profile.write_text("the one of before")

    def as_served(*_: object) -> None:
        raise ConfigError("no server answers")

    monkeypatch.setattr("slim_scheduler.engine.served.as_served", as_served)
    line = refused(slim, "measure", "--model", DIGITS, "--rounds", 1, "--served", DEMO, "--out", profile)
    assert "no server answers" in line
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert profile.read_text() == "the one of before"


def test_digits_are_not_shown_to_a_network_that_was_made_for_other_images(slim: Slim, tmp_path: Path) -> None:
    reference = ROOT / "examples/reference/cluster.toml"
    line = simulate(slim, tmp_path, "workload.data=digits", config=reference)
    assert f"workload.data is digits, images of 1x8x8, but {ROOT}/models/cifar100-lean takes 3x32x32" in line
    line = simulate(slim, tmp_path, "workload.data=pictures")
    assert f"workload.data is pictures, but {ROOT}/models/digits was measured on digits" in line


@pytest.mark.parametrize("deadline_ms", ["nan", "inf", "0", "-5"])
def test_a_load_has_a_deadline_that_can_be_met(slim: Slim, deadline_ms: str) -> None:
    line = refused(slim, "load", "--rate", "1", "--duration", "0.1", "--deadline-ms", deadline_ms)
    assert f"deadline_ms is {deadline_ms}; it must be above 0 and finite" in line


def test_live_runs_have_no_workers(slim: Slim, tmp_path: Path) -> None:
    plan = ("--routers", "random", "--live", "--workers", "2", "--out", tmp_path / "run")
    assert "--workers 2 beside --live would change nothing" in refused(slim, "compare", "--config", DEMO, *plan)


def test_the_doctor_overrides_keys_of_a_configuration_alone(slim: Slim) -> None:
    assert "--set nonsense is given without --config" in refused(slim, "doctor", "--set", "nonsense")
