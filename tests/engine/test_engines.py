"""Execution engines: the same answers as torch, and the bytes that are counted are those that are held."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slim_scheduler.core.errors import ConfigError, OutOfMemoryError
from slim_scheduler.core.types import Width
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.devices.openvino import precisions
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.model.family import load_family
from slim_scheduler.model.family_import import import_family
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.segment_graph import GraphExporter
from slim_scheduler.model.shape import shape_of
from slim_scheduler.setup.machines import compiled_shape
from tests.engine.live import NETWORK, SHAPE, config_of, engine_of, expected, images
from tests.model.onnx_networks import family_files

GIB = 2**30
BF16_ERROR = 0.03  # of the largest logit: bfloat16 keeps 8 bits of 24
ENGINES = [("onnxruntime:CPU", "fp32"), ("openvino:CPU", "fp32"), ("openvino:CPU", "bf16")]
TUPLES = [(0.25,) * 4, (1.0,) * 4, (0.25, 1.0, 0.5, 0.75), (1.0, 0.25, 0.75, 0.5)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this module's own, shared by its tests."""
    folder = tmp_path_factory.getbasetemp() / "engines-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def opened(device: str, precision: str, model: SlimmableModel = NETWORK, limit: int = GIB) -> Device:
    if precision not in precisions("CPU"):
        pytest.skip(f"this CPU does not compute in {precision}")
    shape = shape_of(model)
    return open_device(device, model, shape, threads=1, max_batch=32, memory_limit=limit, precision=precision)


def through(device: Device, items: np.ndarray, widths: tuple[Width, ...]) -> np.ndarray:
    x, previous = torch.from_numpy(items), None
    with device.thread():
        for segment, width in enumerate(widths):
            instance = device.load(segment, width)
            x = device.run(instance, [(x, row) for row in range(len(x))], previous)
            device.unload(instance)
            previous = width
    return x.numpy()


@pytest.mark.parametrize(("device", "precision"), ENGINES)
@pytest.mark.parametrize("widths", TUPLES)
def test_answers_are_torchs(device: str, precision: str, widths: tuple[Width, ...]) -> None:
    items = images(9)
    wanted = expected(items, widths)
    answers = through(opened(device, precision), items, widths)
    allowed = 1e-4 if precision == "fp32" else BF16_ERROR * np.abs(wanted).max()
    assert np.abs(answers - wanted).max() < allowed


@pytest.mark.parametrize(("device", "precision"), ENGINES)
def test_batched_answers_equal_single_ones(device: str, precision: str) -> None:
    items = images(7)
    running = opened(device, precision)
    together = through(running, items, (0.5,) * 4)
    apart = np.concatenate([through(running, items[i : i + 1], (0.5,) * 4) for i in range(len(items))])
    assert np.abs(together - apart).max() < (1e-4 if precision == "fp32" else BF16_ERROR * np.abs(together).max())


@pytest.mark.parametrize(("device", "precision"), ENGINES)
def test_the_ledger_counts_what_is_loaded_and_refuses_more(device: str, precision: str) -> None:
    shape = compiled_shape(SHAPE)
    size = shape.weight_bytes[1][3]
    running = opened(device, precision, limit=size + 4 * shape.workspace_bytes[1][3])
    with running.thread():
        instance = running.load(1, 1.0)
        assert running.memory_used == size
        with pytest.raises(OutOfMemoryError, match="segment 1 at width 1 needs"):
            running.load(1, 1.0)
        assert running.memory_used == size
        x = torch.zeros(9, *NETWORK.activation_shape(0, 1.0))
        running.run(instance, [(x, 0)] * 4, 1.0)
        with pytest.raises(OutOfMemoryError, match="batch of 9"):
            running.run(instance, [(x, row) for row in range(9)], 1.0)
        assert running.memory_used == size
        running.unload(instance)
    assert running.memory_used == 0


