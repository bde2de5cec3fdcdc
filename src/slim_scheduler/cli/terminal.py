"""What commands print: results on stdout, progress on stderr."""

import json
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
    print(json.dumps(content, indent=1))


@contextmanager
def progress(what: str) -> Iterator[Show]:
    """A bar with the time left, gone when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    err = Console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=1.0)

        def show(share: float, now: str = "") -> None:
            bar.update(task, completed=share, description=f"{what} {now}".strip())

        yield show
