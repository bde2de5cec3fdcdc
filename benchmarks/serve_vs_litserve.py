"""Serving against LitServe: the same network, kernels, threads and load generator, in one run.

Both servers take turns under load, so that what else the machine does falls on both; the one whose turn it is not is
stopped (SIGSTOP), because an idle LitServe still takes a seventh of a core. Closed loop
with 32 connections gives requests per second (medians over the rounds); open loop at 80 % of LitServe's peak gives
the p99. The smallest network shows overhead, the CIFAR-100 network at width 1 shows compute. Each of ours, and the
demo's three unequal servers, also runs at twice its peak, that of a closed loop and that of an open one.
"""

import asyncio
import base64
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
import torch
import uvloop

from slim_scheduler.client.client import Constraints, infer_body
from slim_scheduler.client.load import LoadResult, Tally, closed_loop, open_loop, result_of
from slim_scheduler.client.senders import HttpSender, payloads
from slim_scheduler.client.wire import request_head
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.model import checkpoint
from slim_scheduler.model.presets import preset_named
from slim_scheduler.model.slim_resnet import SlimResNet

T = TypeVar("T")

CONNECTIONS = 32
# Where computing decides, larger batches keep requests waiting for each other.
MAX_BATCH = {"smallest": 32, "cifar100": 8}
ROUNDS = 4
SECONDS = 4.0
WARMUP_S = 1.0
OPEN_SECONDS = 10.0  # a p99 of some hundreds of requests is the luck of a few
SHARE_OF_PEAK = 0.8
OVERLOAD = 2.0
OVERLOAD_ROUNDS = 5
SHARES = (0.8, 1.0)  # of the closed loop's peak, where an open loop's is looked for
TARGETS = {"smallest": 5.0, "cifar100": 0.97}
CONFIG = """
[model]
path = "{model}"
[[servers]]
name = "a"
device = "cpu"
max_batch = {batch}
threads = 1
[dispatch]
reentry = "oldest-item"
[router]
name = "jsq:{width}"
"""


class Server(NamedTuple):
    """A running server; `group` is its process group. Of `ours` every request must be answered or refused."""

    port: int
    group: int
    ours: bool = True


class Beyond(NamedTuple):
    """A load beyond a peak: items/s at the peak, requests that expired, bytes that memory grew."""

    peak: float
    load: LoadResult
    expired: int
    grown: int

    @property
    def ratio(self) -> float:
        return self.load.goodput_items_s / self.peak


def run() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        results |= _compare("smallest", Path("models/digits"), 0.25, Path(folder))
        results |= _compare("cifar100", _cifar100(Path(folder)), 1.0, Path(folder))
    digits = Path("models/digits")
    with _served(Path("examples/demo/cluster.toml")) as cluster:
        results |= _overload("demo", cluster, checkpoint.load_manifest(digits).shape, _images(digits), 200.0)
    return results


def _compare(name: str, model: Path, width: float, folder: Path) -> dict[str, dict[str, Any]]:
    shape = checkpoint.load_manifest(model).shape
    images = _images(model)
    rows: dict[str, dict[str, Any]] = {}
    with _ours(model, width, folder, MAX_BATCH[name]) as ours, _litserve(model, width, MAX_BATCH[name]) as theirs:
        our_requests, their_requests = (
            _our_requests(ours.port, shape.name, images),
            _their_requests(theirs.port, images),
        )
        pairs = []
        for _ in range(ROUNDS):
            pairs.append((_turn(ours, _closed, our_requests), _turn(theirs, _closed, their_requests)))
            a, b = pairs[-1]
            _say(f"{name}: {a.throughput_items_s:.0f} against {b.throughput_items_s:.0f} requests/s")
        our_peak = statistics.median(a.throughput_items_s for a, _ in pairs)
        their_peak = statistics.median(b.throughput_items_s for _, b in pairs)
        ratios = [a.throughput_items_s / b.throughput_items_s for a, b in pairs]
        rows[f"serve_requests_{name}"] = _row(
            statistics.median(ratios), our_peak, their_peak, "requests/s, closed loop, 32 connections", TARGETS[name]
        ) | {"rounds": [round(ratio, 3) for ratio in ratios], "their_errors": sum(b.errors for _, b in pairs)}
        rate = SHARE_OF_PEAK * their_peak
        tails = [(_turn(ours, _open, our_requests, rate), _turn(theirs, _open, their_requests, rate)) for _ in range(3)]
        our_p99 = statistics.median(a.latency_s["p99"] for a, _ in tails) * 1e3
        their_p99 = statistics.median(b.latency_s["p99"] for _, b in tails) * 1e3
        rows[f"serve_p99_{name}"] = _row(
            their_p99 / our_p99, our_p99, their_p99, f"ms at {rate:.0f}/s, open loop (above 1: ours is lower)",
            1.0,
        ) | {
            "generator_lag_p99_ms": [round(a.generator_lag_s["p99"] * 1e3, 2) for a, _ in tails],
            "their_errors": sum(b.errors for _, b in tails),
        }  # fmt: skip
    with _ours(model, width, folder, MAX_BATCH[name]) as server:
        rows |= _overload(name, server, shape, images, max(100.0, 8e3 * CONNECTIONS / our_peak))
    return rows


