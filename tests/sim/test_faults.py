from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    Reply,
    ServerChanged,
    ServerReported,
    StartBatch,
    TasksReturned,
)
from slim_scheduler.core.types import Block, Outcome, Request, Task
from slim_scheduler.setup.config import Config, FaultConfig
from slim_scheduler.sim.faults import LATEST_DELIVERY, ActiveFaults, FaultChange, MessageFaults, random_faults, timeline
from slim_scheduler.sim.host import Simulation
from tests.sim.clusters import NOBODY, Journal, run_requests, small_cluster


def at(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-6)


def cluster(folder: Path, *faults: dict[str, Any], servers: int = 2, duration_s: float = 8.0) -> Config:
    return small_cluster(folder, [{}] * servers, faults=list(faults), workload={"duration_s": duration_s})


def answers(journal: Journal) -> dict[int, tuple[float, Reply]]:
    """By request; fails where one was answered twice."""
    replies: dict[int, tuple[float, Reply]] = {}
    for now, reply in journal.commands(Reply):
        assert reply.request_id not in replies
        replies[reply.request_id] = (now, reply)
    return replies


def test_faults_begin_and_end_in_the_order_of_time() -> None:
    slow = FaultConfig(server="a", at_s=1.0, kind="slow", duration_s=3.0)
    crash = FaultConfig(server="b", at_s=2.0, kind="crash")
    changes = [(change.at, change.begins, change.fault.kind) for change in timeline([crash, slow])]
    assert changes == [(1.0, True, "slow"), (2.0, True, "crash"), (4.0, False, "slow")]


def test_the_end_of_a_fault_does_not_end_another_of_its_kind() -> None:
    faults = ActiveFaults()
    long, short = [FaultConfig(server="a", at_s=0.0, kind="slow", factor=factor) for factor in (2.0, 5.0)]
    drops = [FaultConfig(server="a", at_s=0.0, kind="drop-messages", share=share) for share in (0.5, 0.1)]
    crashes = [FaultConfig(server="a", at_s=0.0, kind=kind) for kind in ("crash", "exit", "hang")]
    for fault in (long, *drops, *crashes, short):
        faults.change(FaultChange(0.0, True, fault))
    assert (faults.factor, faults.shares, faults.dead, faults.hung) == (5.0, {"drop-messages": 0.1}, True, True)
    for fault in (short, drops[1], crashes[0]):
        faults.change(FaultChange(1.0, False, fault))
    assert (faults.factor, faults.shares, faults.dead, faults.hung) == (2.0, {"drop-messages": 0.5}, True, True)
    faults.change(FaultChange(1.0, False, crashes[1]))
    assert (faults.dead, faults.hung) == (False, True)
    faults.change(FaultChange(2.0, True, FaultConfig(server="a", at_s=2.0, kind="recover")))
    assert (faults.factor, faults.shares, faults.dead, faults.hung) == (1.0, {}, False, False)


def test_a_server_that_crashes_while_it_hangs_hangs_on_when_it_is_back(tmp_path: Path) -> None:
    faults = [
        {"server": "a", "at_s": 1.1, "kind": "hang", "duration_s": 3.0},
        {"server": "a", "at_s": 1.2, "kind": "crash", "duration_s": 1.0},
    ]
    config = small_cluster(tmp_path, [{}, {}], faults=faults, workload={"duration_s": 8.0})
    journal = run_requests(config, [Request(0, (0,), 1.0)], "round-robin:0.5")
    reports = [c.report for _, c in journal.commands(ServerReported) if c.report.server == "a"]
    assert not [r.made_at for r in reports if 1.1 < r.made_at < 4.1]
    assert {r.incarnation for r in reports if r.made_at >= 4.1} == {1}


def test_messages_are_lost_doubled_and_late_at_their_shares() -> None:
    faults = MessageFaults(default_rng(0))
    assert faults.deliveries(5.0) == [5.0]
    faults.shares = {"drop-messages": 0.3}
    arrived = [faults.deliveries(5.0) for _ in range(2000)]
    assert sum(not copies for copies in arrived) == pytest.approx(600, abs=60)
    faults.shares = {"duplicate-messages": 1.0}
    assert all(5.0 == first <= second <= 5.0 + LATEST_DELIVERY for first, second in [faults.deliveries(5.0)])
    faults.shares = {"delay-messages": 1.0}
    (late,) = faults.deliveries(5.0)
    assert 5.0 < late < 5.0 + LATEST_DELIVERY


