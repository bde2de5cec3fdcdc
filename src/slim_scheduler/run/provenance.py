"""Where a stored number comes from: the commit it was made at, and the versions of what made it."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def measured_commit(folder: Path, *written: str) -> str:
    """The commit that is checked out in `folder`, and whether its tracked files are changed; `unknown` without git.

    `written`: files and folders, relative to `folder`, that the measurement itself writes; they are not looked at.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        others = (":(top)", *(f":(exclude){path}" for path in written))
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *others)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with uncommitted changes" if changed else commit


def versions(*packages: str) -> dict[str, str]:
    """Python's, and those of installed packages."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
