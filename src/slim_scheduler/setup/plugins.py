"""Classes that a user brings, found by name: a network's or a router's.

A name is one of ours, an entry point of an installed package, or `module:Class`. A module is imported from where Python
finds modules (installed, or on PYTHONPATH), never from a model's folder, and what it gives must offer the methods that
its caller names: any other class or function is refused before it is called.
"""

import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from slim_scheduler.core.errors import InputError

MODULE_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_class_name(name: str, group: str) -> bool:
    """Whether a name has the form `module:Class` or is an entry point of the group."""
    return bool(MODULE_CLASS.fullmatch(name)) or name in entry_points(group=group).names


def find_class(
    name: str, group: str, ours: Mapping[str, str], methods: Sequence[str], not_from: Path | None = None
) -> Any:
    """The class of a name. `ours` are `module:Class` by short name; `group` is the entry points' group.

    Raises InputError for a name that is unknown, whose module lies in the folder `not_from`, that cannot be imported,
    or is a class without one of `methods`.
    """
    target = ours.get(name)
    if target is None:
        entry = next(iter(entry_points(group=group, name=name)), None)
        target = entry.value if entry is not None else name
    if not MODULE_CLASS.fullmatch(target):
        there = ", ".join([*ours, *sorted(entry_points(group=group).names)])
        raise InputError(
            f"{name} is unknown; give module:Class or the name of an entry point of {group}; there is {there or 'none'}"
        )
    module_name, _, class_name = target.partition(":")
    if not_from is not None and name not in ours:
        _check_place(name, module_name, not_from)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name}: no module {error.name}; install it, or put its folder on PYTHONPATH (PYTHONPATH=. is this folder)"
        ) from None
    except AttributeError:
        raise InputError(f"{name}: module {module_name} has no {class_name}") from None
    lacking = [method for method in methods if not hasattr(found, method)]
    if not isinstance(found, type) or lacking:
        what = f"has no {', '.join(lacking)}" if lacking else "is no class"
        raise InputError(f"{name} {what}; it must offer {', '.join(methods)}")
    return found


def _check_place(name: str, module_name: str, not_from: Path) -> None:
    """Raises InputError where a module, or a package that it is in, is a file of `not_from`. Imports nothing."""
    folder = not_from.resolve()
    first, *rest = module_name.split(".")
    try:
        spec = importlib.util.find_spec(first)  # of a name without dots, it imports nothing
    except ValueError:  # the running program itself
        return
    for part in (*rest, None):
        if spec is None:
            return
        if spec.has_location and spec.origin is not None:
            file = Path(spec.origin)
            if any(path.resolve().is_relative_to(folder) for path in (file, *file.parents)):
                raise InputError(
                    f"{name} is code of the model's own folder ({file}), which is never run; move it out of {not_from}"
                )
        if part is not None:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))


def name_of(kind: type, group: str, ours: Mapping[str, str]) -> str:
    """The name under which `find_class` finds a class again. Raises InputError for one that nobody could import."""
    target = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or not MODULE_CLASS.fullmatch(target):
        raise InputError(
            f"class {kind.__qualname__} of {kind.__module__} cannot be imported by name; "
            "put it at the top level of a module of its own"
        )
    known = {**{value: name for name, value in ours.items()}, **{e.value: e.name for e in entry_points(group=group)}}
    return known.get(target, target)
