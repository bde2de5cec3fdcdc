"""The execution engines beside torch: both shipped networks, end to end on one CPU thread, at two widths and batches.

All engines take turns batch by batch in one process, and the least of several runs counts, so that what else the
machine does falls on all. `ours` is an engine's time per batch, `theirs` torch's, and the ratio torch's over ours.
"""

import time
from pathlib import Path
from typing import Any

import torch

from slim_scheduler.core.errors import InputError
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.engine.hardware import versions
from slim_scheduler.model.folder import load_model
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel
from slim_scheduler.model.shape import shape_of

MODELS = Path(__file__).parents[1] / "models"
NETWORKS = ("cifar100", "digits")
TORCH = ("cpu", "fp32")
ENGINES = (("cpu", "bf16"), ("onnxruntime:CPU", "fp32"), ("openvino:CPU", "fp32"), ("openvino:CPU", "bf16"))
WIDTHS = (0.25, 1.0)
BATCHES = (1, 32)
ROUNDS = 9
MEMORY = 2 << 30


def run() -> dict[str, dict[str, Any]]:
    return {key: row for network in NETWORKS for key, row in _table(network).items()}


def _table(network: str) -> dict[str, dict[str, Any]]:
    model = load_model(MODELS / network)
    shape = shape_of(model)
    devices: dict[tuple[str, str], Device] = {}
    for name, precision in (TORCH, *ENGINES):
        try:
            devices[name, precision] = open_device(
                name, model, shape, threads=1, max_batch=32, memory_limit=MEMORY, precision=precision
            )
        except InputError as error:
            print(f"left out: {error}", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for width in WIDTHS:
        instances = {kind: _load(device, model, width) for kind, device in devices.items()}
        for batch in BATCHES:
            items = torch.randn(batch, *model.item_shape, generator=torch.Generator().manual_seed(0))
            least = dict.fromkeys(devices, float("inf"))
            for _ in range(ROUNDS):
                for kind, device in devices.items():
                    least[kind] = min(least[kind], _seconds(device, instances[kind], items, width))
            for name, precision in ENGINES:
                if (name, precision) in least:
                    results[f"engines_{network}_{name}_{precision}_width{width:g}_batch{batch}"] = {
                        "ratio": least[TORCH] / least[name, precision],
                        "ours": round(1e3 * least[name, precision], 3),
                        "theirs": round(1e3 * least[TORCH], 3),
                        "unit": "ms per batch, torch's over the engine's",
                        "versions": versions(name),
                    }
        for kind, device in devices.items():
            for instance in instances[kind]:
                device.unload(instance)
    return results


def _load(device: Device, model: SlimmableModel, width: float) -> list[SegmentSlice]:
    with device.thread():
        return [device.load(segment, width) for segment in range(model.segments)]


def _seconds(device: Device, instances: list[SegmentSlice], items: torch.Tensor, width: float) -> float:
    x = items
    with device.thread():
        begin = time.perf_counter()
        for segment, instance in enumerate(instances):
            x = device.run(instance, [(x, row) for row in range(len(x))], width if segment else None)
        return time.perf_counter() - begin
