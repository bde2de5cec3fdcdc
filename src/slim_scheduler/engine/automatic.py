"""What `slim serve MODEL` finds out by itself: which devices there are, which engine is the fastest, what it takes.

Everything measured is kept in the user's cache under a hash of the network, the machine, the memory and the versions,
so it is measured once. Nothing here is needed where a configuration says it all.
"""

import asyncio
import hashlib
import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from slim_scheduler.core.errors import ConfigError, InputError, OutOfMemoryError, first_line
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.engine.hardware import cores, device_name, versions
from slim_scheduler.engine.measure import measure_model
from slim_scheduler.model.family import Family
from slim_scheduler.model.folder import load_model
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.segment_graph import network_hash
from slim_scheduler.setup.accuracy_files import PRECISIONS, TABLE_FILES, accuracy_path, read_accuracy, table_file
from slim_scheduler.setup.cache import cache_folder, write_whole
from slim_scheduler.setup.config import Config, ModelConfig, RouterConfig, ServerConfig
from slim_scheduler.setup.machines import load_shape
from slim_scheduler.setup.profiles import read_profile

AUTO = "auto"
GIB = 2**30
PROFILE_ROUNDS = 1  # of four visits to every point
TRIAL_BATCHES = (1, 8)
TRIALS = 5
LOSS = 0.002  # of top-1, that `precision = "auto"` may cost
LONGEST_BATCH: Seconds = 0.25
MEMORY_SHARE = 0.5  # of the memory that is free now, for a server on the CPU; of a GPU's, 0.8
POLICY = "policy"  # the folder of a model's own policy, beside its manifest

Progress = Callable[[float, str], None]  # share done, what is being done


def automatic_config(
    folder: Path, precision: str = "fp32", progress: Progress = lambda share, what: None
) -> tuple[Config, list[str]]:
    """A configuration for a model on this machine, and what was found out, a line each. Raises InputError's kinds."""
    if not (folder / "manifest.json").is_file():
        raise ConfigError(f"{folder} is no model folder; give one, or two or more .onnx or .pt2 files")
    model = load_model(folder)
    shape = load_shape(Config(model=ModelConfig(path=str(folder))))
    said, servers = [], []
    threads = max(1, cores() - 1)  # the event loop has the other
    asked = precision
    for device, memory_gib in _devices(model):
        device, precision = fastest(model, shape, folder, device, asked, threads, memory_gib, progress)
        path, fresh = measured_profile(model, device, precision, threads, memory_gib, progress)
        when = "measured now" if fresh else "kept"
        batch = largest_batch(read_profile(path))
        said.append(
            f"device {device} in {precision}, {memory_gib:.1f} GiB, batches up to {batch}; profile {when}: {path}"
        )
        servers.append(
            ServerConfig(
                name=device.replace(":", "-").lower(),
                device=device,
                precision=precision,  # type: ignore[arg-type]
                profile=str(path),
                vram_budget_gib=memory_gib,
                threads=threads,
                max_batch=batch,
                max_upgrade=0.0,
                batch_window_ms=AUTO,  # type: ignore[arg-type]
            )
        )
    router, why = _router(folder, shape)
    said.append(f"router {router}: {why}")
    config = Config(model=ModelConfig(path=str(folder)), servers=tuple(servers), router=RouterConfig(name=router))
    if precision != "fp32" and accuracy_path(config) == folder / table_file("test"):
        said.append(
            f"accuracy in {precision} was not measured, fp32's is taken; measure it: `slim accuracy --model {folder} "
            f"--data DIR --device {device} --precision {precision}`"
        )
    return config, said


def with_fastest_devices(config: Config, model: SlimmableModel, shape: ModelShape) -> Config:
    """The configuration with a name in place of every `device = "auto"` and `precision = "auto"`."""
    folder = Path(config.model.path)
    servers = tuple(with_fastest_device(server, folder, model, shape) for server in config.servers)
    return msgspec.structs.replace(config, servers=servers)


