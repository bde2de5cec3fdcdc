from pathlib import Path

import pytest

from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    Reply,
    ServerReported,
    StartBatch,
)
from slim_scheduler.core.types import Outcome, Request
from slim_scheduler.sim.host import Simulation, simulate
from tests.sim.clusters import NOBODY, Journal, run_requests, small_cluster
from tests.sim.devices import small_profile


def at(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-6)


def test_one_item_takes_its_loads_builds_and_batches(tmp_path: Path) -> None:
    journal = run_requests(small_cluster(tmp_path), [Request(0, (0,), 1.0)])
    # Segment 0: load 200 ms, run 5 ms. Segment 1: load 200 ms, build first layers 10 ms, run 5 ms.
    ((when, reply),) = journal.commands(Reply)
    assert when == at(1.420)
    assert reply.outcome is Outcome.ANSWERED
    assert reply.items[0].widths == (0.5, 0.5)
    assert reply.items[0].compute_s == at(0.020)


def test_the_second_item_finds_everything_loaded(tmp_path: Path) -> None:
    journal = run_requests(small_cluster(tmp_path), [Request(0, (0,), 1.0), Request(1, (1,), 2.0)])
    assert [when for when, _ in journal.commands(Reply)] == [at(1.420), at(2.010)]


def test_an_unloaded_instance_comes_back_in_exactly_the_time_of_its_profile(tmp_path: Path) -> None:
    requests = [Request(0, (0,), 1.0), Request(1, (1,), 2.5)]
    journal = run_requests(small_cluster(tmp_path, [{"idle_unload_s": 0.5}]), requests)
    assert len(list(journal.events("a", InstanceUnloaded))) == 2, "both segments, before the second request"
    assert [when for when, _ in journal.commands(Reply)] == [at(1.420), at(2.920)]
    asked = {load.instance: now for now, load in journal.commands(LoadInstance)}
    took = [now - asked[ready.instance] for now, ready in journal.events("a", InstanceReady)]
    assert took == [at(small_profile().load_time(100_000))] * 4


def test_messages_take_the_latency_four_times_and_their_bytes(tmp_path: Path) -> None:
    slow = {"latency_ms": 5.0, "mbps": 8.0}
    config = small_cluster(tmp_path, network=slow, telemetry={"period_s": 0.4})
    journal = run_requests(config, [Request(0, (0,), 1.0), Request(1, (1,), 2.1)])
    # 8 Mbit/s are 1 KB per ms. Block of one: 240 bytes and an input of 1,000; report: 240; with 10 logits, 280.
    ((_, _first), (when, _)) = journal.commands(Reply)
    down, up = (0.00124 + 0.00024), (0.00024 + 0.00028)
    assert when == at(2.1 + 4 * 0.005 + down + up + 0.010)


def test_an_activation_that_moves_costs_its_bytes_and_one_that_stays_costs_nothing(tmp_path: Path) -> None:
    def arrivals_of_second_segment(activations: bool) -> list[tuple[str, float]]:
        network = {"mbps": 8.0, "activations": activations}
        config = small_cluster(tmp_path, [{}, {}], network=network)
        # Round-robin sends segment 0 to a and segment 1 to b, whose first report came with an idle link.
        journal = run_requests(config, [Request(0, (0,), 1.005)], "round-robin:0.5")
        sent = next(now for now, _ in journal.events("dispatcher", BatchReported))
        return [now - sent for now, _ in journal.events("b", BlockArrived)]

    # Without: 240 bytes of control. With: the 4,000 bytes of the activation come behind it on b's link.
    assert arrivals_of_second_segment(False) == [at(0.00024)]
    assert arrivals_of_second_segment(True) == [at(0.00424)]


def test_telemetry_comes_every_period_and_arrives_at_its_age(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, telemetry={"period_s": 0.25, "age_s": 0.6}, workload={"duration_s": 1.2})
    journal = run_requests(config, [])
    heard = [(now, event.report.made_at) for now, event in journal.events("dispatcher", ServerReported)]
    assert heard == [(at(0.6), 0.0), (at(0.85), 0.25), (at(1.1), 0.5)]


def test_batches_gather_what_waits_while_the_device_is_busy(tmp_path: Path) -> None:
    requests = [Request(i, (i,), 1.0 + 0.001 * i) for i in range(8)]
    journal = run_requests(small_cluster(tmp_path), requests)
    sizes = [len(command.batch.tasks) for _, command in journal.commands(StartBatch) if command.batch.segment == 0]
    assert sizes == [8]


