"""A router of a user's own is found by name; one that fails is named with its first exception, and no result."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Slim
from tests.cli.test_bad_input import refused

DEMO = ROOT / "examples/demo/cluster.toml"
SHORT = ("--set", "workload.duration_s=1", "--set", "workload.warmup_s=0.4", "--set", "workload.rate=200")
HERE = "tests.cli.routers"


def simulate(router: str, out: Path) -> tuple[str | Path, ...]:
    return ("simulate", "--config", DEMO, "--router", f"{HERE}:{router}", "--out", out, *SHORT)


def test_a_router_of_ones_own_decides_everything(slim: Slim, tmp_path: Path) -> None:
    code, out, _ = slim(*simulate("Shortest", tmp_path), "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["router"] == "tests.cli.routers:Shortest"
    assert (summary["fallbacks"], summary["fallback_reason"], summary["router_raised"]) == (0, None, 0)
    assert summary["width_share"]["1"] > 0.5


def test_a_router_that_raises_is_an_error_with_its_first_exception_and_total(slim: Slim, tmp_path: Path) -> None:
    line = refused(slim, *simulate("Broken", tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert f"router {HERE}:Broken raised {summary['router_raised']:,} times (seed 0)" in line
    assert "first: ZeroDivisionError: division by zero" in line
    assert "--allow-fallback" in line
    assert summary["router_raised"] > summary["decisions"], "those of the warm-up are counted in the whole run only"


def test_its_row_is_marked_where_the_fallbacks_result_is_wanted(slim: Slim, tmp_path: Path) -> None:
    code, out, _ = slim(*simulate("Broken", tmp_path), "--allow-fallback")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert code == 0
    assert f"{HERE}:Broken (100% the fallback's)" in out
    assert "(100.0%) were the fallback's, because the router gave none; first: ZeroDivisionError" in out
    assert summary["fallbacks"] == summary["decisions"] > 0
    assert summary["fallback_share"] == 1.0


def test_a_comparison_stops_at_a_router_that_raises_and_marks_one_that_is_overruled(slim: Slim, tmp_path: Path) -> None:
    routers = ("compare", "--config", DEMO, "--seeds", 2, "--out", tmp_path, *SHORT)
    line = refused(slim, *routers, "--routers", f"jsq:0.5,{HERE}:Broken")
    assert "ZeroDivisionError" in line
    code, out, _ = slim(*routers, "--routers", f"jsq:0.5,{HERE}:Picky")
    assert code == 0
    marked = [line for line in out.splitlines() if f"{HERE}:Picky (" in line and "the fallback's)" in line]
    assert len(marked) == 2, "its row and its difference"
    assert "first: chose server nowhere, which is unknown" in out
    page = (tmp_path / "report.html").read_text()
    assert page.count(f"{HERE}:Picky (") >= 4
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert compared[1]["metrics"]["fallback_share"]["mean"] > 0.01
    assert compared[0]["metrics"]["fallback_share"]["mean"] == 0


@pytest.mark.parametrize(
    ("router", "said"),
    [
        ("Hungry", "cannot be made: TypeError"),
        ("NoRouter", "has no decide, chooses_full"),
        ("Missing", "has no Missing"),
    ],
)
def test_what_is_no_router_is_refused(slim: Slim, tmp_path: Path, router: str, said: str) -> None:
    assert said in refused(slim, *simulate(router, tmp_path))


def test_a_module_that_is_not_there_says_how_to_have_it_found(slim: Slim, tmp_path: Path) -> None:
    line = refused(slim, "simulate", "--config", DEMO, "--router", "my_router:Mine", "--out", tmp_path)
    assert "no module my_router; install it, or put its folder on PYTHONPATH" in line
