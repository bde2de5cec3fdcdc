import msgspec
import pytest

from slim_scheduler.core.errors import ProfileError
from slim_scheduler.core.profile import Curve, LatencyTable
from slim_scheduler.setup.profiles import read_profile, write_profile
from tests.core.test_baselines import profile


def test_a_curve_is_linear_between_its_points_and_flat_beyond():
    curve = Curve((0.0, 0.5, 1.0), (1.0, 2.0, 6.0))
    assert [curve(x) for x in (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 6.0]


def test_latency_is_linear_between_measured_batch_sizes_and_beyond():
    table = LatencyTable(profile(0.01), 16)
    assert [table.seconds(0, None, 1.0, n) for n in (1, 2, 8, 16)] == pytest.approx([0.01, 0.02, 0.08, 0.16])


def test_the_mean_counts_where_it_was_measured_and_so_does_how_far_batches_are_from_it():
    known = profile(0.01)
    assert LatencyTable(known, 4).variation(0, None, 1.0, 3) == 0.0
    rows = [
        msgspec.structs.replace(
            row, mean=tuple(2 * s for s in row.seconds), deviation=tuple(0.5 * s for s in row.seconds)
        )
        for row in known.latency_rows
    ]
    table = LatencyTable(msgspec.structs.replace(known, latency_rows=tuple(rows)), 4)
    assert table.seconds(0, None, 1.0, 3) == pytest.approx(0.06)
    assert table.variation(0, None, 1.0, 3) == pytest.approx(0.25)


def test_a_row_that_was_not_measured_is_named():
    with pytest.raises(ProfileError, match=r"no latency for segment 9, previous width 0.5, width 1.0, batch 4 \(limit"):
        LatencyTable(profile(0.01), 16).seconds(9, 0.5, 1.0, 4)


def test_a_profile_survives_its_file(tmp_path):
    write_profile(profile(0.01), tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile(0.01)


def test_a_missing_or_broken_profile_names_the_file(tmp_path):
    with pytest.raises(ProfileError, match=r"p.json does not exist; write one with `slim measure`"):
        read_profile(tmp_path / "p.json")
    (tmp_path / "p.json").write_text('{"device": 3}')
    with pytest.raises(ProfileError, match=r"p.json: "):
        read_profile(tmp_path / "p.json")


def test_the_best_utilization_is_where_rest_makes_up_for_itself():
    def best(*slowdown):
        return msgspec.structs.replace(profile(0.01), slowdown=Curve((0.0, 0.92, 1.0), slowdown)).best_utilization

    assert best(1.0, 1.04, 1.2) == 0.92
    assert best(1.0, 1.0, 1.05) == 1.0
    assert best(1.0, 1.0, 1.0) == 1.0, "a device that is not slowed by being busy need not rest"
