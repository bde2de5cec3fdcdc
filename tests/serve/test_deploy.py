"""What deploy/ asks Prometheus for is what the server has."""

import json
import re

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
