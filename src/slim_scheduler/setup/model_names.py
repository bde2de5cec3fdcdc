"""What a model may be called: its folder's name, which clients write into addresses."""

import os
import re
from pathlib import Path

from slim_scheduler.core.errors import CheckpointError

LONGEST_NAME = 64
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{LONGEST_NAME - 1}}}")


def model_folder(path: str | Path) -> Path:
    """A model's folder, absolute, its last part the model's name: a link there keeps its own name, and `..` after a
    link is where that leads.
    """
    folder = Path(path).absolute()
    return Path(os.path.realpath(folder)) if folder.name == ".." else folder


def model_name(folder: str | Path) -> str:
    """The name that a model folder gives, there or not. Raises CheckpointError."""
    name = model_folder(folder).name
    if not NAME.fullmatch(name):
        raise CheckpointError(
            f"folder {folder}: {name!r} cannot be a model's name; choose one of at most {LONGEST_NAME} letters, "
            "digits, '_', '.' and '-' that begins with a letter or a digit"
        )
    return name
