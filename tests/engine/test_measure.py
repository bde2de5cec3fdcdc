"""A measured profile is complete, readable and plausible, and comes from the executor that serves."""

from pathlib import Path

import psutil
import pytest
import torch

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.profile import LatencyTable
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.engine.measure import measure_model, memory_budget, watts_while
from slim_scheduler.engine.measuring_bench import VISITS
from slim_scheduler.engine.probe import RaplProbe
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


HELD = sum(sum(row) for row in SHAPE.weight_bytes) + sum(
    size for variants in SHAPE.variant_bytes[1:] for row in variants for size in row
)  # bytes of all instances with all their variants
ITEM = max(max(row) for row in SHAPE.workspace_bytes)


async def test_batch_sizes_that_do_not_fit_into_memory_are_left_out():
    seen: list[tuple[int, int]] = []
    profile = await measure_model(
        NETWORK,
        "cpu",
        batches=(1, 4, 8),
        rounds=1,
        memory_gib=(HELD + 6 * ITEM) / 2**30,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert profile.batches == (1, 4)
    assert profile.notes.endswith("; no memory for batches of 8")
    assert {len(row.seconds) for row in profile.latency_rows} == {2}
    runs = len(profile.latency_rows) * 2 * VISITS
    assert seen == [(done, runs) for done in range(1, runs + 1)]


@pytest.mark.parametrize("budget", [1000, HELD - 1, HELD + ITEM // 2])
async def test_a_network_that_does_not_fit_is_told_the_budget(budget: int):
    said = rf"tiny cannot be measured in a budget of {budget} bytes.*needs \d+ bytes.*takes more with --memory-gib"
    with pytest.raises(ConfigError, match=said):
        await measure_model(NETWORK, "cpu", batches=(1, 4), rounds=1, memory_gib=budget / 2**30)


@pytest.mark.parametrize("refusal", ["DefaultCPUAllocator: can't allocate memory: 9 bytes", "not enough memory"])
async def test_a_host_that_refuses_memory_for_larger_inputs_limits_the_batches(
    monkeypatch: pytest.MonkeyPatch, refusal: str
):
    """Torch's allocator may refuse what the budget would have allowed."""
    drawn = torch.randn
    left = len(SHAPE.widths) * (SHAPE.segments - 1) + 1  # one part of three items for each kind of input

    def randn(*size: int) -> torch.Tensor:
        nonlocal left
        if not left:
            raise RuntimeError(refusal)
        left -= 1
        return drawn(*size)

    monkeypatch.setattr("torch.randn", randn)
    profile = await measure_model(NETWORK, "cpu", batches=(1, 2, 8), rounds=1)
    assert profile.batches == (1, 2)


def test_the_budget_is_never_more_than_the_device_has():
    assert memory_budget("cpu", 1.0) == 2**30
    assert memory_budget("cpu", 1e6) == psutil.virtual_memory().total
    assert memory_budget("cuda:99", 8.0) == 8 * 2**30, "opening it says that it is not there"


@pytest.mark.parametrize("durations", [(1.0, 0.1, 0.1, 3.0, 0.1), (3.0,)])
async def test_power_is_what_a_step_used_over_the_time_that_it_took(tmp_path: Path, durations: tuple[float, ...]):
    """However long the steps are, and whatever was used before."""
    (tmp_path / "max_energy_range_uj").write_text("1000000000000\n")
    counter = tmp_path / "energy_uj"
    counter.write_text("0\n")
    probe = RaplProbe(tmp_path)
    now, left = 100.0, list(durations)

    async def step() -> None:
        nonlocal now
        seconds = left.pop(0)
        now += seconds
        counter.write_text(f"{int(counter.read_text()) + round(25e6 * seconds)}\n")  # 25 W

    probe.sample(now, 0.0)
    now += 7.0
    counter.write_text("700000000\n")  # 100 W until here
    watts = await watts_while(step, probe, 1.0, sum(durations) - 0.05, lambda: now)
    assert watts == pytest.approx(25.0)
    assert not left
