"""What this machine is, by kind and never by name, and the versions that its figures depend on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: str) -> str:
    """`2-core x86-64 CPU, AMD EPYC`, or the GPU's name; a GPU that is on another machine is what it is called."""
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            return device
        return torch.cuda.get_device_name(torch.device(device))
    kind = platform.machine().replace("_", "-")
    return ", ".join(part for part in (f"{cores()}-core {kind} CPU", _cpu_model()) if part)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.system()}
    if device.startswith("cuda"):
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    engine = device.partition(":")[0]
    if engine in ("onnxruntime", "openvino"):
        found[engine] = version(engine)
    return found


def _cpu_model() -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
