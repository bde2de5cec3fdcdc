"""Slim Scheduler: serves one slimmable network at several widths on several unequal devices.

`from slim_scheduler import SlimEngine` serves in process, without a network in between.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import SlimEngine as SlimEngine

__all__ = ["SlimEngine"]


def __getattr__(name: str) -> Any:
    """Imports the engine when somebody asks for it: torch takes seconds, and most commands do without."""
    if name == "SlimEngine":
        from slim_scheduler.engine.engine import SlimEngine

        return SlimEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
