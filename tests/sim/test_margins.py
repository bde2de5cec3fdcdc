"""Margins in simulation: those of the widths that the answer ran at, also where a given-up attempt ran on."""

import pytest

from slim_scheduler.core.messages import Reply
from slim_scheduler.core.router.escalation import FixedEscalation
from slim_scheduler.core.types import Decision, Outcome, Request
from slim_scheduler.sim.host import Simulation
from tests.sim.clusters import NOBODY, Journal, small_cluster


class NarrowThenWide:
    """The narrowest on a until it hangs, then the widest on b."""

    name = "narrow-then-wide"
    chooses_full = False

    def decide(self, view, rng):
        if "a" in view.choices and view.now < 0.75:
            return Decision("a", min(view.head.widths), 8)
        return Decision("b" if "b" in view.choices else "a", max(view.head.widths), 8)


def margin(item, widths):
    return 0.9 if widths[0] == 1.0 else 0.1


@pytest.mark.parametrize("hangs_s", [0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.5, 2.2])
def test_a_late_batch_of_an_attempt_that_was_given_up_changes_no_margin(hangs_s, tmp_path):
    config = small_cluster(
        tmp_path,
        ({}, {"slowdown": 10.0}),
        faults=[{"server": "a", "at_s": 0.705, "kind": "hang", "duration_s": hangs_s}],
        router={"name": "jsq:0.5+1@0.5"},
    )
    journal = Journal()
    simulation = Simulation(
        config,
        "jsq:0.5+1@0.5",
        0,
        recorder=journal,
        arrivals=NOBODY,
        router=NarrowThenWide(),
        escalation=FixedEscalation((0.5, 1.0), 0.5),
        margin=margin,
    )
    for number in range(8):
        simulation.submit(Request(number, (number,), 0.498))
    simulation.run()
    answered = [item for _, reply in journal.commands(Reply) for item in reply.items]
    assert len(answered) == 8
    for item in answered:
        assert item.outcome is Outcome.ANSWERED
        assert item.margin in (None, margin(item.item, item.widths))
    assert not simulation._ran
    assert not simulation._newest
