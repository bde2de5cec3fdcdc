"""The results page: its tables are those of the stored runs, and an experiment goes on where it stopped."""

import gzip
import re
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from slim_scheduler.core.errors import ConfigError, RouterError
from slim_scheduler.core.router.heuristics import width_tuple
from slim_scheduler.core.router.plan.program import PlanProgram
from slim_scheduler.core.types import WidthTuple
from slim_scheduler.run.provenance import measured_commit
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import load_profiles, load_shape, router_facts

REFERENCE = Path("examples/reference")
PAGE = Path("docs/reference-cluster.md")


@pytest.fixture
def results(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(REFERENCE), *sys.path])
    import results

    return results


def test_every_table_of_the_page_is_that_of_its_stored_runs(results):
    text = PAGE.read_text()
    experiments = results.read_experiments()
    assert {found[2] for found in results.MARKED.finditer(text)} == set(experiments)
    fresh = results.page(text, experiments)
    assert fresh == text, "a table is stale; `python examples/reference/results.py --tables` makes it again"


def test_the_figure_is_that_of_the_stored_runs(results, tmp_path):
    panels, bound = results.drawn(results.read_experiments())
    from results_figure import SAID, draw, fingerprint

    made_of = SAID + fingerprint(panels, bound)
    stale = "the figure is stale; `python examples/reference/results.py --tables` draws it again"
    assert made_of in results.FIGURE.read_text(), stale
    assert set(bound) == {"0.5", "0.7", "0.85", "0.95"}
    assert list(panels["Poisson arrivals (simulated)"]["auto"]) == list(bound)
    for lines in panels.values():
        for load, (accuracy, p99, energy) in lines["auto"].items():
            assert 60 < accuracy < bound[load]
            assert 0 < energy < 1000
            assert p99 > 0
    panels["Poisson arrivals (simulated)"]["auto"]["0.5"][0] += 0.01
    drawn = tmp_path / "figure.svg"
    draw(panels, results.FIGURE_MEASURES, bound, drawn)
    text = drawn.read_text()
    assert made_of not in text
    assert all(name in text for name in ("the bound", "auto", "slackfit", "ppo:patient", "cost-model:W"))


def test_a_changed_table_is_noticed(results):
    text, experiments = PAGE.read_text(), results.read_experiments()
    for found in results.MARKED.finditer(text):
        altered = text[: found.start(3)] + found[3].replace("s", "S", 1) + text[found.end(3) :]
        assert altered != text
        assert results.page(altered, experiments) == text


def test_a_table_that_no_experiment_makes_is_an_error_with_the_names(results):
    text = "<!-- results: nobody -->\n<!-- /results -->"
    with pytest.raises(ConfigError, match=r"nobody.*below"):
        results.page(text, results.read_experiments())


def test_an_interrupted_experiment_goes_on_and_a_changed_one_begins_again(results, tmp_path):
    config = tmp_path / "cluster.toml"
    whole = Path("examples/demo/cluster.toml").read_text().replace("../../", f"{Path.cwd()}/")
    config.write_text(whole)
    experiment = results.Experiment(
        name="small",
        says="Small.",
        config="cluster.toml",
        routers=("jsq:0.5", "cost-model:0.5"),
        seeds=(0, 2),
        columns="items",
        set=("workload.duration_s=0.5", "workload.warmup_s=0.05"),
    )
    first = msgspec.structs.replace(experiment, seeds=(0, 1))
    stored, out = tmp_path / "stored", tmp_path / "out"
    assert results.run(first, stored, out, 1, tmp_path) == 2
    half = results.table(experiment, results.read_store(stored, "small"), tmp_path)
    assert "2 of 4 runs are stored" in half
    assert results.run(experiment, stored, out, 1, tmp_path) == 2  # the other seed alone
    full = results.table(experiment, results.read_store(stored, "small"), tmp_path)
    assert full.count("\n| `") == 2
    store = results.read_store(stored, "small")
    assert {run.commit for run in store.runs} == {measured_commit(Path(), *results.WRITTEN)}
    assert set(store.versions) >= {"python", "slim-scheduler", "numpy"}
    assert "seeds 0 to 1" in full
    config.write_text(whole + "\n# a comment changes nothing\n")
    assert results.run(experiment, stored, out, 1, tmp_path) == 0
    assert results.check(experiment, stored, out, 1, tmp_path) == (2, [])
    store.runs[0].metrics["reward.mean"] = 0.5
    (stored / "small.json").write_bytes(msgspec.json.encode(store))
    again, (differs,) = results.check(experiment, stored, out, 1, tmp_path)
    assert again == 2
    assert re.fullmatch(r"small \S+, seed 0: reward\.mean is -?[0-9.]+, stored 0\.5", differs)
    config.write_text(whole.replace("rate = 200.0", "rate = 210.0"))
    assert results.check(experiment, stored, out, 1, tmp_path) == (0, []), "what is stored is of another configuration"
    assert "0 of 4" in results.table(experiment, results.read_store(stored, "small"), tmp_path)
    assert results.run(experiment, stored, out, 1, tmp_path) == 4


