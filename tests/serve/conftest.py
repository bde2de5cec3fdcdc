"""A real server in a process of its own, as users run it, and the digits' card for tests without one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.metadata import ModelCard

ROOT = Path(__file__).parents[2]
CONFIG = """
[model]
path = "{model}"

[[servers]]
name = "a"
device = "cpu"

[[servers]]
name = "b"
device = "cpu"
slowdown = {slowdown}

[dispatch]
max_waiting_items = {waiting}

[router]
name = "{router}"
"""
STARTED = re.compile(
    r"serving (\S+) on (https?)://(\S+?):(\d+)(?:, gRPC on \S+?:(\d+))?(?:, management on \S+?:(\d+))?"
    r"(?:, management over gRPC on \S+?:(\d+))?$"
)


class Running(msgspec.Struct):
    """A server's process and where it listens."""

    process: "subprocess.Popen[str]"
    http: int
    grpc: int
    management: int
    management_grpc: int
    errors: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    config: dict[str, object] | None = None,
    module: str = "slim_scheduler",
    **environment: str,
) -> Iterator[Running]:
    """`slim serve` with free ports; stopped when left. `module` is run instead of ours."""
    values = {"model": ROOT / "models/digits", "router": "jsq:0.5", "waiting": 2000, "slowdown": 1.0}
    file = folder / "cluster.toml"
    file.write_text(CONFIG.format(**values | (config or {})))
    command = [
        sys.executable,
        "-m",
        module,
        "serve",
        "--config",
        str(file),
        "--port",
        "0",
        "--grpc-port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "--management-port", "0", "--management-grpc-port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        cwd=ROOT,
    )
    errors: list[str] = []
    assert process.stderr is not None
    assert process.stdout is not None
    threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True).start()
    try:
        line = process.stdout.readline().strip()
        started = STARTED.fullmatch(line)
        assert started, f"the server did not start, exit {process.wait(20)}: {line} {errors}"
        page = f"{started[2]}://{started[3].replace('0.0.0.0', '127.0.0.1')}:{started[4]}/"
        assert process.stdout.readline() == f"live page: {page}\n"
        running = Running(process, *(int(port or 0) for port in started.groups()[3:]), errors)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # without the drain delay
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture
def card() -> ModelCard:
    return ModelCard("digits", (1, 8, 8), "NCHW", 10, 4, (0.25, 0.5, 0.75, 1.0), tuple("0123456789"))


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def images() -> np.ndarray:
    """Three different inputs, normalised."""
    return np.random.default_rng(7).standard_normal((3, 1, 8, 8), dtype=np.float32)
