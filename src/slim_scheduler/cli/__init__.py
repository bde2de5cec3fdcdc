"""The command line, `slim`. Commands import what they need when they run: `slim --help` starts at once.

Exit codes: 0 done, 1 failed (no request of a load was answered, a worker process was killed, a batch of a server that
ends hangs), 2 bad input or configuration (one line on stderr), 130 interrupted (what was done is written).
"""

import gc
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from slim_scheduler.cli import bound, comparing, family, machine, model, plan, running, serving, training

INTERRUPTED = 130
BAD_INPUT = 2
FAILED = 1

app = typer.Typer(
    name="slim",
    help="Serve one slimmable network at several widths on several unequal devices.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"slim-scheduler {version('slim-scheduler')}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version and exit.")
    ] = False,
) -> None:
    gc.enable()  # a command runs; __main__ says why it is off


comparing.add_demo(app)
model.add(app)
family.add(app)
running.add(app)
comparing.add(app)
bound.add(app)
plan.add(app)
training.add(app)
serving.add(app)
machine.add(app)


# Typer brings its own copy of click, or uses the installed one, by version; this is the base of either's errors.
UsageErrors: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Entry point of `slim`: runs a command and turns errors that are no defect of ours into one line."""
    from slim_scheduler.core.errors import InputError, OutOfMemoryError, WorkerLostError

    # A shell's script starts a background command with SIGINT ignored; who sends it one means it to stop all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except UsageErrors as error:
        _stop(BAD_INPUT, error.format_message())
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("slim_scheduler"):
            raise
        from slim_scheduler.cli.extras import sentence

        _stop(
            BAD_INPUT, sentence(next((word for word in sys.argv[1:] if not word.startswith("-")), "slim"), error.name)
        )
    except OSError as error:
        _stop(BAD_INPUT, f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (InputError, OutOfMemoryError) as error:
        _stop(BAD_INPUT, str(error))
    except WorkerLostError as error:
        _stop(FAILED, str(error))
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code
        _stop(INTERRUPTED, "interrupted; what was written so far stays")
    sys.exit(code if isinstance(code, int) else 0)


def _stop(code: int, message: str) -> NoReturn:
    print(f"slim: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
