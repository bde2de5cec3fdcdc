"""Estimates and paired differences of routers, on numbers that can be checked by hand."""

import os
import re
from math import sqrt
from pathlib import Path

import pytest

from slim_scheduler.core.errors import RecordError
from slim_scheduler.report.comparison import Comparison
from slim_scheduler.report.measures import REWARDED, SERVED, aggregate, estimate, flatten
from slim_scheduler.report.run_folder import RunFolder, by_router
from slim_scheduler.setup.config import with_overrides

T_975_OF_2 = 4.302653  # Student's t, two degrees of freedom


def test_an_estimate_is_mean_and_t_interval() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert found.ci95 == pytest.approx(T_975_OF_2 * sqrt(7.0) / sqrt(3.0), rel=1e-5)


def test_one_run_has_no_interval() -> None:
    assert estimate([2.0]).ci95 is None


def test_unknown_in_one_run_is_unknown_for_all() -> None:
    assert estimate([1.0, None]).mean is None


def test_nested_keys_are_joined_by_a_dot_and_texts_left_out() -> None:
    summary = {"router": "random", "interrupted": False, "accuracy": None, "latency_s": {"mean": 0.5}}
    assert flatten(summary) == {"accuracy": None, "latency_s.mean": 0.5}


def test_a_width_that_a_run_never_used_has_share_zero_there() -> None:
    estimates = aggregate([{"width_share": {"0.5": 1.0}}, {"width_share": {"0.5": 0.5, "1": 0.5}}])
    assert estimates["width_share.1"].mean == 0.25


def test_differences_pair_runs_of_the_same_seed() -> None:
    comparison = Comparison(
        {
            "random": [{"seed": 0, "x": 10.0}, {"seed": 1, "x": 20.0}, {"seed": 2, "x": 30.0}],
            "jsq:0.5": [{"seed": 2, "x": 27.0}, {"seed": 1, "x": 18.0}, {"seed": 0, "x": 9.0}],
        }
    )
    difference = comparison.differences["jsq:0.5"]["x"]
    assert sorted(value for value in difference.runs if value is not None) == [-3.0, -2.0, -1.0]
    # Paired, the interval is that of the differences, far below that of the runs themselves.
    assert difference.ci95 == pytest.approx(T_975_OF_2 / sqrt(3.0), rel=1e-5)
    assert comparison.to_json()[1]["metrics"]["x"] == {
        "mean": 18.0,
        "ci95": pytest.approx(T_975_OF_2 * 9.0 / sqrt(3.0), rel=1e-5),
        "runs": [27.0, 18.0, 9.0],
    }


def test_a_width_that_one_of_two_routers_never_used_has_a_difference() -> None:
    comparison = Comparison(
        {
            "wide": [{"seed": 0, "width_share": {"1": 1.0}}, {"seed": 1, "width_share": {"0.5": 0.5, "1": 0.5}}],
            "narrow": [{"seed": 0, "width_share": {"0.5": 1.0}}, {"seed": 1, "width_share": {"0.5": 1.0}}],
        }
    )
    differences = comparison.differences["narrow"]
    assert differences["width_share.0.5"].runs == (1.0, 0.5)
    assert differences["width_share.1"].runs == (-1.0, -0.5)


def test_nothing_to_compare_is_said() -> None:
    with pytest.raises(RecordError, match="no router"):
        Comparison({})


def test_every_measure_of_the_tables_is_a_key_of_the_summary(runs: list[RunFolder]) -> None:
    keys = flatten(runs[0].summary).keys()
    assert {measure.key for measure in (*SERVED, *REWARDED)} <= keys


def test_runs_are_grouped_by_router(runs: list[RunFolder]) -> None:
    assert {router: len(of) for router, of in by_router(runs).items()} == {"jsq:0.5": 2, "random": 1}


