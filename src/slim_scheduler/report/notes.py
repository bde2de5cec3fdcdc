"""What a reader must know before believing the numbers of some runs, in words."""

from collections.abc import Iterator, Sequence
from typing import Any

from slim_scheduler.core.errors import RouterError

FALLBACK_LIMIT = 0.01  # from which share of replaced decisions on a row is marked
LAG_LIMIT_S = 0.005  # docs/measures.md: a later generator makes a live run invalid
INVALID = "†"  # beside a router's name, in every table and picture


def is_valid(summary: dict[str, Any]) -> bool:
    """Whether a run's latencies mean anything: its load generator was in time."""
    return (summary["generator_lag_s"]["p99"] or 0.0) <= LAG_LIMIT_S


def is_metered(summaries: Sequence[dict[str, Any]]) -> bool:
    """Whether the energy of all runs was measured: what is estimated or unknown proves nothing."""
    return not any(word in run["energy_source"] for run in summaries for word in ("estimated", "none"))


def notes(summaries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One sentence per reservation that holds for any of the runs."""
    if any(run["mode"] == "simulated" for run in summaries):
        yield "Simulated: devices and network behave as their profiles say, not as measured here."
    if any("estimated" in run["energy_source"] for run in summaries):
        yield "Energy is estimated from the devices' profiles, not metered: it proves nothing."
    for agreement in dict.fromkeys(run.get("agreement") for run in summaries):
        if agreement:
            yield f"Accuracy is {agreement}: the images have no labels."
    lags = [run["generator_lag_s"]["p99"] or 0.0 for run in summaries]
    late = sum(not is_valid(run) for run in summaries)
    if late:
        yield (
            f"{INVALID} Latencies of {late} of {count(len(lags), 'run')} are not valid: the load generator was over "
            f"5 ms late (p99 up to {1000 * max(lags):.1f} ms). The machine was too busy."
        )
    stopped = sum(bool(run["interrupted"]) for run in summaries)
    if stopped:
        yield f"{stopped} of {count(len(lags), 'run')} was interrupted; the numbers are of what ran until then."
    for router in dict.fromkeys(run["router"] for run in summaries):
        of_router = [run for run in summaries if run["router"] == router]
        reason = next((run["fallback_reason"] for run in of_router if run["fallback_reason"]), None)
        if reason is not None:
            fallbacks, decisions = (sum(run[key] for run in of_router) for key in ("fallbacks", "decisions"))
            yield (
                f"{router}: {fallbacks:,} of {count(decisions, 'decision')} ({_share(of_router):.1%}) were the "
                f"fallback's, because the router gave none; first: {reason}."
            )


def router_title(router: str, summaries: Sequence[dict[str, Any]]) -> str:
    """A router's name in tables and pictures, with a mark where the fallback made more than 1 % of its decisions, and
    one where a run is not valid.
    """
    share = _share(summaries)
    title = f"{router} ({share:.0%} the fallback's)" if share > FALLBACK_LIMIT else router
    return title if all(map(is_valid, summaries)) else f"{title} {INVALID}"


def refuse_raising(summary: dict[str, Any]) -> None:
    """Raises RouterError where a router raised instead of deciding: the run measures the fallback, not the router."""
    if summary["router_raised"]:
        raise RouterError(
            f"router {summary['router']} raised {count(summary['router_raised'], 'time')} (seed {summary['seed']}); "
            f"first: {summary['fallback_reason']}; mend it (`slim simulate`, `slim bench` and `slim compare` take what "
            "the fallback decided with --allow-fallback)"
        )


def _share(summaries: Sequence[dict[str, Any]]) -> float:
    decisions = sum(run["decisions"] for run in summaries)
    fallbacks: int = sum(run["fallbacks"] for run in summaries)
    return fallbacks / decisions if decisions else 0.0


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
