import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from slim_scheduler.core.errors import ConfigError, TraceError
from slim_scheduler.setup.config import WorkloadConfig
from slim_scheduler.setup.workload import generate, read_trace

KINDS = {
    "poisson": WorkloadConfig(kind="poisson", rate=50.0, duration_s=2000.0),
    "bursty": WorkloadConfig(kind="bursty", rate=50.0, duration_s=2000.0, burst_factor=6.0),
    "diurnal": WorkloadConfig(kind="diurnal", rate=50.0, duration_s=2000.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("items_per_request", [1, 5])
def test_rate_is_the_mean_of_items_per_second(kind: str, items_per_request: int) -> None:
    workload = replace(KINDS[kind], items_per_request=items_per_request)
    rates = [generate(workload, seed, 100).items / workload.duration_s for seed in range(8)]
    # 8 runs of 100,000 items: Poisson alone has a standard error of 0.06 items/s; bursts raise it to 0.9.
    assert np.mean(rates) == pytest.approx(50.0, abs=2.0 if kind == "bursty" else 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_arrivals_ascend_within_the_run_and_number_items_without_gaps(kind: str) -> None:
    arrivals = generate(KINDS[kind], 3, 7)
    assert np.all(np.diff(arrivals.times) >= 0)
    assert arrivals.times[0] >= 0
    assert arrivals.times[-1] < 2000.0
    assert arrivals.first_item.tolist() == np.concatenate([[0], np.cumsum(arrivals.sizes)[:-1]]).tolist()
    assert arrivals.items == arrivals.sizes.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_arrivals_and_another_seed_others(kind: str) -> None:
    one, again, other = (generate(KINDS[kind], seed, 40) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one.times[:100], other.times[:100])


def test_every_sample_is_shown_once_before_any_is_shown_twice() -> None:
    samples = generate(WorkloadConfig(rate=100.0, duration_s=1.0), 0, 10).samples
    assert sorted(samples[:10].tolist()) == list(range(10))
    assert samples[:10].tolist() != samples[10:20].tolist()


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times = generate(KINDS["poisson"], 1, 1).times
    counts = np.histogram(times, bins=2000, range=(0, 2000))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


def test_bursts_are_as_much_faster_as_burst_factor_says() -> None:
    # Long stays make the state visible in one-second counts: calm 20, burst 120 items per second.
    workload = WorkloadConfig(
        kind="bursty", rate=40.0, duration_s=20_000.0, burst_factor=6.0, burst_s=200.0, burst_every_s=1000.0
    )
    counts = np.histogram(generate(workload, 2, 1).times, bins=20_000, range=(0, 20_000))[0]
    assert counts[counts < 60].mean() == pytest.approx(20.0, rel=0.03)
    assert counts[counts > 70].mean() == pytest.approx(120.0, rel=0.03)


DAY = WorkloadConfig(kind="steps", rate=100.0, duration_s=400.0, steps=((100.0, 0.5), (50.0, 3.0), (20.0, 0.0)))


def test_steps_have_their_rates_and_the_last_lasts() -> None:
    counts = np.mean(
        [np.histogram(generate(DAY, s, 1).times, bins=8, range=(0, 400))[0] / 50 for s in range(8)], axis=0
    )
    assert counts == pytest.approx([50, 50, 300, 0, 0, 0, 0, 0], rel=0.05)


def test_steps_that_go_on_after_the_run_are_cut() -> None:
    times = generate(replace(DAY, duration_s=120.0), 0, 1).times
    assert times[-1] < 120.0
    assert np.sum(times >= 100.0) == pytest.approx(20 * 300, rel=0.05)


def test_a_rate_that_is_not_in_items_per_second_yet_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_items_per_second"):
        generate(replace(DAY, rate_unit="narrowest"), 0, 1)


def test_diurnal_peaks_a_quarter_day_in_and_bottoms_three_quarters_in() -> None:
    workload = WorkloadConfig(kind="diurnal", rate=100.0, duration_s=400.0)
    counts = np.histogram(generate(workload, 1, 1).times, bins=40, range=(0, 400))[0] / 10
    assert counts[8:12].mean() == pytest.approx(150.0, rel=0.08)
    assert counts[28:32].mean() == pytest.approx(50.0, rel=0.12)


def test_trace_is_taken_as_it_is_up_to_the_duration(tmp_path) -> None:
    times = [0.0, 0.25, 0.25, 1.5, 9.0]
    (tmp_path / "t.csv").write_text("note,arrival_s\n" + "".join(f"x,{t}\n" for t in times))
    pq.write_table(pa.table({"arrival_s": times}), tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        workload = WorkloadConfig(kind="trace", trace=str(tmp_path / name), duration_s=5.0, items_per_request=2)
        arrivals = generate(workload, 0, 3)
        assert arrivals.times.tolist() == [0.0, 0.25, 0.25, 1.5]
        assert arrivals.items == 8


def test_a_gzipped_trace_at_the_rate_keeps_its_shape_and_brings_the_rate(tmp_path) -> None:
    path = tmp_path / "hour.csv.gz"
    path.write_bytes(gzip.compress(b"arrival_s\n0\n900\n1000\n3600\n"))
    workload = WorkloadConfig(
        kind="trace", trace=str(path), trace_at_rate=True, rate=20.0, items_per_request=3, duration_s=5.0
    )
    arrivals = generate(workload, 0, 3)
    assert arrivals.items == 12
    assert arrivals.times == pytest.approx([0, 0.15, 0.6 * 1000 / 3600, 0.6])  # 12 items in 0.6 s are 20 a second


@pytest.mark.parametrize("begin", [0.0, 0.003, 1_700_000_000.0])
def test_a_trace_at_the_rate_begins_with_its_first_arrival(tmp_path, begin: float) -> None:
    path = tmp_path / "later.csv"
    path.write_text("arrival_s\n" + "".join(f"{begin + t}\n" for t in (0, 900, 1000, 3600)))
    workload = WorkloadConfig(kind="trace", trace=str(path), trace_at_rate=True, rate=20.0, duration_s=5.0)
    assert generate(workload, 0, 3).times == pytest.approx([0, 0.05, 0.2 * 1000 / 3600, 0.2], abs=1e-6)


def test_a_trace_that_begins_after_the_run_says_so(tmp_path) -> None:
    path = tmp_path / "unix.csv"
    path.write_text("arrival_s\n1700000000\n1700000001\n")
    workload = WorkloadConfig(kind="trace", trace=str(path), duration_s=5.0)
    with pytest.raises(TraceError, match=r"begins at 1700000000 s, the run ends at .* = 5; .*trace_at_rate"):
        generate(workload, 0, 3)
    path.write_text("arrival_s\n4.5\n6\n")
    assert generate(workload, 0, 3).times.tolist() == [4.5]


def test_a_trace_of_one_moment_has_no_rate(tmp_path) -> None:
    path = tmp_path / "moment.csv"
    path.write_text("arrival_s\n0\n0\n")
    assert generate(WorkloadConfig(kind="trace", trace=str(path)), 0, 3).items == 2
    with pytest.raises(TraceError, match="all its arrivals at 0"):
        generate(WorkloadConfig(kind="trace", trace=str(path), trace_at_rate=True), 0, 3)


def test_a_trace_is_not_read_beyond_what_memory_may_take(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("slim_scheduler.setup.workload.MOST_ARRIVALS", 3)
    path = tmp_path / "long.csv"
    path.write_text("arrival_s\n0\n1\n2\n")
    assert len(read_trace(path)) == 3
    path.write_text("arrival_s\n0\n1\n2\n3\n")
    with pytest.raises(TraceError, match="more than 3 rows"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time\n1\n", "no column arrival_s (columns: time)"),
        ("", "no column arrival_s (columns: none)"),
        ("arrival_s\n", "no rows"),
        ("arrival_s\n0.5\n-1\n", "line 3: arrival_s is -1; it must be 0 or more"),
        ("arrival_s\n2\n1\n", "line 3: arrival_s is 1 after 2; sort the file"),
        ("arrival_s\nnan\n", "line 2: arrival_s is nan; it must be finite"),
        ("arrival_s\ninf\n", "must be finite"),
        ("arrival_s\n1700000000000\n1700100000000\n", "line 3: arrival_s is 1.7001e+12, more than a year after"),
        ("arrival_s\nsoon\n", "line 2: arrival_s is 'soon'; it must be a number"),
        ("a,arrival_s\n1\n", "arrival_s is None; it must be a number"),
    ],
)
def test_bad_csv_trace_is_named_in_one_line(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_traces_are_trace_errors(tmp_path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80" * 20)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    pq.write_table(pa.table({"time": [1.0]}), tmp_path / "column.parquet")
    pq.write_table(pa.table({"arrival_s": [1.0, None]}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"arrival_s": [3.0, 2.0]}), tmp_path / "unsorted.parquet")
    (tmp_path / "plain.csv.gz").write_text("arrival_s\n0\n")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"arrival_s\n" + b"0.5\n" * 1000)[:-12])
    names = ("binary.csv", "cut.parquet", "column.parquet", "null.parquet", "unsorted.parquet", "absent.csv", "")
    for name in (*names, "plain.csv.gz", "cut.csv.gz"):
        with pytest.raises(TraceError) as caught:
            read_trace(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_impossible_shapes_of_load_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="burst_s is 5; it must be below burst_every_s"):
        generate(WorkloadConfig(kind="bursty", burst_s=5.0, burst_every_s=5.0), 0, 1)
    with pytest.raises(ConfigError, match="0 samples"):
        generate(WorkloadConfig(), 0, 0)
