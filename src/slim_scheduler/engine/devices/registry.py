"""The devices that a configuration may name, and the file that opens each kind."""

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.devices.cpu import CpuDevice
from slim_scheduler.engine.devices.graphs import Engine, GraphDevice
from slim_scheduler.model.precision import in_precision
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.setup.machines import LIVE_KINDS, device_shape


def open_device(
    device: str,
    model: SlimmableModel,
    shape: ModelShape,
    *,
    threads: int,
    max_batch: int,
    memory_limit: Bytes,
    precision: str = "fp32",
) -> Device:
    """The device that a configuration names. Raises ConfigError for one that is not there."""
    kind, _, place = device.partition(":")
    if kind in ("onnxruntime", "openvino"):
        return GraphDevice(_engine(kind, place, threads, precision, memory_limit), model, shape, memory_limit)
    model, shape = in_precision(model, precision), device_shape(device, precision, shape)
    if device == "cpu":
        return CpuDevice(model, shape, threads, memory_limit)
    if device == "cuda" or device.startswith("cuda:"):
        from slim_scheduler.engine.devices.cuda import open_cuda

        return open_cuda(device, model, shape, max_batch, memory_limit)
    raise not_live(device)


def check_kind(device: str) -> None:
    """Raises ConfigError for a device of no kind that computes; whether it is there, opening it says."""
    if device.partition(":")[0] not in LIVE_KINDS:
        raise not_live(device)


def not_live(device: str) -> ConfigError:
    return ConfigError(
        f"device {device} cannot run live; live devices are cpu, cuda:N, openvino:CPU and onnxruntime:CPU, "
        "onnxruntime:CUDA, onnxruntime:TensorRT (a profile is for simulation)"
    )


def _engine(kind: str, place: str, threads: int, precision: str, memory_limit: Bytes) -> Engine:
    try:
        if kind == "openvino":
            from slim_scheduler.engine.devices.openvino import OpenVinoEngine

            return OpenVinoEngine(place, threads, precision)
        from slim_scheduler.engine.devices.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(place, threads, precision, memory_limit)
    except ModuleNotFoundError as error:
        extra = "openvino" if kind == "openvino" else "onnx"
        raise ConfigError(f'{error.name} is not installed; pip install "slim-scheduler[{extra}]"') from None
