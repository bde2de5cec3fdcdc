"""A profile that is scaled to what batches take while servers serve."""

import msgspec
import pytest

from slim_scheduler.core.profile import LatencyTable
from slim_scheduler.engine import served
from slim_scheduler.engine.measure import measure_model
from slim_scheduler.model import checkpoint
from slim_scheduler.setup.config import config_from
from slim_scheduler.setup.profiles import write_profile

from .live import NETWORK, SHAPE

TOO_SLOW = 50.0  # beside other programs batches take several times as long, but not so many


@pytest.fixture
async def profile():
    return await measure_model(NETWORK, "cpu", batches=(1, 4), rounds=1)


def cluster(folder, profile):
    checkpoint.save(NETWORK, folder / "tiny")
    write_profile(profile, folder / "cpu.json")
    server = {"device": "cpu", "max_batch": 4, "profile": str(folder / "cpu.json"), "slowdown_of": "profile"}
    return config_from(
        {
            "model": {"path": str(folder / "tiny")},
            "servers": [{"name": "a", **server}, {"name": "b", "slowdown": 2.0, **server}],
            "router": {"name": "jsq:0.5", "fallback": "jsq:0.5"},
            "workload": {"data": "digits"},
        }
    )


def times(row, factor):
    """A row whose every time is so many times as long."""
    longer = {
        name: tuple(factor * second for second in getattr(row, name))
        for name in ("seconds", "spread", "mean", "deviation")
    }
    return msgspec.structs.replace(row, **longer)


def test_rows_of_a_width_are_scaled_by_what_its_batches_took(tmp_path, profile, monkeypatch):
    monkeypatch.setattr(served, "SERVED", 0.8)
    monkeypatch.setattr(served, "LOADING", 0.3)
    slow = msgspec.structs.replace(profile, latency_rows=tuple(times(row, TOO_SLOW) for row in profile.latency_rows))
    shares = []
    found = served.as_served(cluster(tmp_path, slow), slow, shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    for before, after in zip(slow.latency_rows, found.latency_rows, strict=True):
        factor = after.mean[0] / before.mean[0]
        assert 0 < factor < 1, "batches took less than a profile of fifty times their time says"
        for name in ("seconds", "spread", "mean", "deviation"):
            assert getattr(after, name) == pytest.approx([factor * second for second in getattr(before, name)])
    assert {row.width for row in found.latency_rows} == set(SHAPE.widths)
    assert "while serving" in found.notes
    assert LatencyTable(found, 4).seconds(0, None, 0.5, 4) < LatencyTable(slow, 4).seconds(0, None, 0.5, 4)


def test_a_run_without_batches_changes_nothing(tmp_path, profile, monkeypatch):
    monkeypatch.setattr(served, "SERVED", 0.3)
    monkeypatch.setattr(served, "LOADING", 10.0)  # all of it
    assert served.as_served(cluster(tmp_path, profile), profile).latency_rows == profile.latency_rows
