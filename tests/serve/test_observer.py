"""What is told of answers, of energy: only what is known of it, and as what it is."""

from types import SimpleNamespace

import pytest

from slim_scheduler.core.types import ItemOutcome, Outcome
from slim_scheduler.core.view import ServerReport, ServerView
from slim_scheduler.serve.live import Live
from slim_scheduler.serve.metrics import ServiceCollector
from slim_scheduler.serve.service import Service, _energy_source
from tests.serve.test_repository import repository


def item(number, energy_j, servers=("a",), **second):
    return ItemOutcome(number, Outcome.ANSWERED, (1.0,), servers, 0.001, 0.002, energy_j, **second)


@pytest.mark.parametrize(
    ("energies", "per_item", "counters"),
    [
        ([1.0, None] * 5, 1.0, {"slim_items_energy_joules_total": 5.0, "slim_items_energy_known_total": 5.0}),
        ([None] * 10, None, {}),
    ],
)
async def test_energy_is_told_of_the_items_of_which_it_is_known(energies, per_item, counters):
    models = repository()
    await models.load("digits")
    service, observer = Service(models), models.find("digits").observer
    live = Live(service)
    live.sample()
    for number, energy in enumerate(energies):
        observer.item(item(number, energy), "1", None)
    assert live.sample()["models"][0]["energy_per_item_j"] == per_item
    told = {
        sample.name: sample.value for family in ServiceCollector(service, []).collect() for sample in family.samples
    }
    assert {name: value for name, value in told.items() if name.startswith("slim_items_energy")} == counters
    await models.close(0.1)


def view(name, energy_source):
    server = ServerView(name, 8, 1, 0.0)
    server.report = ServerReport(name, 1, 0.0, (0,), 0, 0, 0, 0, (), (), energy_source=energy_source)
    return server


def test_energy_of_two_passes_may_be_of_any_server():
    views = {"a": view("a", "counter"), "b": view("b", "estimated"), "c": view("c", "counter")}
    served = SimpleNamespace(engine=SimpleNamespace(servers=views))
    once, twice = item(0, 1.0, ("a",)), item(1, 1.0, ("a",), passes=2, other_widths=(0.25,))
    assert _energy_source(served, [once], frozenset("a")) == "counter"
    assert _energy_source(served, [once, twice], frozenset("a")) == "counter+estimated"