def variant(run: RunFolder, folder: str, seed: int, *overrides: str, **summary: str) -> RunFolder:
    """A run as if it lay in this folder, of this seed and with these settings."""
    made = RunFolder(run.path)
    made.path = Path(folder)
    made.summary = {**run.summary, **summary, "seed": seed}
    made.config = with_overrides(run.config, overrides)
    return made


def test_runs_of_one_router_with_other_settings_are_not_averaged(runs: list[RunFolder]) -> None:
    faster = variant(runs[0], "runs/fast", 1, "servers.1.slowdown=1.5", "workload.rate=60")
    said = "runs/slow and runs/fast differ in servers.1.slowdown: 2.0 and 1.5; they cannot be compared, report them"
    with pytest.raises(RecordError, match=re.escape(said)):
        by_router([variant(runs[0], "runs/slow", 0), faster])


def test_a_seed_that_one_router_has_twice_is_refused_with_both_folders(runs: list[RunFolder]) -> None:
    said = "runs/one and runs/again are both of jsq:0.5 with seed 3; leave one out"
    with pytest.raises(RecordError, match=re.escape(said)):
        by_router([variant(runs[0], "runs/one", 3), variant(runs[0], "runs/again", 3)])


def test_a_seed_may_be_one_simulated_and_one_live(runs: list[RunFolder]) -> None:
    live = variant(runs[0], "runs/live", 0, mode="live")
    assert list(by_router([runs[0], live])) == ["jsq:0.5 (simulated)", "jsq:0.5 (live)"]


def test_simulated_runs_beside_live_ones_may_name_the_images_otherwise(runs: list[RunFolder]) -> None:
    live = variant(runs[0], "runs/live", 0, "workload.data=/images/digits", mode="live")
    assert list(by_router([runs[0], live])) == ["jsq:0.5 (simulated)", "jsq:0.5 (live)"]
    faster = variant(runs[0], "runs/live", 0, "workload.data=/images/digits", "workload.rate=60", mode="live")
    with pytest.raises(RecordError, match=r"differ in workload\.rate"):
        by_router([runs[0], faster])


def test_two_spellings_of_a_path_are_one_setting(runs: list[RunFolder]) -> None:
    spelled = os.path.relpath(runs[0].config.model.path)
    assert spelled != runs[0].config.model.path
    elsewhere = variant(runs[0], "runs/relative", 1, f"model.path={spelled}")
    assert {router: len(of) for router, of in by_router([runs[0], elsewhere]).items()} == {"jsq:0.5": 2}


def test_routers_that_had_other_arrivals_are_not_paired(runs: list[RunFolder]) -> None:
    busier = variant(runs[2], "runs/busier", 0, "workload.rate=60")
    said = f"{runs[0].path} and runs/busier differ in workload.rate: 50.0 and 60.0"
    with pytest.raises(RecordError, match=re.escape(said)):
        by_router([runs[0], busier])
    elsewhere = variant(runs[2], "runs/elsewhere", 0, "servers.1.slowdown=3")
    assert list(by_router([runs[0], elsewhere])) == ["jsq:0.5", "random"], "the same arrivals on another cluster"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.00123456, "0.00123"), (52.85, "52.9"), (1967.94, "1,968"), (-0.5, "−0.500")]
)
def test_sizes_that_differ_much_are_shown_with_three_digits(value: float, shown: str) -> None:
    energy = next(measure for measure in REWARDED if measure.key == "energy_block_j.mean")
    assert energy.show(value) == shown


@pytest.mark.parametrize(
    ("value", "spread", "shown"),
    [(-0.0256, 0.000812, "−0.0256 ± 0.0008"), (-0.00025, 0.00113, "−0.00025 ± 0.00113"), (0.0, 0.0, "0.0 ± 0.0")],
)
def test_a_value_and_its_spread_have_the_same_digits(value: float, spread: float, shown: str) -> None:
    reward = next(measure for measure in REWARDED if measure.key == "reward.mean")
    assert reward.show(value, spread) == shown