def _overload(
    name: str, server: Server, shape: ModelShape, images: list[Any], deadline_ms: float
) -> dict[str, dict[str, Any]]:
    """Goodput under a deadline at twice the peak, against that peak; refusals; memory. Medians over rounds.

    There are two peaks. Of a closed loop: its callers ask together, and without a deadline, because who is refused asks
    again at once; the mean of one before and one after, because the machine's speed changes within seconds. Of an open
    loop: the most that was answered in time at any load up to the closed loop's peak.
    """
    unhurried = _our_requests(server.port, shape.name, images)
    requests = _our_requests(server.port, shape.name, images, Constraints(deadline_ms=deadline_ms))
    _turn(server, _closed, unhurried)  # connections are used for the first time
    process = psutil.Process(server.group)

    def beyond(peak: float) -> Beyond:
        memory, expired = process.memory_info().rss, _turn(server, _expired)
        load = _turn(server, _open, requests, OVERLOAD * peak, deadline_ms)
        return Beyond(peak, load, _turn(server, _expired) - expired, process.memory_info().rss - memory)

    closed, opened = [], []
    for _ in range(OVERLOAD_ROUNDS):
        twice = beyond(_turn(server, _closed, unhurried).throughput_items_s)
        after = _turn(server, _closed, unhurried).throughput_items_s
        closed.append(twice._replace(peak=(twice.peak + after) / 2))
        loads = [_turn(server, _open, requests, share * after, deadline_ms) for share in SHARES]
        opened.append(beyond(max(load.goodput_items_s for load in loads)))
        _say(f"{name}: {closed[-1].ratio:.3f} of the closed loop's peak, {opened[-1].ratio:.3f} of the open loop's")
    unit = f"items/s answered within {deadline_ms:.0f} ms, at twice the peak against at the peak"
    key = f"serve_overload_goodput_{name}"
    return {key: _overload_row(closed, unit), f"{key}_open_loop": _overload_row(opened, unit)}


def _overload_row(rounds: list[Beyond], unit: str) -> dict[str, Any]:
    ratio, ours, theirs = (
        statistics.median(values)
        for values in zip(*((r.ratio, r.load.goodput_items_s, r.peak) for r in rounds), strict=True)
    )
    return _row(ratio, ours, theirs, unit, 0.8) | {
        "rounds": [round(r.ratio, 3) for r in rounds],
        "refused": [r.load.refused for r in rounds],
        "of_these_expired": [r.expired for r in rounds],
        "refusal_p99_ms": [round(r.load.refusal_s.get("p99", 0.0) * 1e3, 2) for r in rounds],
        "memory_grown_mib": [round(r.grown / 2**20, 1) for r in rounds],
        "generator_lag_p99_ms": [round(r.load.generator_lag_s["p99"] * 1e3, 2) for r in rounds],
    }


