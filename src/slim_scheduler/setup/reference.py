"""docs/configuration.md, made from what the configuration's fields say of themselves.

`python -m slim_scheduler.setup.reference` writes it; a test says when it is stale.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from slim_scheduler.setup.config import documented, sections, values_of

PAGE = Path("docs/configuration.md")
TIERS = {
    "user": "Everybody who serves or measures turns these.",
    "paper": "These reproduce the paper, or depart from it.",
    "expert": "These are for who knows the code; the defaults were chosen by measurement (decisions.md).",
}
HEAD = """# Configuration

A run's configuration is one TOML file. A flag overrides a key: `--set servers.0.max_batch=64`. An unknown key is an
error that names the nearest valid one, and a value out of its bounds one that names the bound. Each line has a key, its
values, its default and its meaning. A key that is gone is refused with what to do instead.
A relative path in the file is one from the file's folder if there is such a thing, else from the working directory, as
those of `--set` and flags are.
`slim doctor --config FILE` explains what a file comes to.

This page is made from the fields themselves (`python -m slim_scheduler.setup.reference`).
"""


def page() -> str:
    """The whole page as Markdown: per tier the sections, per section an entry for each key."""
    parts = [HEAD]
    for tier, says in TIERS.items():
        parts.append(f"## Keys of the {tier}\n\n{says}\n")
        for section, kind, several in sections():
            rows = list(_rows(kind, tier))
            if rows:
                name = f"[[{section}]]" if several else f"[{section}]"
                doc = (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")
                parts.append("\n".join([f"### `{name}`\n\n{doc}\n", *rows]) + "\n")
    return "\n".join(parts)


def _rows(kind: type[msgspec.Struct], tier: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    empty = {field.name for field in msgspec.structs.fields(kind) if field.default_factory is not msgspec.NODEFAULT}
    for name, meta in documented(kind):
        if meta.extra["tier"] != tier:
            continue
        default = " = none" if name in empty else _default(defaults[name])
        line = f"- **`{name}`**{default} ({values_of(hints[name], meta.extra['bounds'])}): {meta.description}"
        yield textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return ", required"
    if value is None:
        return " = none"
    if isinstance(value, tuple):
        return f" = `[{', '.join(f'{v:g}' for v in value)}]`"
    shown = f"{value:g}" if isinstance(value, float) else json.dumps(value)
    return f" = `{shown}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
