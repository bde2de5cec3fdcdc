"""Reservations are said in words, and only where they hold."""

from typing import Any

from slim_scheduler.report.notes import notes, router_title


def run(**changes: Any) -> dict[str, Any]:
    usual = {"mode": "live", "energy_source": "counter", "generator_lag_s": {"p99": 0.001}, "interrupted": False}
    decided = {"router": "jsq:1", "decisions": 10, "fallbacks": 0, "fallback_reason": None}
    return {**usual, **decided, **changes}


def test_a_clean_live_run_needs_no_words() -> None:
    assert list(notes([run()])) == []


def test_a_late_generator_makes_latencies_invalid() -> None:
    (said,) = notes([run(), run(generator_lag_s={"p99": 0.0123})])
    assert "Latencies of 1 of 2 runs are not valid" in said
    assert "12.3 ms" in said


def test_accuracy_without_labels_is_called_agreement() -> None:
    (said,) = notes([run(agreement=""), run(agreement="agreement with lite2 on val")])
    assert said == "Accuracy is agreement with lite2 on val: the images have no labels."


def test_what_nobody_measured_is_no_lateness() -> None:
    assert list(notes([run(generator_lag_s={"p99": None})])) == []


def test_simulated_estimated_interrupted_and_replaced_are_all_said() -> None:
    replaced = run(interrupted=True, fallbacks=2, fallback_reason="ZeroDivisionError: division by zero")
    said = " ".join(notes([replaced | {"mode": "simulated", "energy_source": "estimated"}, run(router="other")]))
    for word in ("Simulated", "estimated", "interrupted"):
        assert word in said
    assert "jsq:1: 2 of 10 decisions (20.0 %) were the fallback's" in said.replace("20.0%", "20.0 %")
    assert "first: ZeroDivisionError: division by zero" in said
    assert "other:" not in said


def test_a_row_is_marked_from_one_percent_of_fallbacks_on() -> None:
    assert router_title("mine", [run(decisions=1000, fallbacks=10)]) == "mine"
    assert router_title("mine", [run(decisions=1000, fallbacks=11)]) == "mine (1% the fallback's)"
    assert router_title("mine", [run(decisions=0)]) == "mine"
