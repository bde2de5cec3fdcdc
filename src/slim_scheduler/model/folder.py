"""Opens a model folder, whatever it holds: a slimmable network's checkpoint, or a family."""

from pathlib import Path

from slim_scheduler.model import checkpoint
from slim_scheduler.model.checkpoint import Manifest
from slim_scheduler.model.family import FamilyManifest, is_family, load_family, load_family_manifest
from slim_scheduler.model.protocol import SlimmableModel


def load_model(folder: str | Path) -> SlimmableModel:
    """The network of a folder, with every hash checked. Raises CheckpointError, one line."""
    return load_family(folder) if is_family(folder) else checkpoint.load(folder)


def load_manifest(folder: str | Path) -> Manifest | FamilyManifest:
    """What a model folder says of itself. Raises CheckpointError, one line."""
    return load_family_manifest(folder) if is_family(folder) else checkpoint.load_manifest(folder)
