"""The documents: links and named tests exist, and lines end where the code's do."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = 120
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
PAGES = LISTED.split() or [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
MADE = re.compile(r"<!-- results: .*?<!-- /results -->", re.DOTALL)  # tables, as wide as their figures


@pytest.mark.parametrize("page", PAGES)
def test_no_line_is_longer_than_the_codes(page: str) -> None:
    text = MADE.sub("", (ROOT / page).read_text())
    assert not [line for line in text.splitlines() if len(line) > LINE]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_into_the_project_leads_to_a_file(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_every_test_that_a_guarantee_names_is_there() -> None:
    text, named = "", 0
    for file, name in re.findall(r"`(\w+/test_\w+\.py)?(?:::(test_\w+))?`", (ROOT / "docs/guarantees.md").read_text()):
        if file:
            text = (ROOT / "tests" / file).read_text()
        if name:
            assert f"def {name}(" in text, f"{file}::{name}"
            named += 1
    assert named > 20
