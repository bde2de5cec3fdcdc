"""The page holds everything itself, says where its numbers come from, and shows every router."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slim_scheduler.report.page import write_report
from slim_scheduler.report.run_folder import RunFolder


@pytest.fixture(scope="module")
def page(runs: list[RunFolder], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(runs, path)
    return path.read_text()


class Tags(HTMLParser):
    """Remembers every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_asks_nobody_for_anything(page: str) -> None:
    tags = Tags(page).found
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    targets = [
        value for _, attributes in tags for key, value in attributes.items() if key in ("href", "src", "xlink:href")
    ]
    assert all(target and target.startswith("#") for target in targets)
    assert not re.search(r"url\((?!#)|@import|@font-face", page)


def test_every_figure_and_table_says_that_it_is_simulated_and_its_energy_estimated(page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, re.S)
    tables = re.findall(r"<table>.*?</table>", page, re.S)
    assert len(svgs) == 5
    assert tables
    assert all("simulated · energy: estimated" in part for part in (*svgs, *tables))


def test_ids_of_figures_do_not_clash(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Tags(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', page))
    assert used <= set(ids)


def test_figures_are_whole_svg_in_the_colours_of_the_page(page: str) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        root = ET.fromstring(svg.replace("xlink:href", "href"))
        assert root.attrib["viewBox"]
        assert root.attrib["aria-label"]
    assert "var(--s0)" in page
    assert "prefers-color-scheme: dark" in page


def test_every_router_has_a_row_and_figures(page: str) -> None:
    for router in ("jsq:0.5", "random"):
        assert f"</i>{router}</th>" in page
        assert page.count(f"<b>{router}</b>") == 2


def test_unknown_figures_are_left_out_and_not_zero(page: str) -> None:
    # The small cluster has no accuracy table: no figure against accuracy, and a dash in the table.
    assert "Accuracy against" not in page
    assert "<td>–</td>" in page


def test_names_are_escaped(runs: list[RunFolder], tmp_path: Path) -> None:
    write_report(runs[:1], tmp_path / "report.html", title="a <b> & c")
    assert "<title>a &lt;b&gt; &amp; c</title>" in (tmp_path / "report.html").read_text()


def test_a_width_that_ran_in_the_warm_up_only_is_drawn(runs: list[RunFolder], tmp_path: Path) -> None:
    run = RunFolder(runs[0].path)
    run.summary["width_share"] = {"0.75": 1.0}  # none of those that its record has
    write_report([run], tmp_path / "report.html")
    assert "The widths at which its tasks ran." in (tmp_path / "report.html").read_text()
