"""What a reader must know before believing the numbers of some runs, in words."""

from collections.abc import Iterator, Sequence
from typing import Any

LAG_LIMIT_S = 0.005  # docs/measures.md: a later generator makes a live run invalid


def notes(summaries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One sentence per reservation that holds for any of the runs."""
    if any(run["mode"] == "simulated" for run in summaries):
        yield "Simulated: devices and network behave as their profiles say, not as measured here."
    if any("estimated" in run["energy_source"] for run in summaries):
        yield "Energy is estimated from the devices' profiles, not metered: it proves nothing."
    lags = [run["generator_lag_s"]["p99"] or 0.0 for run in summaries]
    late = sum(lag > LAG_LIMIT_S for lag in lags)
    if late:
        yield (
            f"Latencies of {late} of {count(len(lags), 'run')} are not valid: the load generator was over 5 ms late "
            f"(p99 up to {1000 * max(lags):.1f} ms). The machine was too busy."
        )
    stopped = sum(bool(run["interrupted"]) for run in summaries)
    if stopped:
        yield f"{stopped} of {count(len(lags), 'run')} was interrupted; the numbers are of what ran until then."
    fallbacks = sum(run["fallbacks"] for run in summaries)
    if fallbacks:
        yield f"A router's decision was replaced by the fallback {count(fallbacks, 'time')}."


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
