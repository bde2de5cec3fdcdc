"""Telemetry of devices: utilisation, power and energy, each energy figure with its source.

Sources: `counter` (the device counts joules), `integrated` (its power readings over time), `estimated` (a profile's
power curve at the measured utilisation), `none`. Unknown is None, never zero. Probes are read on the event loop, once
per telemetry period; what may block is read beside it.
"""

import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import msgspec

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import DeviceSampled
from slim_scheduler.core.profile import Curve
from slim_scheduler.core.types import Joules, Seconds, Watts

UTILIZATION_WINDOW: Seconds = 0.5  # method, section 2
NVML_PERIOD: Seconds = 0.1  # as often as servers report by default
RAPL = Path("/sys/class/powercap/intel-rapl:0")  # the first package; also on AMD
MILLI = 1e-3
MICRO = 1e-6


class BusyMeter:
    """The fraction of the last window in which at least one batch ran."""

    def __init__(self, window: Seconds = UTILIZATION_WINDOW) -> None:
        self._window = window
        self._running = 0
        self._since: Seconds = 0.0
        self._spans: deque[tuple[Seconds, Seconds]] = deque()

    @property
    def running(self) -> int:
        return self._running

    def started(self, now: Seconds) -> None:
        if self._running == 0:
            self._since = now
        self._running += 1

    def finished(self, now: Seconds) -> None:
        self._running -= 1
        if self._running == 0:
            self._spans.append((self._since, now))
            self._forget(now - self._window)

    def fraction(self, now: Seconds) -> float:
        begin = now - self._window
        self._forget(begin)
        busy = sum(end - max(start, begin) for start, end in self._spans)
        if self._running:
            busy += now - max(self._since, begin)
        return min(1.0, busy / self._window)

    def _forget(self, before: Seconds) -> None:
        while self._spans and self._spans[0][1] <= before:
            self._spans.popleft()


class Probe(Protocol):
    """One device's sensors. `busy` is the executor's own utilisation; `energy_j` counts from the probe's making.

    `running_power` is the device's power while it works, as far as known: what a batch's energy is taken from.
    """

    @property
    def running_power(self) -> Watts | None: ...

    def sample(self, now: Seconds, busy: float) -> DeviceSampled: ...


class NoProbe:
    """A device that says nothing of its power."""

    running_power: Watts | None = None

    def sample(self, now: Seconds, busy: float) -> DeviceSampled:
        return DeviceSampled(busy)


class EstimatedProbe:
    """A CPU without a meter: the profile's power curve at the measured utilisation, integrated."""

    def __init__(self, power: Curve) -> None:
        self.running_power: Watts | None = power(1.0)
        self._power = power
        self._energy = Integral()

    def sample(self, now: Seconds, busy: float) -> DeviceSampled:
        power = self._power(busy)
        return DeviceSampled(busy, power, self._energy.add(now, power), "estimated")


class RaplProbe:
    """A CPU package's energy counter. Only right for a server that has the machine to itself."""

    def __init__(self, folder: Path = RAPL) -> None:
        self._counter = folder / "energy_uj"
        self._wraps_at = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._counter.read_text())
        self._last_at: Seconds | None = None
        self._energy: Joules = 0.0
        self.running_power: Watts | None = None

    def sample(self, now: Seconds, busy: float) -> DeviceSampled:
        value = int(self._counter.read_text())
        used = (value - self._last) % (self._wraps_at + 1) * MICRO
        self._energy += used
        if self._last_at is not None and now > self._last_at:
            self.running_power = used / (now - self._last_at)
        self._last, self._last_at = value, now
        return DeviceSampled(busy, self.running_power, self._energy, "counter")


class NvmlProbe:
    """A GPU through NVML (`nvml` is the module): its energy counter from Volta on, else integrated power readings.

    A call of NVML may take milliseconds, so a thread of its own reads every `period`; `sample` gives the last reading.
    `servers` share the GPU: each is told its even share of power and energy, so that their sum is the GPU's.
    """

    def __init__(self, nvml: Any, handle: Any, servers: int = 1, period: Seconds = NVML_PERIOD) -> None:
        self._nvml = nvml
        self._handle = handle
        self._servers = servers
        self._integral = Integral()
        self.running_power: Watts | None = None
        self._last = DeviceSampled(0.0)
        self._measured: float | None = None  # NVML's own utilisation
        self._start: int | None
        try:
            self._start = nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except nvml.NVMLError:
            self._start = None  # older than Volta
        self.read(time.monotonic())
        if period > 0:
            threading.Thread(
                target=_read_always, args=(weakref.ref(self), period), name="slim-nvml", daemon=True
            ).start()

    def sample(self, now: Seconds, busy: float) -> DeviceSampled:
        share = busy if self._measured is None else self._measured
        return msgspec.structs.replace(self._last, utilization=share)

    def read(self, now: Seconds) -> None:
        """Asks NVML. `now` is of a monotonic clock."""
        nvml = self._nvml
        utilization = self._read(nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = self._read(nvml.nvmlDeviceGetPowerUsage)
        power = None if milliwatts is None else milliwatts * MILLI / self._servers
        self.running_power = power
        self._measured = None if utilization is None else utilization.gpu / 100
        if self._start is not None:
            count = self._read(nvml.nvmlDeviceGetTotalEnergyConsumption)
            energy = None if count is None else (count - self._start) * MILLI / self._servers
            self._last = DeviceSampled(0.0, power, energy, "none" if energy is None else "counter")
        elif power is None:
            self._last = DeviceSampled(0.0)
        else:
            self._last = DeviceSampled(0.0, power, self._integral.add(now, power), "integrated")

    def _read(self, function: Any) -> Any:
        try:
            return function(self._handle)
        except self._nvml.NVMLError:
            return None  # not supported here, or lost: unknown is not zero


def _read_always(probe: "weakref.ref[NvmlProbe]", period: Seconds) -> None:
    """Reads until nobody holds the probe any more."""
    while (held := probe()) is not None:
        held.read(time.monotonic())
        del held
        time.sleep(period)


class Integral:
    """Energy from power readings, by trapezoids."""

    def __init__(self) -> None:
        self._joules: Joules = 0.0
        self._last: tuple[Seconds, Watts] | None = None

    def add(self, now: Seconds, power: Watts) -> Joules:
        if self._last is not None:
            then, before = self._last
            self._joules += (now - then) * (power + before) / 2
        self._last = (now, power)
        return self._joules


def open_probe(device: str, power: Curve | None, servers: int) -> Probe:
    """The best source there is. `servers` of this process run on the device; a CPU's meter is only one's own."""
    if device.startswith("cuda"):
        return _nvml_probe(device, servers)
    if servers == 1 and (RAPL / "energy_uj").exists():
        try:
            return RaplProbe(RAPL)
        except OSError:
            pass  # readable by root alone on most machines
    return NoProbe() if power is None else EstimatedProbe(power)


def _nvml_probe(device: str, servers: int) -> Probe:
    import pynvml

    from slim_scheduler.engine.devices.cuda import gpu_index, nvml_handle

    try:
        pynvml.nvmlInit()
        return NvmlProbe(pynvml, nvml_handle(pynvml, gpu_index(device)), servers)
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"device {device}: NVML does not answer ({error}); check the driver with nvidia-smi"
        ) from None
