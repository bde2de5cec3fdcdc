"""A load in multiples of what the cluster carries becomes items per second."""

from pathlib import Path

import pytest

from slim_scheduler.setup.machines import carried_by_width, in_items_per_second
from tests.sim.clusters import small_cluster
from tests.sim.devices import SEGMENTS

FULL_BATCH = 8  # takes 12 ms at width 0.5 and 24 ms at width 1, per segment


def test_what_a_cluster_carries_is_the_sum_of_its_servers_full_batches(tmp_path: Path) -> None:
    carried = carried_by_width(small_cluster(tmp_path, [{}, {"slowdown": 2.0}]))
    assert carried == pytest.approx(
        {0.5: 1.5 * FULL_BATCH / (SEGMENTS * 0.012), 1.0: 1.5 * FULL_BATCH / (SEGMENTS * 0.024)}
    )


def test_a_rate_in_multiples_of_the_narrowest_width_follows_the_servers(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, [{"slowdown": 4.0}], workload={"rate": 0.5, "rate_unit": "narrowest"})
    workload = in_items_per_second(config).workload
    assert workload.rate == pytest.approx(0.5 * FULL_BATCH / (SEGMENTS * 0.012 * 4.0))
    assert workload.rate_unit == "items/s"


def test_a_rate_in_items_per_second_stays(tmp_path: Path) -> None:
    config = small_cluster(tmp_path, workload={"rate": 50.0})
    assert in_items_per_second(config) is config
