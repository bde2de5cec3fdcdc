"""The devices that a configuration may name, and the file that opens each kind."""

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.devices.cpu import CpuDevice
from slim_scheduler.model.protocol import SlimmableModel


def open_device(
    device: str, model: SlimmableModel, shape: ModelShape, *, threads: int, max_batch: int, memory_limit: Bytes
) -> Device:
    """The device that a configuration names: `cpu` or `cuda:N`. Raises ConfigError for one that is not there."""
    if device == "cpu":
        return CpuDevice(model, shape, threads, memory_limit)
    if device == "cuda" or device.startswith("cuda:"):
        from slim_scheduler.engine.devices.cuda import open_cuda

        return open_cuda(device, model, shape, max_batch, memory_limit)
    raise ConfigError(f"device {device} cannot run live; live devices are cpu and cuda:N (a profile is for simulation)")
