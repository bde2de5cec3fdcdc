import pytest

from slim_scheduler.setup.config import NetworkConfig
from slim_scheduler.sim.network import SimulatedNetwork

# 8 Mbit/s: 1,000 bytes take 1 ms.
PER_SERVER = NetworkConfig(latency_ms=5.0, mbps=8.0)
SHARED = NetworkConfig(latency_ms=5.0, mbps=1e6, shared_mbps=8.0)


def at(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-12)


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    net = SimulatedNetwork(PER_SERVER, ["a", "b"])
    assert net.to_server("a", 2_000, 1.0) == at(1.007)
    assert net.from_server("b", 0, 1.0) == at(1.005)


def test_messages_in_one_direction_wait_for_each_other_but_not_for_the_latency() -> None:
    net = SimulatedNetwork(PER_SERVER, ["a"])
    assert net.to_server("a", 2_000, 0.0) == at(0.007)
    assert net.to_server("a", 1_000, 0.001) == at(0.008)
    assert net.to_server("a", 1_000, 0.010) == at(0.016)


def test_directions_and_servers_do_not_disturb_each_other() -> None:
    net = SimulatedNetwork(PER_SERVER, ["a", "b"])
    net.to_server("a", 100_000, 0.0)
    assert net.from_server("a", 1_000, 0.0) == at(0.006)
    assert net.to_server("b", 1_000, 0.0) == at(0.006)


def test_an_activation_holds_the_link_up_from_its_home_and_down_to_the_server() -> None:
    net = SimulatedNetwork(PER_SERVER, ["a", "b"])
    assert net.between("a", "b", 8_000, 0.0) == at(0.013)
    assert net.from_server("a", 1_000, 0.0) == at(0.014)
    assert net.to_server("b", 1_000, 0.0) == at(0.014)
    assert net.to_server("a", 1_000, 0.0) == at(0.006)


def test_an_activation_waits_until_both_links_are_free() -> None:
    net = SimulatedNetwork(PER_SERVER, ["a", "b"])
    net.from_server("a", 2_000, 0.0)
    net.to_server("b", 3_000, 0.0)
    assert net.between("a", "b", 1_000, 0.0) == at(0.009)


def test_a_shared_medium_carries_one_message_at_a_time_whoever_sends() -> None:
    net = SimulatedNetwork(SHARED, ["a", "b"])
    assert net.to_server("a", 1_000, 0.0) == at(0.006)
    assert net.from_server("b", 1_000, 0.0) == at(0.007)
    assert net.between("a", "b", 4_000, 0.0) == at(0.011)
    assert net.to_server("b", 0, 0.0) == at(0.011)