def test_random_faults_are_over_by_the_end() -> None:
    for seed in range(50):
        for fault in random_faults(default_rng(seed), ["a", "b"], 10.0):
            assert fault.duration_s is not None
            assert 0 <= fault.at_s < fault.at_s + fault.duration_s <= 10.0


def test_work_of_a_crashed_server_runs_elsewhere_within_a_second(tmp_path: Path) -> None:
    # Round-robin sends the item to a; a dies while it loads the instance.
    config = cluster(tmp_path, {"server": "a", "at_s": 1.1, "kind": "crash"})
    journal = run_requests(config, [Request(0, (0,), 1.0)], "round-robin:0.5")
    ((when, reply),) = answers(journal).values()
    assert reply.outcome is Outcome.ANSWERED
    assert reply.items[0].servers == ("b", "b")
    # Last heard at 1.1, when it was still alive or at 1.0; silent for 0.8 s; then 420 ms on b.
    assert when <= 1.1 + 0.8 + 0.420 + 1e-6


def test_an_exit_is_told_by_its_connection_and_late_telemetry_does_not_revive_it(tmp_path: Path) -> None:
    exits = {"server": "a", "at_s": 1.1, "kind": "exit", "duration_s": 2.0}
    config = small_cluster(tmp_path, [{}, {}], faults=[exits], telemetry={"age_s": 0.5}, workload={"duration_s": 8.0})
    journal = run_requests(config, [Request(0, (0,), 1.0)], "round-robin:0.5")
    ((when, reply),) = answers(journal).values()
    assert reply.items[0].servers == ("b", "b")
    assert when == at(1.1 + 0.420)
    changes = [(now, c.up) for now, c in journal.commands(ServerChanged) if c.server == "a"]
    assert changes == [(at(1.1), False), (at(3.1 + 0.5), True)]


def test_an_activation_dies_with_its_server_and_the_item_starts_again(tmp_path: Path) -> None:
    # Segment 0 is done at 1.205; the server dies while it loads segment 1, and comes back empty.
    config = cluster(tmp_path, {"server": "a", "at_s": 1.3, "kind": "crash", "duration_s": 0.05}, servers=1)
    journal = run_requests(config, [Request(0, (0,), 1.0)])
    ((_, reply),) = answers(journal).values()
    assert reply.outcome is Outcome.ANSWERED
    assert reply.items[0].widths == (0.5, 0.5)
    assert [command.batch.segment for _, command in journal.commands(StartBatch)] == [0, 0, 1]


def test_a_crashed_server_says_nothing_until_it_is_back_as_another_incarnation(tmp_path: Path) -> None:
    config = cluster(tmp_path, {"server": "a", "at_s": 1.05, "kind": "crash", "duration_s": 2.0})
    journal = run_requests(config, [Request(0, (0,), 1.0)])
    reports = [
        (c.report.made_at, c.report.incarnation) for _, c in journal.commands(ServerReported) if c.report.server == "a"
    ]
    assert max(made_at for made_at, incarnation in reports if incarnation == 0) == at(1.0)
    assert min(made_at for made_at, incarnation in reports if incarnation == 1) == at(3.1)
    changes = [(now, c.up) for now, c in journal.commands(ServerChanged) if c.server == "a"]
    assert changes == [(at(1.8), False), (at(3.1), True)]


def test_what_a_crashed_server_was_waiting_for_does_not_reach_its_next_life(tmp_path: Path) -> None:
    # The instance asked for at 1.0 would be ready at 1.2, when a is already back without it.
    config = cluster(tmp_path, {"server": "a", "at_s": 1.05, "kind": "crash", "duration_s": 0.05}, servers=1)
    journal = run_requests(config, [Request(0, (0,), 1.0)])
    ((_, reply),) = answers(journal).values()
    assert reply.outcome is Outcome.ANSWERED


def test_a_hung_server_answers_late_and_the_answer_is_dropped(tmp_path: Path) -> None:
    config = cluster(tmp_path, {"server": "a", "at_s": 1.202, "kind": "hang", "duration_s": 3.0})
    journal = run_requests(config, [Request(0, (0,), 1.0)], "round-robin:0.5")
    ((when, reply),) = answers(journal).values()
    assert reply.outcome is Outcome.ANSWERED
    assert reply.items[0].servers == ("b", "b")
    assert when < 3.0
    late = [now for now, event in journal.events("dispatcher", BatchReported) if event.server == "a"]
    assert late == [at(1.205 + 3.0)]