@pytest.mark.parametrize(("device", "precision"), ENGINES)
def test_a_server_on_an_engine_answers_at_every_width(device: str, precision: str) -> None:
    if precision not in precisions("CPU"):
        pytest.skip(f"this CPU does not compute in {precision}")

    async def answers() -> list[np.ndarray]:
        async with engine_of(config_of([{"device": device, "precision": precision}])) as engine:
            results = await asyncio.gather(*(engine.infer(images(5, seed=i), widths=w) for i, w in enumerate(TUPLES)))
            used, budget = engine.memory_used["a"], int(0.5 * GIB)
            assert 0 < used <= budget
            return [result.logits for result in results]  # type: ignore[misc]

    for i, found in enumerate(asyncio.run(answers())):
        wanted = expected(images(5, seed=i), TUPLES[i])
        allowed = 1e-3 if precision == "fp32" else BF16_ERROR * np.abs(wanted).max()
        assert np.abs(found - wanted).max() < allowed


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), *ENGINES])
def test_a_family_runs_on_every_engine(device: str, precision: str, tmp_path: Path) -> None:
    import_family(family_files(tmp_path), tmp_path / "fam", None)
    family = load_family(tmp_path / "fam")
    items = images(5)
    running = opened(device, precision, family)
    for rank in family.widths:
        wanted = family.slice(0, rank, "cpu").run(torch.from_numpy(items), None).numpy()
        allowed = 1e-3 if precision == "fp32" else BF16_ERROR * np.abs(wanted).max()
        assert np.abs(through(running, items, (rank,)) - wanted).max() < allowed


@pytest.mark.slow
@pytest.mark.parametrize(("device", "precision"), ENGINES)
def test_what_is_counted_covers_what_the_process_takes(device: str, precision: str) -> None:
    if precision not in precisions("CPU"):
        pytest.skip(f"this CPU does not compute in {precision}")
    command = [sys.executable, "-m", "tests.engine.engine_memory", device, precision]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    taken, counted, _ = map(int, ran.stdout.split())
    assert 0.5 * counted < taken < 1.1 * counted


def test_graphs_are_kept_by_hash_and_made_again_when_damaged(cache: Path) -> None:
    exporter = GraphExporter(NETWORK)
    content = exporter.graph(1, 0.5, 1.0).content
    before = {path.name: path.stat().st_mtime_ns for path in (cache / "slim-scheduler/graphs").iterdir()}
    assert GraphExporter(NETWORK).graph(1, 0.5, 1.0).content == content
    assert before == {path.name: path.stat().st_mtime_ns for path in (cache / "slim-scheduler/graphs").iterdir()}
    for path in (cache / "slim-scheduler/graphs").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    again = GraphExporter(NETWORK).graph(1, 0.5, 1.0).content
    assert len(again) == len(content)


def test_graphs_of_a_class_of_ones_own_are_kept_by_its_source_and_not_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "network_of_ones_own.py"
    source.write_text(
        "from torch import nn\n"
        "from slim_scheduler.model.plain import PlainNetwork\n\n\n"
        "class OnesOwn(PlainNetwork):\n"
        "    def __init__(self) -> None:\n"
        "        super().__init__([nn.Sequential(nn.Flatten(), nn.Linear(64, 10))], (1, 8, 8), 10)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    network = importlib.import_module("network_of_ones_own").OnesOwn()

    def new_graphs() -> int:
        before = set((cache / "slim-scheduler/graphs").glob("*"))
        assert GraphExporter(network).graph(0, None, 1.0).content
        return len(set((cache / "slim-scheduler/graphs").glob("*")) - before)

    assert [new_graphs(), new_graphs()] == [1, 0]
    source.write_text(source.read_text().replace("nn.Flatten()", "nn.ReLU(), nn.Flatten()"))
    assert [new_graphs(), new_graphs()] == [1, 0]
    source.unlink()
    assert new_graphs() == 0, "what cannot be told from another network is not kept"


@pytest.mark.parametrize(
    ("device", "precision", "said"),
    [
        ("onnxruntime:CPU", "bf16", "runs fp32, not bf16"),
        ("onnxruntime:NPU", "fp32", "does not exist"),
        ("onnxruntime:CUDA", "fp32", "is not in this build of ONNX Runtime"),
        ("openvino:GPU", "fp32", "is not there; available: openvino:CPU"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(device: str, precision: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_device(device, NETWORK, SHAPE, threads=1, max_batch=4, memory_limit=GIB, precision=precision)