def test_a_run_whose_router_raised_is_not_stored(results, tmp_path):
    config = tmp_path / "cluster.toml"
    config.write_text(Path("examples/demo/cluster.toml").read_text().replace("../../", f"{Path.cwd()}/"))
    experiment = results.Experiment(
        name="broken",
        says="Broken.",
        config="cluster.toml",
        routers=("tests.cli.routers:Broken",),
        seeds=(0, 1),
        columns="items",
        set=("workload.duration_s=0.5", "workload.warmup_s=0.05"),
    )
    stored = tmp_path / "stored"
    with pytest.raises(RouterError, match=r"tests\.cli\.routers:Broken raised .*ZeroDivisionError"):
        results.run(experiment, stored, tmp_path / "out", 1, tmp_path)
    assert results.read_store(stored, "broken").runs == []


def test_a_load_that_is_whole_is_shown_before_the_others_are(results):
    experiment = results.read_experiments()["below"]
    store = results.read_store(results.STORED, "below")
    last = list(experiment.loads)[-1]
    store.runs = [run for run in store.runs if run.load != last or run.seed != experiment.seeds[0]]
    page = results.table(experiment, store)
    shown = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| 0")]
    assert shown == [f"| {load}" for load in ("0.5", "0.7", "0.85") for _ in experiment.routers_at(load)]
    assert f"Load {last} is not whole: 63 of 70 runs." in page


def test_real_arrivals_are_sped_up_to_the_load_and_a_run_replays_each(results, tmp_path, monkeypatch):
    (tmp_path / "hour.csv.gz").write_bytes(gzip.compress(b"arrival_s\n0\n900\n1000\n3600\n"))
    config = tmp_path / "cluster.toml"
    config.write_text(Path("examples/demo/cluster.toml").read_text().replace("../../", f"{Path.cwd()}/"))
    experiment = results.Experiment(
        name="real",
        says="Real.",
        config="cluster.toml",
        routers=("jsq:0.5",),
        seeds=(0, 1),
        columns="items",
        set=("workload.rate=20", "workload.items_per_request=3", "workload.duration_s=1", "workload.warmup_s=0"),
        trace="hour.csv.gz",
    )
    stored, out = tmp_path / "stored", tmp_path / "out"
    monkeypatch.delenv("SLIM_TRACES", raising=False)
    with pytest.raises(ConfigError, match=r"SLIM_TRACES.*hour\.csv\.gz"):
        results.run(experiment, stored, out, 1, tmp_path)
    monkeypatch.setenv("SLIM_TRACES", str(tmp_path))
    assert results.run(experiment, stored, out, 1, tmp_path) == 1
    (made,) = results.read_store(stored, "real").runs
    assert made.metrics["items_arrived"] == made.metrics["items_completed"] == 12  # four requests of three, in 0.6 s


class _Alone(NamedTuple):
    """Accuracies with which a program's best plan is this width tuple for all that comes, where it can be carried."""

    widths: WidthTuple

    def top1(self, widths: WidthTuple) -> float:
        return float(widths == self.widths)


def test_fixed_widths_are_the_most_accurate_that_can_be_carried(results):
    listed = set()
    for experiment in results.read_experiments().values():
        for load, fixed in experiment.fixed.items():
            config = load_config(REFERENCE / experiment.config, experiment.settings(load))
            slow = tuple(sorted((fault.server, fault.factor) for fault in config.faults if fault.kind == "slow"))
            listed.add((experiment.config, config.workload.rate, slow, fixed))
    assert len(listed) >= 4
    for name, rate, slow, fixed in listed:
        config = load_config(REFERENCE / name)
        shape = load_shape(config)
        facts = router_facts(config, shape, load_profiles(config, shape))
        as_slow = {server: msgspec.structs.replace(facts.servers[server], slowdown=factor) for server, factor in slow}
        facts = msgspec.structs.replace(facts, servers={**facts.servers, **as_slow})
        tuples = product(shape.widths, repeat=shape.segments)
        for widths in sorted(tuples, key=read_accuracy(accuracy_path(config)).top1, reverse=True):
            plan = PlanProgram(facts, _Alone(widths), rho=0.97).most_accurate(rate)
            if plan is not None and plan.accuracy > 1 - 1e-6:
                break
        assert widths == width_tuple(fixed, shape), f"{name} at {rate:g}, {slow}"


def test_a_router_with_fixed_widths_has_those_of_its_load_and_comes_once(results):
    experiment = results.Experiment(
        name="fixed",
        says="Fixed.",
        config="cluster.toml",
        routers=("auto", "cost-model:W", "cost-model:0.25"),
        seeds=(0, 1),
        columns="items",
        loads={"low": (), "high": ()},
        fixed={"low": "0.25/0.5", "high": "0.25"},
    )
    assert experiment.routers_at("low") == ("auto", "cost-model:0.25/0.5", "cost-model:0.25")
    assert experiment.routers_at("high") == ("auto", "cost-model:0.25")


def test_a_tuned_slo_is_given_to_slackfit_alone(results):
    experiment = results.Experiment(
        name="tuned",
        says="Tuned.",
        config="cluster.toml",
        routers=("auto", "slackfit@SLO"),
        seeds=(0, 1),
        columns="items",
        loads={"low": (), "high": ()},
        slo_ms={"low": 300},
    )
    found = [(load, config.workload.slo_ms, names) for load, config, names in results.configured(experiment)]
    default = load_config(REFERENCE / "cluster.toml").workload.slo_ms
    assert found == [
        ("low", default, {"auto": "auto"}),
        ("low", 300, {"slackfit": "slackfit@300 ms"}),
        ("high", default, {"auto": "auto", "slackfit": "slackfit"}),
    ]
