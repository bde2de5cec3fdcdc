"""The table of routers: configuration, command line and management interface read names alike."""

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest

from slim_scheduler.core.errors import InputError
from slim_scheduler.run.runs import simulated_run
from slim_scheduler.serve.observer import Observer
from slim_scheduler.serve.refusal import Kind, Refusal
from slim_scheduler.serve.repository import Repository
from slim_scheduler.setup.config import Config, load_config, with_overrides
from slim_scheduler.setup.machines import build_router, load_profiles, load_shape
from slim_scheduler.setup.routers import ROUTERS, parse_router, usages

DEMO = Path("examples/demo/cluster.toml")
GOOD = [
    "auto",
    "random",
    "round-robin:random",
    "jsq:0.5",
    "jsq:0.25/0.5/0.75/1",
    "jsq:0.25+1@0.4",
    "p2c:0.25",
    "cost-model:0.5",
    "slackfit",
    "slackfit:+1@0.4",
    "reward-greedy",
    "lp",
    "lp:0.85",
    "lp@0.1",
]
BAD = [
    "",
    "fastest",
    "jsq",
    "jsq:",
    "jsq:wide",
    "jsq:0.25+1",
    "random:0.5",
    "slackfit:1",
    "slackfit:0.5+1@0.4",
    "jsq:1+0.25@0.4",
    "slackfit:+1",
    "lp:many",
    "lp:2.5",
    "lp@",
    "lp@soon",
    "lp@-1",
    "lp@inf",
    "ppo:",
]


def never_built(config: Config, observer: Observer) -> NoReturn:
    raise AssertionError("no model is loaded here")


def answer_of_the_management_interface(name: str) -> Refusal:
    """What it says to a router's name for a model that is not loaded: names are read first."""
    config = load_config(DEMO)
    models = Repository(config, never_built)
    with pytest.raises(Refusal) as refused:
        asyncio.run(models.set_router(Path(config.model.path).name, name))
    return refused.value


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("jsq", "jsq:W, such as jsq:0.5"),
        ("cost-model:", "cost-model:W, such as"),
        ("ppo", "ppo:POLICY_DIR"),
        ("jsq@", "jsq@"),
    ],
)
def test_a_name_without_its_argument_is_told_what_a_whole_one_is(name: str, whole: str) -> None:
    with pytest.raises(InputError, match=f"router {name} is incomplete: {whole}"):
        parse_router(name)


@pytest.mark.parametrize("name", GOOD)
def test_a_router_that_one_takes_all_take(name: str) -> None:
    config = with_overrides(load_config(DEMO), [f'router.name="{name}"'])
    shape = load_shape(config)
    built = build_router(name, config, shape, load_profiles(config, shape))
    assert built.name == ("lp" if name == "auto" else name)
    assert answer_of_the_management_interface(name).kind == Kind.UNAVAILABLE, "the name is good, the model is not there"


@pytest.mark.parametrize("name", BAD)
def test_a_router_that_one_refuses_all_refuse(name: str) -> None:
    config = load_config(DEMO)
    shape = load_shape(config)
    for refused in (
        lambda: parse_router(name),
        lambda: build_router(name, config, shape, load_profiles(config, shape)),
    ):
        with pytest.raises(InputError):
            refused()
    assert answer_of_the_management_interface(name).kind == Kind.INVALID
    for key in ("router.name", "router.fallback", "training.warm_start"):
        if name or key == "router.name":  # empty: none
            with pytest.raises(InputError):
                with_overrides(config, [f'{key}="{name}"'])


def test_the_list_of_names_has_every_kind() -> None:
    for kind in ROUTERS:
        assert kind in usages()


def test_every_router_is_tested_by_name_and_in_the_readme() -> None:
    readme = Path("README.md").read_text()
    tested = {parse_router(name).kind for name in GOOD}
    untested = set(ROUTERS) - tested - {"ppo", "jsq@"}  # these two need files
    assert not untested, f"a name of each goes into GOOD: {untested}"
    for router in ROUTERS.values():
        assert f"`{router.usage[0]}`" in readme


@pytest.mark.parametrize("name", ["jsq@runs/random", "tests.cli.routers:Shortest"])
def test_the_management_interface_reads_no_file_and_imports_no_code(name: str) -> None:
    assert parse_router(name).needs_files
    assert answer_of_the_management_interface(name).kind == Kind.INVALID


def test_every_router_that_takes_a_plan_runs_unsure_items_again(tmp_path: Path) -> None:
    config = load_config(DEMO, ["workload.duration_s=2", "workload.warmup_s=0.2", "workload.rate=100"])
    for name in ("jsq:0.25+1@0.4", "cost-model:0.25+1@0.4", "p2c:0.25+1@0.4", "slackfit:+1@0.8"):
        summary = simulated_run(config, name, 0, tmp_path / name)
        assert 0 < summary["second_pass_share"] < 1, name
        assert summary["items_completed"] == summary["items_arrived"]
        assert summary["fallbacks"] == 0
