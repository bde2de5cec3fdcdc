"""Reservations are said in words, and only where they hold."""

from typing import Any

from slim_scheduler.report.notes import notes


def run(**changes: Any) -> dict[str, Any]:
    usual = {"mode": "live", "energy_source": "counter", "generator_lag_s": {"p99": 0.001}, "interrupted": False}
    return {**usual, "fallbacks": 0, **changes}


def test_a_clean_live_run_needs_no_words() -> None:
    assert list(notes([run()])) == []


def test_a_late_generator_makes_latencies_invalid() -> None:
    (said,) = notes([run(), run(generator_lag_s={"p99": 0.0123})])
    assert "Latencies of 1 of 2 runs are not valid" in said
    assert "12.3 ms" in said


def test_what_nobody_measured_is_no_lateness() -> None:
    assert list(notes([run(generator_lag_s={"p99": None})])) == []


def test_simulated_estimated_interrupted_and_replaced_are_all_said() -> None:
    said = " ".join(notes([run(mode="simulated", energy_source="estimated", interrupted=True, fallbacks=2)]))
    for word in ("Simulated", "estimated", "interrupted", "fallback 2 times"):
        assert word in said
