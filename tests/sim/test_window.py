"""The batch window in simulated runs: fuller batches under load, and nobody waits for what cannot come."""

from pathlib import Path

import pytest

from slim_scheduler.core.messages import Reply, StartBatch
from slim_scheduler.core.types import Outcome, Request
from slim_scheduler.sim.host import simulate
from tests.sim.clusters import Journal, run_requests, small_cluster

WINDOWS = (0.0, 50.0, "auto")


def cluster(folder: Path, window: float | str, **sections):
    return small_cluster(folder, [{"batch_window_ms": window}, {"batch_window_ms": window}], **sections)


def answered(journal: Journal) -> dict[int, float]:
    replies = list(journal.commands(Reply))
    assert {reply.outcome for _, reply in replies} == {Outcome.ANSWERED}
    return {reply.request_id: now for now, reply in replies}


def test_lone_requests_on_an_idle_fleet_do_not_wait(tmp_path: Path) -> None:
    requests = [Request(i, (i,), 1.0 + i) for i in range(2)] + [Request(2, (2, 3, 4), 3.0)]
    greedy, fixed, automatic = [answered(run_requests(cluster(tmp_path, window), requests)) for window in WINDOWS]
    assert greedy == fixed == automatic


def test_over_a_slow_link_two_requests_wait_a_window_per_segment_at_most(tmp_path: Path) -> None:
    requests = [Request(1, (1,), 1.0), Request(2, (2,), 1.02)]
    slow = {"network": {"latency_ms": 100.0}, "workload": {"duration_s": 6.0}}
    greedy, fixed, automatic = [
        answered(run_requests(cluster(tmp_path, window, **slow), requests, "cost-model:0.5")) for window in WINDOWS
    ]
    assert all(automatic[i] == greedy[i] for i in greedy), "so few tasks are not worth waiting for"
    assert all(fixed[i] <= greedy[i] + 4 * 0.05 + 1e-9 for i in greedy)


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_under_load_batches_are_fewer_and_everything_is_answered(tmp_path: Path, window: float | str) -> None:
    load = {"workload": {"rate": 150.0, "duration_s": 3.0}}
    batches, answers = [], []
    for asked in (0.0, window):
        journal = Journal()
        result = simulate(cluster(tmp_path, asked, **load), "cost-model:0.5", 3, recorder=journal)
        batches.append(sum(1 for _ in journal.commands(StartBatch)))
        answers.append(len(answered(journal)))
    assert answers[0] == answers[1] == len(result.arrivals.times)
    assert batches[1] < 0.8 * batches[0]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("link_ms", "deadline_ms"), [(0.0, 200.0), (10.0, 100.0)])
def test_a_window_costs_no_deadline(tmp_path: Path, window: float | str, link_ms: float, deadline_ms: float) -> None:
    """Half a second of it would let every deadline pass, if slack did not end the wait."""
    load = {
        "workload": {"rate": 60.0, "duration_s": 3.0, "deadline_ms": deadline_ms},
        "network": {"latency_ms": link_ms},
    }
    journal = Journal()
    result = simulate(
        cluster(tmp_path, 500.0 if window == 50.0 else window, **load), "cost-model:0.5", 3, recorder=journal
    )
    missed = [r.request_id for _, r in journal.commands(Reply) if r.outcome is not Outcome.ANSWERED]
    warm = [i for i in missed if result.arrivals.times[i] > 0.5]
    assert not warm, f"{len(warm)} of {len(result.arrivals.times)} were late when all instances were loaded"
