"""A trained policy on disk: `policy.safetensors` and the manifest that says what it is for. No pickle.

Written by training, read by the learned router and by `slim doctor`. A folder whose parts do not agree, or that is for
another network, is refused with what differs.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from slim_scheduler.core.errors import CheckpointError
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.networks import NetworkSizes
from slim_scheduler.core.router.observation import Floats
from slim_scheduler.core.types import Seconds, Width

WEIGHTS, MANIFEST = "policy.safetensors", "manifest.json"
FORMAT = 1


class PolicyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy was made for. `batch_time` is the unit of its times; `training` and `reward` are for readers."""

    format: int = FORMAT
    kind: Literal["paper", "extended"]
    network: str
    segments: int
    widths: tuple[Width, ...]
    groups: tuple[int, ...]
    sizes: NetworkSizes
    batch_time: Seconds
    sha256: str = ""
    reward: dict[str, Any] = {}
    training: dict[str, Any] = {}

    def check_fits(self, facts: RouterFacts, path: Path) -> None:
        """Raises CheckpointError where the policy is for another network or other choices."""
        shape = facts.shape
        for name, mine, theirs in (
            ("network", self.network, shape.name),
            ("segments", self.segments, shape.segments),
            ("widths", self.widths, shape.widths),
            ("groups", self.groups, facts.groups),
        ):
            if mine != theirs:
                raise CheckpointError(
                    f"policy {path} is for {name} {mine}, but this run has {theirs}; train one with `slim train`"
                )


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
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PolicyManifest)
        weights = (folder / WEIGHTS).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"policy {error.filename} does not exist; train one with `slim train`") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{folder / MANIFEST} is not a policy's manifest: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"policy {folder} has format {manifest.format}; this version reads {FORMAT}")
    if hashlib.sha256(weights).hexdigest() != manifest.sha256:
        raise CheckpointError(f"policy {folder}: {WEIGHTS} is not the file of its manifest; train it again")
    try:
        parameters = load(weights)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} is not a safetensors file: {error}") from None
    found = {name: tuple(values.shape) for name, values in parameters.items()}
    if found != manifest.sizes.shapes():
        raise CheckpointError(f"policy {folder}: its tensors do not have the sizes of its manifest; train it again")
    return manifest, parameters
