"""ARCHITECTURE.md says what the code says: files and names exist, moves of states are the code's."""

import re
from pathlib import Path

import pytest

from slim_scheduler.core.dispatch import outliers
from slim_scheduler.core.server import instances
from slim_scheduler.serve.http import connection

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "slim_scheduler"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
MACHINES = {
    "instance": instances.MOVES,
    "standing of a server": outliers.MOVES,
    "HTTP connection": connection.MOVES,
}


def moves_of_the_page() -> dict[str, dict[str, set[str]]]:
    """Machine -> state -> the states it goes to; what stands in brackets is for readers."""
    table: dict[str, dict[str, set[str]]] = {}
    machine = ""
    for line in PAGE[PAGE.index("| machine | state |") :].split("\n\n")[0].splitlines()[2:]:
        cells = [re.sub(r"\(.*?\)", "", cell).strip() for cell in line.strip("|").split("|")]
        machine = cells[0] or machine
        table.setdefault(machine, {})[cells[1]] = {state.strip() for state in cells[2].split(",")}
    return table


def test_every_move_of_a_state_is_the_codes():
    of_the_code = {
        machine: {
            state.name.lower(): {after.name.lower() for after in following}
            for state, following in moves.items()
            if following
        }
        for machine, moves in MACHINES.items()
    }
    assert moves_of_the_page() == of_the_code


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))))
def test_every_file_and_folder_of_the_page_is_there(path):
    part_of_the_dispatcher = PACKAGE / "core" / "dispatch" / path
    assert any(place.exists() for place in (PACKAGE / path, ROOT / path, part_of_the_dispatcher)), path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("_lose", "core/dispatch/membership.py"),
        ("COMPILED", "setup/machines.py"),
        ("LAYOUT", "core/router/learned/layout.py"),
        ("StoredNetwork", "model/protocol.py"),
        ("NETWORKS", "model/checkpoint.py"),
        ("absorb", "core/dispatch/dispatcher.py"),
        ("RouteNow", "core/messages.py"),
    ],
)
def test_every_name_of_the_page_is_where_it_says(name, file):
    assert f"`{name}`" in PAGE
    assert re.search(rf"(^|def |class ){name}\b", (PACKAGE / file).read_text(), re.MULTILINE), name


def test_the_layers_are_import_linters():
    linter = re.search(r"^layers = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert linter is not None
    ordered = [set(re.split(r" \| ", layer)) for layer in re.findall(r'"(.*?)"', linter[1])][1:]
    rows = PAGE[PAGE.index("| layer | what it owns |") :].split("\n\n")[0].splitlines()[2:]
    assert [set(re.findall(r"`(\w+)/`", row.split("|")[1])) for row in rows] == ordered
