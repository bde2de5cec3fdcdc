"""What commands print: results on stdout, progress on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Show(Protocol):
    """Moves a bar: the share done in [0, 1], and what is going on."""

    def __call__(self, share: float, now: str = "") -> None: ...


TABLE_WIDTH = 150  # where the output is no terminal


def console() -> "Console":
    from rich.console import Console

    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=TABLE_WIDTH)


def print_json(content: Any) -> None:
    import json

    print(json.dumps(content, indent=1))


@contextmanager
def progress(what: str) -> Iterator[Show]:
    """A bar with the time left, gone when the work is done; a line for every tenth where there is no terminal."""
    from rich.console import Console

    err = Console(stderr=True)
    if not err.is_terminal:
        yield _tenths(what)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=1.0)

        def show(share: float, now: str = "") -> None:
            bar.update(task, completed=share, description=f"{what} {now}".strip())

        yield show


def _tenths(what: str) -> Show:
    said = -1

    def show(share: float, now: str = "") -> None:
        nonlocal said
        if int(share * 10) > said:
            said = int(share * 10)
            print(f"{what}: {10 * said} %", file=sys.stderr, flush=True)

    return show
