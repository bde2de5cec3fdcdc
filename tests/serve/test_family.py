"""A family behind the server: every rank answers over the clients that people have as its own file does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from slim_scheduler.client.client import SlimClient
from slim_scheduler.model.data import digits
from slim_scheduler.model.family_import import import_family
from tests.model.onnx_networks import classifier, reference, write
from tests.serve.conftest import STARTED, Running, serving

NETWORKS = [classifier(features=2 * 32**i, seed=i) for i in range(3)]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    files = [write(network, folder / f"net{i}.onnx") for i, network in enumerate(NETWORKS)]
    import_family(files, folder / "three", "digits")
    return folder / "three"


@pytest.fixture(scope="module")
def running(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("serve"), config={"model": family, "router": "jsq:2"}) as running:
        yield running


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
def test_tritonclient_gets_each_rank(running: Running, family: Path, module: Any) -> None:
    pixels = digits().test.pixels[:7]
    names = [variant["name"] for variant in json.loads((family / "manifest.json").read_text())["variants"]]
    port = running.http if module is triton_http else running.grpc
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        for rank, name in enumerate(names, 1):
            tensor = module.InferInput("image", list(pixels.shape), "UINT8")
            tensor.set_data_from_numpy(pixels)
            result = client.infer("three", [tensor], parameters={"width": rank})
            expected = reference(NETWORKS[int(name[-1])], pixels.astype(np.float32) / 255)
            assert np.allclose(result.as_numpy("logits"), expected, atol=1e-3)


def test_the_server_tells_ranks_and_labels(running: Running) -> None:
    config = json.load(urlopen(f"{running.url}/v2/models/three/config"))
    assert config["parameters"]["widths"]["string_value"] == "1,2,3"
    assert config["parameters"]["segments"]["string_value"] == "1"
    metadata = json.load(urlopen(f"{running.url}/v2/models/three"))
    assert metadata["inputs"][0]["shape"] == [-1, 1, 8, 8]


def test_two_files_are_served_with_one_command(tmp_path: Path) -> None:
    """And a second time without importing or measuring."""
    files = [write(network, tmp_path / f"small-{i}.onnx") for i, network in enumerate(NETWORKS[:2])]
    command = [sys.executable, "-m", "slim_scheduler", "serve", *map(str, files), "--data", "digits"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for time in ("measured now", "kept"):
        process = subprocess.Popen(
            [*command, "--port", "0", "--grpc-port", "-1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        started = next(filter(None, (STARTED.fullmatch(line.strip()) for line in process.stdout)))
        with SlimClient(f"http://127.0.0.1:{started[4]}") as client:
            assert client.model == "small"
            answer = client.infer(digits().test.pixels[:3])
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert time in errors
        assert answer.logits.shape == (3, 10)
