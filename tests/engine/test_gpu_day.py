"""The script for a day with a GPU, run dry on the CPU: the first chance must not be lost to a typing error."""

import json

from benchmarks.gpu_day import STEPS, Day, spend

from tests.engine.test_shipped import ROOT


def test_every_step_runs_dry_on_the_cpu(tmp_path):
    day = Day("cpu", ROOT / "models" / "digits", tmp_path, seconds=4.0)
    results = spend(day, skip=frozenset({"suite"}))
    assert set(results["steps"]) == {step.__name__ for step, _ in STEPS} - {"suite"}
    errors = {name: row for name, row in results["steps"].items() if "error" in row or row.get("passed") is False}
    assert not errors
    assert results["steps"]["stress"]["batches"] > 0
    assert results["steps"]["parity"]["checked"] > 0
    assert all(rate > 0 for rate in results["steps"]["throughput"]["items_per_s"].values())
    assert json.loads((tmp_path / "gpu_day.json").read_text()) == results
