from pathlib import Path

import msgspec

from slim_scheduler.setup.config import documented
from slim_scheduler.setup.reference import page, sections

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_fields_say():
    assert (ROOT / "docs/configuration.md").read_text() == page(), "run python -m slim_scheduler.setup.reference"


def test_every_key_says_what_it_is_and_whose():
    for section, kind, _ in sections():
        for name, meta in documented(kind):
            assert meta.description, f"{section}.{name} says nothing"
            assert meta.extra["tier"] in ("user", "paper", "expert")


def test_every_bound_holds_for_the_default():
    for section, kind, _ in sections():
        defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
        for name, meta in documented(kind):
            value, bounds = defaults[name], meta.extra["bounds"]
            if bounds and value is not None and value is not msgspec.NODEFAULT:
                assert bounds.get("least", value) <= value <= bounds.get("most", value), f"{section}.{name}"
                assert value > bounds.get("above", float("-inf")), f"{section}.{name}"
