"""The state of a training run as one safetensors file: weights, momentum, average, step, history. No pickle.

Randomness is not in it: every step draws from a generator seeded by (run seed, step), so the step number is the whole
random state, and a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slim_scheduler.core.errors import CheckpointError


class EpochRecord(msgspec.Struct, frozen=True):
    """One point of the training curve. `top1`: share right on held-out training images, per uniform width."""

    epoch: float
    seconds: float
    loss: float
    image_size: int
    top1: dict[str, float]


class RunState(msgspec.Struct, kw_only=True):
    """Where a run stands. `identity` is what must be the same for a resumed run."""

    identity: str
    step: int = 0
    seconds: float = 0.0
    history: list[EpochRecord] = msgspec.field(default_factory=list)


def write_state(path: Path, state: RunState, tensors: Mapping[str, Tensor]) -> None:
    """Writes atomically: an interruption leaves the previous state whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        partial,
        metadata={"state": msgspec.json.encode(state).decode()},
    )
    os.replace(partial, path)


def read_state(path: Path, identity: str, tensors: Mapping[str, Tensor]) -> RunState | None:
    """Fills `tensors` from the file and returns the state; None where there is no file.

    Raises CheckpointError for an unreadable file, or one of another preset, seed or data.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            state = msgspec.json.decode(json.dumps(json.loads(file.metadata()["state"])), type=RunState)
            if state.identity != identity:
                raise CheckpointError(
                    f"{path} belongs to the run {state.identity}, not to {identity}; choose another --out or remove it"
                )
            for name, tensor in tensors.items():
                tensor.data.copy_(file.get_tensor(name))
    except (SafetensorError, KeyError, TypeError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} is no usable training state ({error}); remove it to start over") from None
    return state
