"""A trained policy on disk: `policy.safetensors` and the manifest that says what it is for. No pickle.

Written by training, read for the learned router. A folder whose parts do not agree, or that is for another network, is
refused with what differs.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import CheckpointError
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.learned.observation import Floats
from slim_scheduler.core.router.learned.router import FORMAT, LearnedRouter, PolicyManifest, learned_router

WEIGHTS, MANIFEST = "policy.safetensors", "manifest.json"
MOST_MANIFEST_BYTES = 4 << 20
HEADER_ROOM = 1 << 20  # a safetensors header names tensors; it is never near this size
MOST_NUMBER_BYTES = 8


def write_policy(folder: Path, manifest: PolicyManifest, parameters: dict[str, Floats]) -> None:
    """Writes both files; each appears under its name only when it is complete, the manifest last."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    weights = save({name: parameters[name] for name in sorted(parameters)})
    manifest = msgspec.structs.replace(manifest, sha256=hashlib.sha256(weights).hexdigest())
    text = json.dumps(msgspec.to_builtins(manifest), indent=1).encode() + b"\n"
    for name, content in ((WEIGHTS, weights), (MANIFEST, text)):
        partial = folder / f"{name}.partial"
        partial.write_bytes(content)
        os.replace(partial, folder / name)


def read_policy(folder: Path) -> tuple[PolicyManifest, dict[str, Floats]]:
    """Raises CheckpointError for what is missing, damaged, or does not belong together."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        manifest = msgspec.json.decode(_content(folder / MANIFEST, MOST_MANIFEST_BYTES), type=PolicyManifest)
        numbers = sum(math.prod(shape) for shape in manifest.sizes.shapes().values())
        weights = _content(folder / WEIGHTS, MOST_NUMBER_BYTES * numbers + HEADER_ROOM)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"policy {error.filename} does not exist; train one with `slim train`") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is not a policy's manifest: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"policy {folder} has format {manifest.format}; this version reads {FORMAT}")
    if hashlib.sha256(weights).hexdigest() != manifest.sha256:
        raise CheckpointError(f"policy {folder}: {WEIGHTS} is not the file of its manifest; train it again")
    try:
        parameters = load(weights)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} is not a safetensors file: {error}") from None
    except KeyError as error:  # a type that NumPy does not have
        raise CheckpointError(f"{folder / WEIGHTS} has a tensor of type {error.args[0]}; a policy's are F32") from None
    found = {name: tuple(values.shape) for name, values in parameters.items()}
    if found != manifest.sizes.shapes():
        raise CheckpointError(f"policy {folder}: its tensors do not have the sizes of its manifest; train it again")
    return manifest, parameters


def _content(path: Path, most: int) -> bytes:
    size = path.stat().st_size
    if size > most:
        raise CheckpointError(f"{path} has {size} bytes, at most {most} are read; train the policy again")
    return path.read_bytes()


def load_router(
    path: Path, facts: RouterFacts, accuracy: Callable[[], AccuracyTable], name: str = "", sample: bool = False
) -> LearnedRouter:
    """The router of a policy folder in a run with these facts. Raises CheckpointError."""
    manifest, parameters = read_policy(path)
    return learned_router(manifest, parameters, facts, accuracy, name or f"ppo:{path}", sample)
