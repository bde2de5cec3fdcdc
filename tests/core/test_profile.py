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


def short(known):
    return tuple(msgspec.structs.replace(row, seconds=row.seconds[:1]) for row in known.latency_rows)


def rows(**changes):
    return lambda known: tuple(msgspec.structs.replace(row, **changes) for row in known.latency_rows)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batches", (), r"batches are \[\]; they must be at least one, ascending, from 1 on"),
        ("batches", (8, 1), r"batches are \[8, 1\]"),
        ("batches", (0, 1), r"batches are \[0, 1\]"),
        ("batches", (8, 8), r"batches are \[8, 8\]"),
        ("latency_rows", (), "there are no latency rows; `slim measure` writes them"),
        ("latency_rows", short, "row of segment 0, widths None and 0.25 has 1 seconds; there are 2 batch sizes"),
        ("latency_rows", rows(seconds=(1.0,) * 3), "has 3 seconds; there are 2 batch sizes"),
        ("latency_rows", rows(mean=(1.0,)), "has 1 mean; there are 2 batch sizes"),
        ("latency_rows", rows(seconds=(0.0, 0.0)), r"has seconds \[0.0, 0.0\]; each must be finite and above 0"),
        ("latency_rows", rows(seconds=(0.1, -1.0)), r"has seconds \[0.1, -1.0\]; each must be finite and above 0"),
        ("latency_rows", rows(mean=(0.0, 0.1)), r"has mean \[0.0, 0.1\]; each must be finite and above 0"),
        ("latency_rows", rows(spread=(0.1, -1.0)), r"has spread \[0.1, -1.0\]; each must be finite and 0 or more"),
        ("power", Curve((), ()), r"power needs as many y as x, and x ascending; x is \[\], y is \[\]"),
        ("power", Curve((0.0, 1.0), (9.0,)), r"power needs .* x is \[0.0, 1.0\], y is \[9.0\]"),
        ("power", Curve((1.0, 0.0), (9.0, 9.0)), "power needs as many y as x, and x ascending"),
        ("power", Curve((0.0,), (-1.0,)), r"power has .* y \[-1.0\]; y must be finite and 0 or more"),
        ("slowdown", Curve((0.0, 0.5, 1.0), (1.0, 2.0)), "slowdown needs as many y as x"),
        ("slowdown", Curve((0.0, 1.0), (1.0, 0.0)), r"slowdown has .* y \[1.0, 0.0\]; y must be finite and above 0"),
        ("sharing", (), r"sharing is \[\]; it must have one value at least, all above 0"),
        ("sharing", (1.0, 0.0), r"sharing is \[1.0, 0.0\]"),
        ("load_bytes_per_s", 0.0, "load_bytes_per_s is 0 and load_s 1; the first must be above 0"),
        ("load_s", -1.0, "load_bytes_per_s is 1e[+]12 and load_s -1; .* the second finite and 0 or more"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_with_its_path(tmp_path, name, value, said):
    known = profile(0.01)
    bad = value(known) if name == "latency_rows" and callable(value) else value
    write_profile(msgspec.structs.replace(known, **{name: bad}), tmp_path / "p.json")
    with pytest.raises(ProfileError, match=rf"^profile {tmp_path}/p\.json: .*{said}") as caught:
        read_profile(tmp_path / "p.json")
    assert "\n" not in str(caught.value)


def test_a_profile_may_have_no_spread_and_take_no_power(tmp_path):
    known = profile(0.01)
    rows = tuple(msgspec.structs.replace(row, spread=(0.0, 0.0), deviation=(0.0, 0.0)) for row in known.latency_rows)
    known = msgspec.structs.replace(known, latency_rows=rows, power=Curve((0.0,), (0.0,)), load_s=0.0)
    write_profile(known, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == known


def test_the_best_utilization_is_where_rest_makes_up_for_itself():
    def best(*slowdown):
        return msgspec.structs.replace(profile(0.01), slowdown=Curve((0.0, 0.92, 1.0), slowdown)).best_utilization

    assert best(1.0, 1.04, 1.2) == 0.92
    assert best(1.0, 1.0, 1.05) == 1.0
    assert best(1.0, 1.0, 1.0) == 1.0, "a device that is not slowed by being busy need not rest"
