"""What deploy/ asks Prometheus for is what the server has."""

import json
import re

import yaml
from typer.testing import CliRunner

from slim_scheduler.cli import app
from slim_scheduler.serve.metrics import desired_servers
from slim_scheduler.setup.config import load_config
from tests.serve.conftest import ROOT
from tests.serve.wire import call, infer

SUFFIXES = ("_bucket", "_sum", "_count")


def test_every_metric_of_dashboard_and_rules_exists(server, images):
    infer(server.http, images)
    text = call(server.http, "GET", "/metrics")[2].decode()
    there = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    dashboard = json.loads((ROOT / "deploy/grafana/slim-scheduler.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\b(?:slim|process|nv)_\w+", " ".join(queries)))
    asked |= set(re.findall(r"\bslim_\w+", (ROOT / "deploy/rules.yml").read_text()))
    for name in asked:
        base = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        assert name in there or base in there, name


def test_kubernetes_files_are_whole_and_use_flags_and_metrics_that_exist(server, images):
    infer(server.http, images)
    text = call(server.http, "GET", "/metrics")[2].decode()
    folder = ROOT / "deploy/kustomize"
    for kustomization in folder.glob("*/kustomization.yaml"):
        parsed = yaml.safe_load(kustomization.read_text())
        for resource in parsed["resources"]:
            assert (kustomization.parent / resource).exists(), resource
    deployment = yaml.safe_load((folder / "base/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    flags = [word for word in pod["containers"][0]["args"] if word.startswith("--")]
    shown = CliRunner().invoke(app, ["serve", "--help"], terminal_width=200).output
    assert [flag for flag in flags if flag not in shown] == []
    arguments = pod["containers"][0]["args"]
    drain, grace = (float(arguments[arguments.index(name) + 1]) for name in ("--drain-delay-s", "--grace-s"))
    assert drain + grace < pod["terminationGracePeriodSeconds"], "killed before it has drained"
    load_config(folder / "base/cluster.toml")
    query = yaml.safe_load((folder / "keda/scaledobject.yaml").read_text())["spec"]["triggers"][0]["metadata"]["query"]
    assert set(re.findall(r"slim_\w+", query)) <= set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_desired_servers_follow_how_busy_the_fleet_is():
    assert desired_servers(0.0, 3, waiting=False) == 1
    assert desired_servers(0.7, 3, waiting=False) == 1
    assert desired_servers(2.1, 3, waiting=False) == 3
    assert desired_servers(3.0, 3, waiting=False) == 5, "all busy: more are wanted than there are"
    assert desired_servers(0.5, 3, waiting=True) == 4
