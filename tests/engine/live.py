"""A tiny network with random weights, configurations of live servers, and a recorder that tests can wait on."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slim_scheduler.core.messages import Message
from slim_scheduler.core.profile import Latency, Profile
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.shape import shape_of
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.setup.config import Config, config_from
from tests.sim.devices import small_profile

TOLERANCE = 1e-4  # batched against single, guarantee 15


def tiny_network(seed: int = 0) -> SlimResNet:
    torch.manual_seed(seed)
    architecture = Architecture(
        item_shape=(1, 8, 8),
        classes=10,
        channels=(8, 8, 16, 16),
        blocks=(1, 1, 1, 1),
        strides=(1, 2, 1, 2),
        stem_channels=8,
        channels_per_group=2,
    )
    return SlimResNet(architecture, "tiny").eval().requires_grad_(False)


torch.set_num_threads(1)  # as the engine's own threads: more would fight them for the cores
NETWORK = tiny_network()
SHAPE = shape_of(NETWORK)


def config_of(servers: Sequence[dict[str, Any]] = ({},), **parts: Any) -> Config:
    """Servers named a, b, c, ... on the CPU, with what each differs in."""
    tree: dict[str, Any] = {"router": {"name": "jsq:random", "fallback": "jsq:0.5"}, **parts}
    tree["servers"] = [
        {"name": "abcdef"[i], "device": "cpu", "vram_budget_gib": 0.5, **server} for i, server in enumerate(servers)
    ]
    return config_from(tree)


def made_up_profile() -> Profile:
    """Of the tiny network: orders other than first come first served need one."""
    rows = [
        Latency(segment, previous, width, (0.001 * width, 0.008 * width))
        for segment in range(SHAPE.segments)
        for previous in (SHAPE.widths if segment else (None,))
        for width in SHAPE.widths
    ]
    return small_profile(model=SHAPE.name, latency_rows=tuple(rows))


def engine_of(config: Config, **options: Any) -> SlimEngine:
    return SlimEngine(config, NETWORK, SHAPE, **options)


def images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, *SHAPE.item_shape), dtype=np.float32)


def expected(items: np.ndarray, widths: Sequence[float]) -> np.ndarray:
    """The whole network's own answer."""
    with torch.inference_mode():
        return NETWORK(torch.from_numpy(items), widths).numpy()


class Watch:
    """Keeps every step, and wakes a test when a message that it waits for has passed."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float, Message, list[Message]]] = []
        self._waiting: list[tuple[Callable[[str, Message], bool], asyncio.Future[float]]] = []

    def step(self, machine: str, now: float, event: Message, commands: Sequence[Message]) -> None:
        self.steps.append((machine, now, event, list(commands)))
        for message in (event, *commands):
            for wanted, future in self._waiting:
                if not future.done() and wanted(machine, message):
                    future.set_result(now)

    def seen(self, kind: type) -> list[Any]:
        return [m for _, _, event, commands in self.steps for m in (event, *commands) if isinstance(m, kind)]

    async def until(self, wanted: Callable[[str, Message], bool]) -> float:
        """When the first message from now on came that is wanted."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, future))
        return await asyncio.wait_for(future, 30)
