"""What this machine has, what would not work on it, and what to do: the findings behind `slim doctor`.

Looks only: starts nothing, loads no network, asks no other machine. Each finding stands alone, so that one broken
part never hides another.
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from slim_scheduler.core.errors import InputError

CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 2 << 30  # runs, checkpoints and a wheel or two
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
GIB = float(1 << 30)

Status = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One line: `note` limits what can be done here, `problem` stops something; `advice` says what to do."""

    subject: str
    status: Status
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings about this machine and the folder the command runs in."""
    findings: list[Finding] = []
    for look in (_python, _torch, _commands, _cpu, _memory, _disk, _energy, _gpus, _models, _profiles, _data):
        try:
            findings.extend(look())
        except Exception as error:  # a broken driver or package is itself a finding
            subject = look.__name__.strip("_")
            findings.append(Finding(subject, "problem", f"could not look: {type(error).__name__}: {error}"))
    return findings


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < LEAST_PYTHON:
        yield Finding("python", "problem", version, "install Python 3.11 or later")
    else:
        yield Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "problem", f"cannot be imported: {error}", "pip install 'torch>=2.13,<2.15'")
        return
    build = (
        f"{torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else f"{torch.__version__}, CPU only"
    )
    if not torch.version.cuda and any(_nvidia_devices()):
        advice = "for the GPU install the CUDA build: pip install 'torch>=2.13,<2.15'"
        yield Finding("torch", "problem", f"{build}, but there is an NVIDIA GPU", advice)
    elif torch.version.cuda and not torch.cuda.is_available():
        yield Finding("torch", "problem", f"{build}, but CUDA does not start", "update the NVIDIA driver, or use cpu")
    else:
        yield Finding("torch", "ok", build)


def _commands() -> Iterator[Finding]:
    """What each command lacks; one line where none lacks anything."""
    from slim_scheduler.cli.extras import lacking

    found = list(lacking())
    for command, what, modules, extra in found:
        lacks = f"{what} lacks {', '.join(modules)}".lstrip()
        yield Finding(f"slim {command}", "note", lacks, f'pip install "slim-scheduler[{extra}]"')
    whole = "every command" if not found else "every other command"
    yield Finding("commands", "ok", f"{whole} has what it needs")


def _cpu() -> Iterator[Finding]:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} cores" if usable == there else f"{usable} of {there} cores usable"
    if usable < 2:
        yield Finding("cpu", "note", found, "live servers, router and load generator share one core: expect lag")
    else:
        yield Finding("cpu", "ok", found)


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available"
    if memory.available < 1 << 30:
        yield Finding("memory", "note", found, "lower servers.N.vram_budget_gib for cpu servers")
    else:
        yield Finding("memory", "ok", found)


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    found = f"{free / GIB:.1f} GiB free here"
    if free < LEAST_FREE_BYTES:
        yield Finding(
            "disk", "note", found, "records of long runs may not fit: free some space, or give --out elsewhere"
        )
    else:
        yield Finding("disk", "ok", found)


def _energy() -> Iterator[Finding]:
    if os.access(RAPL, os.R_OK):
        yield Finding("cpu energy", "ok", "RAPL counter")
    elif RAPL.exists():
        yield Finding("cpu energy", "note", "RAPL is there but not readable", f"chmod a+r {RAPL}, else it is estimated")
    else:
        yield Finding("cpu energy", "note", "no meter: estimated from the profile", "claim no energy from this CPU")


def _gpus() -> Iterator[Finding]:
    try:
        import pynvml
    except ImportError:
        yield Finding("gpu", "note", "nvidia-ml-py is not installed", "pip install nvidia-ml-py, for GPU telemetry")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if any(_nvidia_devices()):
            yield Finding("gpu", "problem", f"the NVIDIA driver does not answer: {error}", "reinstall the driver")
        else:
            yield Finding("gpu", "note", "none", "servers run on cpu; the simulator has profiles of GPUs")
        return
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    for i in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(i)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        source = "integrated power" if _fails(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) else "energy counter"
        found = f"{_text(pynvml.nvmlDeviceGetName(handle))}, {memory.total / GIB:.1f} GiB, driver {driver}, {source}"
        yield Finding(f"cuda:{i}", "ok", found)


def _models() -> Iterator[Finding]:
    from slim_scheduler.model.folder import load_model

    folders = sorted(path.parent for path in Path("models").glob("*/manifest.json"))
    if not folders:
        yield Finding("models", "note", "none in models/", "slim fit --preset digits --data digits --out models/digits")
    for folder in folders:
        try:
            shape = load_model(folder)
        except InputError as error:
            yield Finding(str(folder), "problem", str(error))
            continue
        found = f"{shape.segments} segments, widths {', '.join(f'{w:g}' for w in shape.widths)}, hash verified"
        if (folder / "accuracy.parquet").exists():
            yield Finding(str(folder), "ok", found)
        else:
            advice = f"slim accuracy --model {folder} --data DIR, or simulated accuracy stays unknown"
            yield Finding(str(folder), "note", f"{found}, no accuracy table", advice)


def _profiles() -> Iterator[Finding]:
    from slim_scheduler.setup.profiles import read_profile

    paths = sorted(Path("profiles").glob("*.json"))
    if not paths:
        yield Finding("profiles", "note", "none in profiles/", "slim measure --model models/digits --device cpu")
    for path in paths:
        try:
            profile = read_profile(path)
        except InputError as error:
            yield Finding(str(path), "problem", str(error))
            continue
        here = "measured elsewhere" if profile.source == "measured" and not _is_this_cpu(profile.device) else ""
        found = f"{profile.model} on {profile.device}, {profile.source}"
        if here and path.name.startswith("cpu"):
            advice = (
                f"simulation of this machine needs its own: slim measure --model models/{profile.model} --device cpu"
            )
            yield Finding(str(path), "note", f"{found} (another kind of CPU)", advice)
        else:
            yield Finding(str(path), "ok", found)


def _data() -> Iterator[Finding]:
    try:
        importlib.metadata.version("scikit-learn")
        yield Finding("data digits", "ok", "8x8 handwritten digits, with scikit-learn")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("data digits", "problem", "scikit-learn is missing", "pip install scikit-learn")
    folders = [path.parent for pattern in ("data/**/test.bin", "*/test.bin") for path in Path().glob(pattern)]
    if folders:
        yield Finding("data cifar100", "ok", f"--data {folders[0]}")
    else:
        advice = f"fetch and unpack {CIFAR100_URL} (161 MB), then --data cifar-100-binary"
        yield Finding("data cifar100", "note", "not found here", advice)


def _nvidia_devices() -> Iterator[Path]:
    return Path("/dev").glob("nvidia[0-9]*")


def _is_this_cpu(device: str) -> bool:
    from slim_scheduler.engine.hardware import device_name

    return device == device_name("cpu")


def _fails(function: Callable[[Any], Any], handle: Any) -> bool:
    import pynvml

    try:
        function(handle)
    except pynvml.NVMLError:
        return True
    return False


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
