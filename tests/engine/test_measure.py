"""A measured profile is complete, readable and plausible, and comes from the executor that serves."""

from slim_scheduler.core.profile import LatencyTable
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.engine.measure import measure_model
from slim_scheduler.engine.measuring_bench import VISITS
from slim_scheduler.setup.profiles import read_profile, write_profile

from .live import NETWORK, SHAPE


async def test_profile_has_every_piece_at_every_batch_size(tmp_path):
    seen: list[tuple[int, int]] = []
    profile = await measure_model(
        NETWORK,
        "cpu",
        batches=(1, 4),
        slowdowns=(1.0, 2.0),
        rounds=1,
        progress=lambda done, of: seen.append((done, of)),
    )
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile

    assert profile.model == "tiny"
    assert profile.source == "measured"
    assert profile.device == device_name("cpu")
    assert profile.versions["torch"]
    latency = LatencyTable(profile, 8)
    for segment in range(SHAPE.segments):
        for previous in SHAPE.widths if segment else (None,):
            for width in SHAPE.widths:
                assert latency.seconds(segment, previous, width, 1) > 0
                assert latency.seconds(segment, previous, width, 8) > 0
    assert profile.load_time(max(SHAPE.weight_bytes[3])) > 0
    for row in profile.latency_rows:
        for median, spread, mean, deviation in zip(row.seconds, row.spread, row.mean, row.deviation, strict=True):
            assert median > 0
            assert mean > 0
            assert spread >= 0
            assert deviation > 0
    assert profile.power_source in ("estimated", "counter")
    runs = len(profile.latency_rows) * 2 * VISITS
    assert seen == [(done, runs) for done in range(1, runs + 1)]
