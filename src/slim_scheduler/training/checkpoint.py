"""The state of a training run on disk: parameters, optimiser, reward scale, position. Safetensors and JSON, no pickle.

A checkpoint is whole or absent: the JSON names the tensor file and its hash, and is replaced in one step. Checkpoints
lie between episodes, so that a run resumed from one goes on exactly as if it had not stopped.
"""

import hashlib
import os
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load, save

from slim_scheduler.core.errors import CheckpointError, ConfigError
from slim_scheduler.training.policy import PolicyNetwork
from slim_scheduler.training.returns import RewardScale

STATE = "state.json"


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands: `update` updates are done. `settings` fingerprints everything that the result depends on."""

    update: int
    decided: int
    scale: RewardScale
    settings: str
    tensors: str = ""
    sha256: str = ""


def write_checkpoint(
    folder: Path, state: TrainingState, network: PolicyNetwork, optimizer: torch.optim.Optimizer
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, parameter in network.p.items():
        tensors[f"policy.{name}"] = parameter.detach().contiguous()
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{kind}.{name}"] = torch.as_tensor(value).contiguous()
    content = save(tensors)
    file = f"state-{state.update}.safetensors"
    (folder / file).write_bytes(content)
    state = msgspec.structs.replace(state, tensors=file, sha256=hashlib.sha256(content).hexdigest())
    partial = folder / f"{STATE}.partial"
    partial.write_bytes(msgspec.json.encode(state))
    os.replace(partial, folder / STATE)
    for other in folder.glob("state-*.safetensors"):
        if other.name != file:
            other.unlink()


def read_checkpoint(
    folder: Path, settings: str, network: PolicyNetwork, optimizer: torch.optim.Optimizer
) -> TrainingState | None:
    """Restores the network and optimiser in place; None where there is no checkpoint.

    Raises ConfigError for a run with other settings, CheckpointError for a damaged one.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = msgspec.json.decode(path.read_bytes(), type=TrainingState)
        content = (folder / state.tensors).read_bytes()
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder} is damaged ({error}); remove it to train from the start") from None
    if hashlib.sha256(content).hexdigest() != state.sha256:
        raise CheckpointError(f"{folder / state.tensors} is damaged; remove {folder} to train from the start")
    if state.settings != settings:
        raise ConfigError(f"{folder} is of a run with other settings, files or seed; use another --out, or remove it")
    tensors = load(content)
    with torch.no_grad():
        for name, parameter in network.p.items():
            parameter.copy_(tensors[f"policy.{name}"])
            optimizer.state[parameter] = {kind: tensors[f"{kind}.{name}"] for kind in ("step", "exp_avg", "exp_avg_sq")}
    return state
