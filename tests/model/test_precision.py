"""Torch in bf16 and fp16: what a slice holds, what it answers, and what it gets right, in a file of its own."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from slim_scheduler.core.errors import InputError
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.model.accuracy import measure_folder
from slim_scheduler.model.checkpoint import load, load_manifest
from slim_scheduler.model.family import load_family
from slim_scheduler.model.family_import import import_family
from slim_scheduler.model.precision import DTYPES, in_precision
from slim_scheduler.model.shape import shape_of
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
from slim_scheduler.setup.config import Config, ModelConfig, ServerConfig
from slim_scheduler.setup.machines import device_shape
from tests.model.onnx_networks import family_files
from tests.model.plain_networks import PlainResNet

DIGITS = Path(__file__).parents[2] / "models/digits-small"
LOWER = ["bf16", "fp16"]
CLOSE = {"bf16": 0.05, "fp16": 0.01}  # of the largest logit; 8 and 11 binary digits


@pytest.mark.parametrize("precision", LOWER)
def test_a_device_answers_nearly_the_same_and_gives_all_memory_back(precision: str) -> None:
    model = load(DIGITS)
    shape = load_manifest(DIGITS).shape
    items = torch.randn(5, *model.item_shape, generator=torch.Generator().manual_seed(0))
    answers = {}
    for kind in ("fp32", precision):
        device = open_device("cpu", model, shape, threads=1, max_batch=8, memory_limit=1 << 30, precision=kind)
        with device.thread():
            x, instances = items, []
            for segment in range(model.segments):
                instances.append(device.load(segment, 1.0))
                x = device.run(instances[-1], [(x, row) for row in range(5)], 1.0 if segment else None)
                assert x.dtype == torch.float32
            sizes = device_shape("cpu", kind, shape)
            last = len(shape.widths) - 1
            held = sum(
                sizes.weight_bytes[s][last] + sizes.variant(s, 1.0 if s else None, 1.0) for s in range(model.segments)
            )
            assert device.memory_used == held == sum(i.weight_bytes + i.variant_bytes for i in instances)
            for instance in instances:
                device.unload(instance)
        assert device.memory_used == 0
        answers[kind] = x
    difference = (answers[precision] - answers["fp32"]).abs().max() / answers["fp32"].abs().max()
    assert 0 < difference < CLOSE[precision]


@pytest.mark.parametrize("precision", LOWER)
def test_a_network_of_ones_own_runs_in_it_too(precision: str) -> None:
    model = PlainResNet().eval()
    items = torch.randn(3, *model.item_shape)
    whole, lower = items, items
    for segment in range(model.segments):
        whole = model.slice(segment, 1.0, "cpu").run(whole, None)
        lower = in_precision(model, precision).slice(segment, 1.0, "cpu").run(lower, None)
    assert lower.dtype == torch.float32
    assert (lower - whole).abs().max() < CLOSE[precision] * whole.abs().max()


def test_a_slice_that_went_to_the_host_comes_back_in_its_type() -> None:
    piece = in_precision(load(DIGITS), "bf16").slice(1, 0.5, "cpu")
    piece.build_variant(0.25)
    before = piece.weight_bytes, piece.variant_bytes
    piece.to_host()
    piece.build_variant(1.0)
    piece.to_device()
    assert piece.weight_bytes == before[0]
    assert piece.run(torch.randn(2, *load(DIGITS).activation_shape(0, 1.0)), 1.0).dtype == torch.float32


def test_networks_that_are_graphs_are_refused_with_what_can_run_them(tmp_path: Path) -> None:
    import_family(family_files(tmp_path, 2), tmp_path / "two", None)
    with pytest.raises(InputError, match=r"two runs fp32 on torch's devices, not bf16: .* openvino:CPU may run bf16"):
        in_precision(load_family(tmp_path / "two"), "bf16")
    with pytest.raises(InputError, match="precision int8 is not known; give fp32, bf16 or fp16"):
        in_precision(load(DIGITS), "int8")


def test_accuracy_has_a_file_per_precision_and_the_least_of_the_servers_counts(tmp_path: Path) -> None:
    folder = tmp_path / "digits-small"
    shutil.copytree(DIGITS, folder)
    before = (folder / "manifest.json").read_bytes()
    measured = measure_folder(folder, "digits", precision="bf16")
    assert (folder / "manifest.json").read_bytes() == before  # it tells fp32's accuracy

    def counts(*precisions: str, split: str = "test") -> Path:
        servers = tuple(ServerConfig(name=p, device="cpu", precision=p) for p in precisions)  # type: ignore[arg-type]
        return accuracy_path(Config(model=ModelConfig(path=str(folder)), servers=servers), split)

    assert counts("fp32") == folder / "accuracy.parquet"
    assert counts("fp32", "bf16") == folder / "accuracy-bf16.parquet"
    assert counts("bf16", split="held-out") == folder / "accuracy_heldout-bf16.parquet"
    assert counts("fp16") == folder / "accuracy.parquet"  # not measured
    table = read_accuracy(folder / "accuracy-bf16.parquet")
    assert table.precision == "bf16"
    assert table.percentages() == measured["test"].percentages()
    full = read_accuracy(folder)
    assert full.precision == "fp32"
    assert 0 < max(abs(full.top1(w) - table.top1(w)) for w in full.tuples) < 0.02


def test_every_type_is_a_precision_of_the_configuration() -> None:
    for precision in DTYPES:
        msgspec.convert({"name": "a", "device": "cpu", "precision": precision}, ServerConfig)
    assert shape_of(in_precision(load(DIGITS), "bf16")).activation_bytes == shape_of(load(DIGITS)).activation_bytes