def _expired(port: int) -> int:
    """How many requests were taken and then missed their deadline, which their refusals had to wait for."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = re.search(r'^slim_requests_total{.*"expired"} (.*)', answer.read().decode(), re.M)
    return int(float(found[1])) if found else 0


def _images(model: Path) -> list[Any]:
    return payloads(list(checkpoint.load_manifest(model).shape.item_shape), 1, "FP32", np.random.default_rng(0))


# ---- load


def _closed(port: int, requests: list[bytes]) -> LoadResult:
    return _load(port, requests, None, SECONDS, None, CONNECTIONS)


def _open(port: int, requests: list[bytes], rate: float, deadline_ms: float | None = None) -> LoadResult:
    return _load(port, requests, rate, OPEN_SECONDS, deadline_ms, 4000)  # as many as are needed


def _load(
    port: int, requests: list[bytes], rate: float | None, seconds: float, deadline_ms: float | None, connections: int
) -> LoadResult:
    async def main() -> LoadResult:
        sender = HttpSender("127.0.0.1", port, requests, connections)
        tally = Tally()
        if rate is None:
            await closed_loop(sender.send, connections, WARMUP_S + seconds, tally)
        else:
            await open_loop(sender.send, rate, WARMUP_S + seconds, np.random.default_rng(1), tally)
        await sender.close()
        callers = connections if rate is None else None
        assert tally.began is not None
        return result_of(f"port {port}", rate, callers, 1, seconds, tally.began + WARMUP_S, deadline_ms, tally)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _our_requests(port: int, model: str, images: list[Any], constraints: Constraints = Constraints()) -> list[bytes]:  # noqa: B008
    requests = []
    for image in images:
        body, length = infer_body(image, constraints)
        fields = {"inference-header-content-length": str(length)}
        requests.append(
            request_head("POST", f"/v2/models/{model}/infer", f"127.0.0.1:{port}", len(body), fields) + body
        )
    return requests


def _their_requests(port: int, images: list[Any]) -> list[bytes]:
    requests = []
    for image in images:
        body = json.dumps({"image": base64.b64encode(image.tobytes()).decode()}).encode()
        fields = {"content-type": "application/json"}
        requests.append(request_head("POST", "/predict", f"127.0.0.1:{port}", len(body), fields) + body)
    return requests


# ---- servers


def _turn(server: Server, load: Callable[..., T], *arguments: Any) -> T:
    """A load on a server that runs only for it."""
    os.killpg(server.group, signal.SIGCONT)
    try:
        found = load(server.port, *arguments)
    finally:
        os.killpg(server.group, signal.SIGSTOP)
    if server.ours and isinstance(found, LoadResult):
        assert found.errors == 0, found.statuses
    return found


@contextlib.contextmanager
def _ours(model: Path, width: float, folder: Path, batch: int) -> Iterator[Server]:
    file = folder / "cluster.toml"
    file.write_text(CONFIG.format(model=model, width=width, batch=batch))
    with _served(file) as server:
        yield server


@contextlib.contextmanager
def _served(file: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "slim_scheduler", "serve", "-c", str(file), "--port", "0", "--grpc-port", "-1"]
    with _process(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        found = re.search(r":(\d+)", line)
        assert found, line
        yield Server(int(found[1]), process.pid)


@contextlib.contextmanager
def _litserve(model: Path, width: float, batch: int) -> Iterator[Server]:
    with litserve("benchmarks._litserve_server", model, width, batch) as server:
        yield server


@contextlib.contextmanager
def litserve(module: str, path: Path, *arguments: object) -> Iterator[Server]:
    """A LitServe program of benchmarks/, ready; it is given the path, its port and the other arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, str(path), str(port), *map(str, arguments)]
    with _process(command, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            assert time.monotonic() < until, "LitServe did not start"
            time.sleep(0.2)
        yield Server(port, process.pid, ours=False)


@contextlib.contextmanager
def _process(command: list[str], **options: Any) -> Iterator[Any]:
    """A server with its children, all ended when left: LitServe's workers outlive their parent."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cifar100(folder: Path) -> Path:
    """The paper's network with random weights, which cost what trained ones do."""
    torch.manual_seed(0)
    checkpoint.save(SlimResNet(preset_named("cifar100").architecture, "cifar100"), folder / "cifar100")
    return folder / "cifar100"


def _row(ratio: float, ours: float, theirs: float, unit: str, target: float) -> dict[str, Any]:
    return {
        "ratio": round(ratio, 3),
        "ours": round(ours, 2),
        "theirs": round(theirs, 2),
        "unit": unit,
        "target": target,
        "versions": {
            "litserve": importlib.metadata.version("litserve"),
            "uvicorn": importlib.metadata.version("uvicorn"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{torch.get_num_threads()} threads of {platform.processor() or platform.machine()}",
        },
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