def with_fastest_device(
    server: ServerConfig,
    folder: Path,
    model: SlimmableModel,
    shape: ModelShape,
    progress: Progress = lambda share, what: None,
) -> ServerConfig:
    """One server of it. `folder` is the model's. Raises ConfigError where nothing here runs it."""
    if AUTO not in (server.device, server.precision):
        return server
    memory = server.vram_budget_gib
    found = fastest(model, shape, folder, server.device, server.precision, server.threads, memory, progress)
    return msgspec.structs.replace(server, device=found[0], precision=found[1])


def fastest(
    model: SlimmableModel,
    shape: ModelShape,
    folder: Path,
    device: str,
    precision: str,
    threads: int,
    memory_gib: float,
    progress: Progress = lambda share, what: None,
) -> tuple[str, str]:
    """(device, precision) that take the least time for the widest network, of those that `auto` leaves open; each
    measured once. `precision = "auto"` leaves open what `close_enough` lets through."""
    allowed = close_enough(folder) if precision == AUTO else [precision]
    candidates = [(d, p) for p in allowed for d in (_candidates(model, p) if device == AUTO else [device])]
    if len(candidates) == 1 and AUTO not in (device, precision):
        return candidates[0]
    seconds: dict[tuple[str, str], Seconds] = {}
    reason = ""
    for i, (name, kind) in enumerate(candidates):
        progress(0.2 * i / len(candidates), f"trying {name} in {kind}")
        found = _trial_once(model, shape, name, kind, threads, memory_gib)
        if isinstance(found, str):
            reason = f"; {found}"
        else:
            seconds[name, kind] = found
    if not seconds:
        tried = ", ".join(f"{name} in {kind}" for name, kind in candidates) or "none"
        raise ConfigError(f"no engine here runs {shape.name} in {precision}; tried: {tried}{reason}")
    return min(seconds, key=lambda pair: seconds[pair])


def close_enough(folder: Path) -> list[str]:
    """Precisions in which the network was measured to get as much right as in fp32, to `LOSS`, at every one width."""
    allowed = ["fp32"]
    for precision in PRECISIONS[1:]:
        path = folder / table_file("test", precision)
        if path.is_file():
            full, lower = read_accuracy(folder), read_accuracy(path)
            uniform = [(width,) * full.segments for width in full.widths]
            if all(full.top1(widths) - lower.top1(widths) <= LOSS for widths in uniform):
                allowed.append(precision)
    return allowed


def _trial_once(
    model: SlimmableModel, shape: ModelShape, device: str, precision: str, threads: int, memory_gib: float
) -> Seconds | str:
    """Seconds of the widest network, or why the device cannot run it so; kept in the user's cache.

    Not kept is what may be otherwise next time: a device that is not there, or not enough memory.
    """
    path, is_kept = _kept_at("engines", model, device, precision, threads, memory_gib)
    if is_kept:
        kept: Seconds | str = msgspec.json.decode(path.read_bytes(), type=float | str)
        return kept
    found: Seconds | str
    try:
        opened = open_device(
            device,
            model,
            shape,
            threads=threads,
            max_batch=TRIAL_BATCHES[-1],
            memory_limit=int(memory_gib * GIB),
            precision=precision,
        )
        found = _trial(opened, model)
    except (ConfigError, OutOfMemoryError) as error:
        return str(error)
    except (InputError, RuntimeError) as error:  # it cannot run this network, or not in this precision
        found = first_line(error)
    write_whole(path, msgspec.json.encode(found))
    return found