@pytest.mark.parametrize(
    ("dispatch", "network", "order"),
    [
        ({"reentry": "oldest-item"}, {}, [0, 1, 0, 1]),  # the older items are back before a younger batch starts
        ({"reentry": "oldest-item"}, {"latency_ms": 1.0}, [0, 0, 1, 1]),  # too far away to wait for
        ({"reentry": "back"}, {}, [0, 0, 1, 1]),
    ],
)
def test_the_oldest_items_go_all_the_way_before_younger_ones(
    tmp_path: Path, dispatch: dict[str, str], network: dict[str, float], order: list[int]
) -> None:
    requests = [Request(0, (0,), 0.1), Request(1, tuple(range(1, 9)), 1.0), Request(2, tuple(range(9, 17)), 1.001)]
    config = small_cluster(tmp_path, dispatch=dispatch, network=network)
    journal = run_requests(config, requests)
    batches = [c.batch for now, c in journal.commands(StartBatch) if now > 0.9]
    assert [batch.segment for batch in batches] == order


def test_a_run_that_drains_ends_when_all_is_answered_but_not_before_its_duration(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, workload={"rate": 400.0, "duration_s": 1.0})
    result = simulate(config, "jsq:0.5", 0, recorder=Journal())
    assert 1.0 < result.ended_s < 2.0
    assert result.counts["items"]["in_flight"] == 0
    assert result.counts["items"]["answered"] == result.arrivals.items
    assert result.tasks == 2 * result.arrivals.items
    idle = simulate(config, "jsq:0.5", 0, recorder=Journal(), arrivals=NOBODY)
    assert idle.ended_s == 1.0


def test_an_overloaded_run_ends_at_twice_its_duration_with_the_rest_in_flight(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, workload={"rate": 4000.0, "duration_s": 0.5})
    counts = (result := simulate(config, "jsq:1", 0, recorder=Journal())).counts["items"]
    assert result.ended_s == 1.0
    assert counts["in_flight"] > 0
    assert counts["received"] == sum(count for name, count in counts.items() if name != "received")


def test_a_run_that_is_cut_ends_at_its_duration(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, workload={"rate": 4000.0, "duration_s": 0.5, "end": "cut"})
    result = simulate(config, "jsq:1", 0, recorder=Journal())
    assert result.ended_s == 0.5
    assert result.counts["items"]["in_flight"] > 0


def test_deadlines_and_items_per_request_come_from_the_workload(tmp_path: Path) -> None:
    load = {"rate": 4000.0, "duration_s": 0.5, "deadline_ms": 300.0, "items_per_request": 4}
    journal = Journal()
    result = simulate(small_cluster(tmp_path, workload=load), "jsq:1", 0, recorder=journal)
    replies = list(journal.commands(Reply))
    assert len(replies) == len(result.arrivals.times)
    assert all(len(reply.items) == 4 for _, reply in replies)
    assert result.counts["items"]["expired"] > 0
    for when, reply in replies:
        assert when <= result.arrivals.times[reply.request_id] + 0.3 + 1e-9


def test_the_last_report_reaches_the_end_of_the_run_with_all_its_energy(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, [{}, {"slowdown": 2.0}], workload={"rate": 200.0, "duration_s": 1.03})
    journal = Journal()
    result = simulate(config, "jsq:0.5", 0, recorder=journal)
    last = {command.report.server: (now, command.report.energy_j) for now, command in journal.commands(ServerReported)}
    assert last == {name: (result.ended_s, joules) for name, joules in result.energy_j.items()}
    assert 100 * result.ended_s < result.energy_j["a"] < 200 * result.ended_s


def test_the_energy_of_an_item_is_its_share_of_its_batches(tmp_path: Path) -> None:
    journal = run_requests(small_cluster(tmp_path), [Request(0, (0, 1), 1.0)])
    ((_, reply),) = journal.commands(Reply)
    batches = [event.energy_j for _, event in journal.events("dispatcher", BatchReported)]
    assert sum(item.energy_j for item in reply.items) == pytest.approx(sum(batches))


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    told: list[float] = []
    config = small_cluster(tmp_path, workload={"rate": 3000.0, "duration_s": 1.0})
    simulate(config, "jsq:0.5", 0, recorder=Journal(), progress=told.append)
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_each_step_is_one_event(tmp_path: Path) -> None:
    journal = Journal()
    simulation = Simulation(small_cluster(tmp_path), "jsq:0.5", 0, recorder=journal, arrivals=NOBODY)
    simulation.submit(Request(0, (0,), 1.0))
    while not simulation.done:
        before = len(journal.steps)
        simulation.step()
        assert len(journal.steps) - before <= 1 or simulation.done
