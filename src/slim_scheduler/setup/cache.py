"""The user's cache: what can be made again at any time, under a name that says what it was made of. Its files, and
others, are written whole."""

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`$XDG_CACHE_HOME/slim-scheduler/KIND`, or under ~/.cache. It may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "slim-scheduler" / kind


def write_whole(path: Path, content: bytes) -> None:
    """Whole or not at all, also where several processes write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