def test_messages_to_a_hung_server_wait_for_it(tmp_path: Path) -> None:
    config = cluster(tmp_path, {"server": "a", "at_s": 0.95, "kind": "hang", "duration_s": 0.5}, servers=1)
    journal = run_requests(config, [Request(0, (0,), 1.0)])
    assert next(now for now, _ in journal.events("a", BlockArrived)) == at(1.45)
    assert [now for now, _ in answers(journal).values()] == [at(1.45 + 0.420)]


def test_a_slow_server_takes_its_factor_until_it_recovers(tmp_path: Path) -> None:
    slow = {"server": "a", "at_s": 1.9, "kind": "slow", "factor": 10.0}
    recover = {"server": "a", "at_s": 2.9, "kind": "recover"}
    requests = [Request(i, (i,), 1.0 + i) for i in range(3)]
    journal = run_requests(cluster(tmp_path, slow, recover, servers=1), requests)
    assert [when for when, _ in answers(journal).values()] == [at(1.420), at(2.100), at(3.010)]


def test_a_block_that_was_lost_on_the_way_is_sent_again(tmp_path: Path) -> None:
    lossy = {"server": "a", "at_s": 0.99, "kind": "drop-messages", "share": 1.0, "duration_s": 0.02}
    journal = run_requests(cluster(tmp_path, lossy, servers=1), [Request(0, (0,), 1.0)])
    ((when, reply),) = answers(journal).values()
    assert reply.outcome is Outcome.ANSWERED
    assert 3.0 < when < 7.0


def test_a_doubled_block_runs_once_and_a_doubled_result_counts_once(tmp_path: Path) -> None:
    twice = {"server": "a", "at_s": 0.0, "kind": "duplicate-messages", "share": 1.0}
    journal = run_requests(cluster(tmp_path, twice, servers=1), [Request(0, (0,), 1.0)])
    assert len(list(journal.events("a", BlockArrived))) > 2
    assert len(list(journal.commands(StartBatch))) == 2
    assert len(list(journal.events("dispatcher", BatchReported))) == 4
    assert len(answers(journal)) == 1


def test_an_activation_that_was_lost_on_the_way_sends_its_item_back_to_the_start(tmp_path: Path) -> None:
    # a finishes segment 0 at 1.205; the block for b is 5 ms on its way when a crashes and is back at once.
    crash = {"server": "a", "at_s": 1.212, "kind": "crash", "duration_s": 0.002}
    config = small_cluster(
        tmp_path, [{}, {}], faults=[crash], network={"latency_ms": 5.0}, workload={"duration_s": 8.0}
    )
    journal = run_requests(config, [Request(0, (0,), 0.995)], "round-robin:0.5")
    returned = [event for _, event in journal.events("dispatcher", TasksReturned)]
    assert (returned[0].server, returned[0].activation_lost) == ("b", True)
    ((when, reply),) = answers(journal).values()
    assert reply.outcome is Outcome.ANSWERED
    assert len(reply.items[0].servers) == 2
    assert when < 2.5


def test_an_output_that_died_is_not_found_because_a_later_one_lies_there(tmp_path: Path) -> None:
    """Item 7 ran segment 0 at b, which crashed; in its next life segment 1 ran there."""
    config = cluster(tmp_path, {"server": "b", "at_s": 1.0, "kind": "crash"})
    simulation = Simulation(config, "jsq:0.5", 0, recorder=Journal(), arrivals=NOBODY)
    simulation.servers["b"].activations = {(7, 1)}
    task = Task(1, 7, 1, 0.5, "b", 0.0, None, 0)
    for segment, lost in ((1, True), (2, False)):
        block = Block(segment, "b", segment, 0.5, 0.5, False, (task,), 0.0)
        left = simulation._without_lost_activations(simulation.servers["b"], block)
        assert (not left.tasks) == lost


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"factor": 0.0}, r"faults\.0\.factor is 0; it must be above 0"),
        ({"share": 1.5}, r"faults\.0\.share is 1\.5; it must be from 0 to 1"),
        ({"duration_s": 0.0}, r"faults\.0\.duration_s is 0; it must be above 0"),
        ({"server": "z"}, "server z is not configured"),
    ],
)
def test_impossible_faults_are_configuration_errors(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(tmp_path, {"server": "a", "at_s": 1.0, "kind": "slow", **wrong})
