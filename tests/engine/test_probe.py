"""Telemetry: busy time over the window, energy with its source, and unknown is not zero."""

import time

import pytest

from slim_scheduler.core.profile import Curve
from slim_scheduler.engine.probe import BusyMeter, EstimatedProbe, NoProbe, NvmlProbe, RaplProbe, open_probe

from .live import config_of, engine_of, images


def test_utilisation_is_the_busy_share_of_the_last_half_second():
    meter = BusyMeter()
    meter.started(1.0)
    meter.finished(1.1)
    meter.started(1.2)
    meter.started(1.25)  # two batches at once are busy once
    meter.finished(1.3)
    meter.finished(1.35)
    assert meter.fraction(1.5) == pytest.approx((0.1 + 0.15) / 0.5)
    assert meter.fraction(1.6) == pytest.approx(0.15 / 0.5)
    assert meter.fraction(1.85) == 0.0


def test_a_batch_that_still_runs_counts():
    meter = BusyMeter()
    meter.started(1.0)
    assert meter.fraction(1.25) == pytest.approx(0.5)
    assert meter.fraction(9.0) == 1.0


def test_estimated_energy_is_the_power_curve_integrated():
    probe = EstimatedProbe(Curve((0.0, 1.0), (10.0, 30.0)))
    first, second = probe.sample(0.0, 0.0), probe.sample(2.0, 0.5)
    assert (first.power_w, first.energy_j, first.energy_source) == (10.0, 0.0, "estimated")
    assert (second.power_w, second.energy_j) == (20.0, 30.0)
    assert probe.running_power == 30.0


def test_a_device_without_a_meter_reports_unknown():
    sampled = NoProbe().sample(1.0, 0.25)
    assert (sampled.utilization, sampled.power_w, sampled.energy_j, sampled.energy_source) == (0.25, None, None, "none")


def test_rapl_counts_joules_over_its_wrap(tmp_path):
    (tmp_path / "max_energy_range_uj").write_text("1000000\n")
    counter = tmp_path / "energy_uj"
    counter.write_text("900000\n")
    probe = RaplProbe(tmp_path)
    probe.sample(0.0, 0.0)
    counter.write_text("100000\n")
    sampled = probe.sample(0.1, 1.0)
    assert sampled.energy_j == pytest.approx(0.200001)
    assert sampled.power_w == pytest.approx(2.00001)
    assert sampled.energy_source == "counter"


class Gpu:
    """NVML as a GPU answers it: the few calls a probe makes. `counter` None: older than Volta."""

    class NVMLError(Exception):
        pass

    def __init__(self, counter):
        self.counter, self.milliwatts, self.gpu = counter, 100_000, 40

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802 - NVML's own name
        if self.counter is None:
            raise self.NVMLError
        return self.counter

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802 - NVML's own name
        if self.milliwatts is None:
            raise self.NVMLError
        return self.milliwatts

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802 - NVML's own name
        if self.gpu is None:
            raise self.NVMLError
        return self


def test_gpu_energy_is_its_counter_from_volta_on():
    gpu = Gpu(counter=5_000)
    probe = NvmlProbe(gpu, None, period=0.0)
    gpu.counter = 7_500
    probe.read(1.0)
    sampled = probe.sample(1.0, 0.9)
    assert (sampled.energy_j, sampled.energy_source, sampled.power_w, sampled.utilization) == (2.5, "counter", 100, 0.4)


def test_gpu_energy_is_integrated_power_before_volta():
    probe = NvmlProbe(Gpu(counter=None), None, period=0.0)
    now = time.monotonic()
    probe.read(now + 1.0)
    before = probe.sample(1.0, 0.0).energy_j
    probe.read(now + 1.5)
    sampled = probe.sample(1.5, 0.0)
    assert sampled.energy_j - before == pytest.approx(50.0)
    assert sampled.energy_source == "integrated"


def test_servers_on_one_gpu_share_its_power_and_energy():
    gpu = Gpu(counter=0)
    probes = [NvmlProbe(gpu, None, servers=2, period=0.0) for _ in range(2)]
    gpu.counter = 6_000
    for probe in probes:
        probe.read(1.0)
    sampled = [probe.sample(1.0, 0.5) for probe in probes]
    assert sum(s.energy_j for s in sampled) == 6.0
    assert sum(s.power_w for s in sampled) == 100


def test_sampling_a_gpu_never_waits_for_nvml():
    gpu = Gpu(counter=5_000)
    probe = NvmlProbe(gpu, None, period=0.0)
    gpu.nvmlDeviceGetPowerUsage = None  # a call would raise
    assert probe.sample(1.0, 0.5).power_w == 100


def test_a_gpu_that_stops_answering_is_unknown_not_zero():
    gpu = Gpu(counter=None)
    probe = NvmlProbe(gpu, None, period=0.0)
    gpu.milliwatts = gpu.gpu = None
    probe.read(time.monotonic())
    sampled = probe.sample(1.0, 0.7)
    assert (sampled.power_w, sampled.energy_j, sampled.energy_source) == (None, None, "none")
    assert sampled.utilization == 0.7, "the executor's own figure stands in"


def test_cpus_that_share_a_package_are_estimated():
    assert isinstance(open_probe("cpu", Curve((0.0, 1.0), (1.0, 2.0)), servers=2), EstimatedProbe)
    assert isinstance(open_probe("cpu", None, servers=2), NoProbe)


async def test_servers_report_real_utilisation_memory_and_queue():
    async with engine_of(config_of([{"slowdown": 5.0}], telemetry={"period_s": 0.01})) as engine:
        report = engine.servers["a"].report
        assert report is not None
        assert report.utilization == 0.0
        assert report.power_w is None
        while engine.servers["a"].report.utilization == 0.0:
            await engine.infer(images(8))
        report = engine.servers["a"].report
        assert 0 < report.utilization <= 1
        assert report.memory_used >= engine.memory_used["a"] > 0
        assert len(report.queue_per_segment) == 4
        assert report.batch_p99 >= report.batch_p50 > 0
