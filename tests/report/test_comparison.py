"""Estimates and paired differences of routers, on numbers that can be checked by hand."""

from math import sqrt

import pytest

from slim_scheduler.core.errors import RecordError
from slim_scheduler.report.comparison import Comparison
from slim_scheduler.report.measures import REWARDED, SERVED, aggregate, estimate, flatten
from slim_scheduler.report.run_folder import RunFolder, by_router

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


def test_nothing_to_compare_is_said() -> None:
    with pytest.raises(RecordError, match="no router"):
        Comparison({})


def test_every_measure_of_the_tables_is_a_key_of_the_summary(runs: list[RunFolder]) -> None:
    keys = flatten(runs[0].summary).keys()
    assert {measure.key for measure in (*SERVED, *REWARDED)} <= keys


def test_runs_are_grouped_by_router(runs: list[RunFolder]) -> None:
    assert {router: len(of) for router, of in by_router(runs).items()} == {"jsq:0.5": 2, "random": 1}


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
