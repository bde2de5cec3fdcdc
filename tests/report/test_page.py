"""The page holds everything itself, says where its numbers come from, and shows every router."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from slim_scheduler.report.figures import WINDOWS, accuracy_against, alike, over_time
from slim_scheduler.report.page import tables, write_report
from slim_scheduler.report.run_folder import RunFolder, by_router, shown
from slim_scheduler.run.frontier import distances, hulls
from slim_scheduler.run.runs import simulated_run
from slim_scheduler.setup.config import load_config, with_overrides
from tests.sim.clusters import small_cluster

ROOT = Path(__file__).parents[2]


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
    assert len(svgs) == 6
    assert tables
    assert all("simulated · energy: estimated" in part for part in (*svgs, *tables))


def test_ids_of_figures_do_not_clash(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Tags(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', page))
    assert used <= set(ids)


def test_runs_without_arrivals_have_a_page(tmp_path: Path) -> None:
    quiet = {"rate": 0.05, "duration_s": 1.0, "data": "made-up"}
    config = small_cluster(tmp_path / "model", [{}], workload=quiet)
    assert simulated_run(config, "jsq:0.5", 0, tmp_path / "run")["items_arrived"] == 0
    write_report([RunFolder(tmp_path / "run")], tmp_path / "page.html")
    assert "accuracy, %" in (tmp_path / "page.html").read_text()


def test_the_first_picture_is_of_one_seed_or_says_that_it_is_not(runs: list[RunFolder]) -> None:
    found, same = alike(by_router(reversed(runs)))
    assert same
    assert {run.summary["seed"] for run in found.values()} == {0}
    others, same = alike(by_router(runs[1:]))
    assert not same
    assert sorted(run.summary["seed"] for run in others.values()) == [0, 1]


def test_figures_are_whole_svg_in_the_colours_of_the_page(page: str) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        root = ET.fromstring(svg.replace("xlink:href", "href"))
        assert root.attrib["viewBox"]
        assert root.attrib["aria-label"]
    assert "var(--s0)" in page
    assert "prefers-color-scheme: dark" in page


def test_the_first_picture_is_load_widths_latency_and_accuracy_over_time(page: str) -> None:
    first = re.findall(r"<svg.*?</svg>", page, re.S)[0]
    assert page.index("<svg") < page.index("<table")
    for label in ("load, items/s", "mean width", "p99, ms", "accuracy, %", "jsq:0.5", "random"):
        assert label in first


def test_items_that_were_refused_count_in_p99_with_their_age_at_the_runs_end(tmp_path: Path) -> None:
    workload = {"rate": 1000.0, "duration_s": 2.0, "data": "made-up"}  # some 150 items/s are carried
    config = small_cluster(tmp_path / "model", workload=workload, dispatch={"max_waiting_items": 1})
    summary = simulated_run(config, "jsq:1", 0, tmp_path / "run")
    assert summary["items_rejected"] > summary["items_arrived"] / 2
    slow = over_time({"jsq:1": [RunFolder(tmp_path / "run")]}).axes[2].get_lines()[0].get_ydata()
    window_ends = np.linspace(0.0, 2.0, WINDOWS + 1)[1:]
    assert (np.asarray(slow) >= 1000 * (summary["duration_s"] - window_ends) - 1e-6).all()


def late(run: RunFolder, lag: float) -> RunFolder:
    changed = RunFolder(run.path)
    changed.summary = {**run.summary, "mode": "live", "generator_lag_s": {"p99": lag}}
    return changed


def test_a_run_that_is_not_valid_is_marked_in_every_table_and_picture(runs: list[RunFolder], tmp_path: Path) -> None:
    write_report([late(runs[0], 0.012), late(runs[2], 0.001)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "† Latencies of 1 of 2 runs are not valid" in page
    for table in re.findall(r"<table>.*?</table>", page, re.S):
        assert "jsq:0.5 †</th>" in table
        assert "random</th>" in table
    compared = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.S) if ">random<" in svg]
    assert len(compared) == 2  # over time, and the latency curves
    assert all("jsq:0.5 †" in svg for svg in compared)
    assert page.count("<b>jsq:0.5 †</b>") == 2


def test_a_policy_is_named_by_its_folder_where_that_is_enough(runs: list[RunFolder]) -> None:
    def named(*routers: str) -> list[str]:
        made = []
        for router in routers:
            made.append(late(runs[0], 0.0))
            made[-1].summary["router"] = router
        return list(shown(by_router(made)))

    assert named("ppo:a/policies/adaptive", "lp") == ["ppo:…/adaptive", "lp"]
    assert named("ppo:a/one", "ppo:b/one") == ["ppo:a/one", "ppo:b/one"]


def seeds(run: RunFolder, router: str, **changes: list[float]) -> list[RunFolder]:
    """Three runs of a router whose summaries differ in these keys."""
    made = []
    for seed in range(3):
        copy = RunFolder(run.path)
        copy.summary = {**run.summary, "router": router, "seed": seed}
        for key, values in changes.items():
            copy.summary[key] = {**run.summary[key], "mean": values[seed]} if key == "latency_s" else values[seed]
        made.append(copy)
    return made


def tables_of(*runs: RunFolder) -> str:
    return "".join(tables(shown(by_router(runs))))


def test_bold_is_only_what_is_better_than_every_other_by_more_than_noise(runs: list[RunFolder]) -> None:
    one = seeds(runs[0], "one", accuracy=[0.91, 0.93, 0.92], latency_s=[0.010, 0.030, 0.020])
    two = seeds(runs[0], "two", accuracy=[0.81, 0.83, 0.82], latency_s=[0.020, 0.011, 0.021])
    results = tables_of(*one, *two).partition("</table>")[0]
    assert re.findall(r'<td class="best">([\d.]+)', results) == ["92.00"]


def test_one_run_each_shows_nothing_in_bold(runs: list[RunFolder]) -> None:
    assert 'class="best"' not in tables_of(runs[0], runs[2])


def test_energy_that_proves_nothing_has_no_bold_and_no_chart(page: str, runs: list[RunFolder]) -> None:
    def both(source: str) -> str:
        made = [
            *seeds(runs[0], "one", energy_per_item_j=[0.01, 0.011, 0.012]),
            *seeds(runs[0], "two", energy_per_item_j=[0.02, 0.021, 0.022]),
        ]
        for run in made:
            run.summary["energy_source"] = source
        return tables_of(*made)

    assert 'class="best">11.0' in both("counter")
    assert 'class="best"' not in both("estimated")
    assert "against energy" not in page


def test_numbers_of_a_column_have_the_same_digits(runs: list[RunFolder]) -> None:
    made = [*seeds(runs[0], "one"), *seeds(runs[0], "two")]
    for i, run in enumerate(made):
        run.summary["reward"] = {"mean": 0.00131 + 0.000039 * i, "sd": 0.0}
    blocks = re.search(r"<h2>Blocks</h2>.*?</table>", tables_of(*made), re.S)
    assert blocks is not None
    assert re.findall(r"0\.00\d{3,}", blocks[0]) == ["0.00135", "0.00010", "0.00147", "0.00010"]


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


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """One router that never runs an item twice and one that does, on the demo's servers."""
    folder = tmp_path_factory.mktemp("twice")
    config = load_config(ROOT / "examples/demo/cluster.toml", ["workload.duration_s=3", "workload.warmup_s=0.3"])
    for router in ("jsq:0.25", "jsq:0.25+1@0.4"):
        simulated_run(config, router, 0, folder / router)
    return [RunFolder(path) for path in sorted(folder.iterdir())]