def measured_profile(
    model: SlimmableModel,
    device: str,
    precision: str,
    threads: int,
    memory_gib: float,
    progress: Progress = lambda share, what: None,
) -> tuple[Path, bool]:
    """The profile of a device for a model, in the user's cache, and whether it was measured just now."""
    path, is_kept = _kept_at("profiles", model, device, precision, threads, memory_gib)
    if is_kept:
        return path, False
    profile = asyncio.run(
        measure_model(
            model,
            device,
            threads=threads,
            rounds=PROFILE_ROUNDS,
            memory_gib=memory_gib,
            precision=precision,
            progress=lambda done, total: progress(0.2 + 0.8 * done / total, f"measuring {device}"),
        )
    )
    write_whole(path, msgspec.json.encode(profile))
    return path, True


def largest_batch(profile: Profile) -> int:
    """The largest measured batch that no piece of the network keeps a device busy with for longer than `LONGEST_BATCH`.

    A server holds two such batches that are decided about already: the longer they take, the later it follows a load.
    """
    times = [row.mean or row.seconds for row in profile.latency_rows]
    longest = [max(seconds[i] for seconds in times) for i in range(len(profile.batches))]
    fits = [size for size, seconds in zip(profile.batches, longest, strict=True) if seconds <= LONGEST_BATCH]
    return max(fits, default=profile.batches[0])


def _devices(model: SlimmableModel) -> list[tuple[str, float]]:
    """(device, GiB): one server per GPU, else one on the CPU."""
    import psutil

    if torch.cuda.is_available():
        names = ["onnxruntime:CUDA"] if isinstance(model, Family) else []  # ONNX Runtime takes the first GPU
        names = names or [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        return [(name, 0.8 * torch.cuda.get_device_properties(i).total_memory / GIB) for i, name in enumerate(names)]
    return [(AUTO, max(0.25, MEMORY_SHARE * psutil.virtual_memory().available / GIB))]


def _candidates(model: SlimmableModel, precision: str) -> list[str]:
    """CPU engines that are installed. Device `cpu` runs a family on ONNX Runtime, so that is not tried twice."""
    names = ["cpu"] if precision == "fp32" or not isinstance(model, Family) else []
    if not isinstance(model, Family) and precision == "fp32" and _installed("onnxruntime", "onnx"):
        names.append("onnxruntime:CPU")
    if _installed("openvino", "onnx", "onnxruntime"):
        names.append("openvino:CPU")
    return names


def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _trial(device: Device, model: SlimmableModel) -> Seconds:
    """The least seconds of the widest network from end to end, over batches of both sizes."""
    widest = model.widths[-1]
    total = 0.0
    with device.thread():
        instances = [device.load(segment, widest) for segment in range(model.segments)]
        for size in TRIAL_BATCHES:
            items = torch.randn(size, *model.item_shape)
            times = []
            for _ in range(TRIALS + 1):
                begin = time.perf_counter()
                x = items
                for segment, instance in enumerate(instances):
                    x = device.run(instance, [(x, row) for row in range(size)], widest if segment else None)
                times.append(time.perf_counter() - begin)
            total += min(times[1:])
        for instance in instances:
            device.unload(instance)
    device.close()
    return total


def _router(folder: Path, shape: ModelShape) -> tuple[str, str]:
    if (folder / POLICY / "manifest.json").is_file():
        return f"ppo:{folder / POLICY}", "the model's own policy"
    if any((folder / name).is_file() for name in TABLE_FILES.values()):
        return "lp", "the most accurate mixture that carries the load"
    return f"cost-model:{shape.widths[-1]:g}", "nothing says what a width gets right, so the widest serves"


def _kept_at(
    kind: str, model: SlimmableModel, device: str, precision: str, threads: int, memory_gib: float
) -> tuple[Path, bool]:
    """A file of the user's cache, and whether it holds what was measured of this very network.

    Memory counts to the power of two below it: what is free is never quite the same. A network without a hash is
    measured each time.
    """
    network = model.manifest.weights_sha256 if isinstance(model, Family) else network_hash(model)
    memory = math.floor(math.log2(memory_gib))
    parts = (model.name, network, device, device_name(device), precision, threads, memory, versions(device))
    path = cache_folder(kind) / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
    return path, bool(network) and path.is_file()