def test_second_passes_are_counted_and_drawn(twice: list[RunFolder], page: str, tmp_path: Path) -> None:
    once, again = twice
    assert once.summary["second_pass_share"] == 0
    ended = again.record.of("ItemOutcome")
    measured = again.record.info.started_at + again.config.workload.warmup
    rows = list(
        zip(ended["arrival"].to_pylist(), ended["passes"].to_pylist(), ended["margin"].to_pylist(), strict=True)
    )
    passes = [ran for arrival, ran, _ in rows if arrival >= measured]
    assert again.summary["second_pass_share"] == pytest.approx(passes.count(2) / len(passes))
    assert 0 < again.summary["second_pass_share"] < 1
    assert all((margin < 0.4) == (ran == 2) for _, ran, margin in rows)
    write_report(twice, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    for said in ("How sure first answers were", "run again", "bound, one pass", "bound, one or two passes"):
        assert said in text
        assert said not in page


def test_the_bound_is_drawn_at_the_load_that_came(twice: list[RunFolder]) -> None:
    run = RunFolder(twice[1].path)
    half = ("workload.kind=steps", "workload.steps=[[60, 0.5]]", f"workload.rate={2 * run.config.workload.rate}")
    run.config = with_overrides(run.config, half)  # the same load, told otherwise
    measured = run.summary["measured_s"]
    for key in ("duration_s", "measured_s"):
        run.summary[key] += 5.0  # it drains, and nothing comes then
    figure = accuracy_against({"again": [run]}, "energy_per_item_j", "energy, J", bounds=True)
    assert figure is not None
    (drawn,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "bound, one pass"]
    hull = hulls(run.config, run.summary["items_arrived"] / measured)["one pass"]
    assert hull
    assert list(drawn.get_xdata()) == pytest.approx([energy for energy, _ in hull])


def test_who_runs_items_again_is_measured_against_the_bound_that_may(twice: list[RunFolder]) -> None:
    once = twice[0]
    config, summary = once.config, once.summary | {"accuracy": 0.985}
    found = distances(config, {"once": [summary], "again": [summary | {"second_pass_share": 0.3}]})
    assert found["again"].accuracy > found["once"].accuracy
