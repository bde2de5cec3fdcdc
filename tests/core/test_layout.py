"""Every figure that a policy sees, by name: one that moves or changes its meaning fails here.

Policies know their inputs by place. Whoever changes these numbers counts `LAYOUT` up and trains the policies anew.
"""

import msgspec
import numpy as np

from slim_scheduler.core.profile import Curve
from slim_scheduler.core.router.learned.encoders import build_encoder
from slim_scheduler.core.router.learned.layout import LAYOUT
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.view import View
from tests.core.facts import Table, cluster, seen, server, ten_ms_per_item, view

FACTS = cluster(
    server("a"),
    server("b", lambda *kind: 3 * ten_ms_per_item(*kind), power=Curve((0.0, 1.0), (20.0, 50.0))),
    server("c", lambda *kind: 2 * ten_ms_per_item(*kind), link_latency=0.01),
)


def views() -> list[View]:
    """Three of a run, in which all that is known differs."""
    a = seen("a", {(0, 0.5): 3, (1, 1.0): 2}, loaded=((0, 0.5), (1, 0.5), (1, 1.0), (1, 1.0)), utilization=0.25)
    a.report = msgspec.structs.replace(
        a.report, queue_per_segment=(2, 5), memory_used=1 << 28, power_w=150.0, made_at=-0.5
    )
    b = seen("b", {(1, 0.5): 1}, loaded=((0, 1.0),), utilization=None, credit=40)
    b.report = msgspec.structs.replace(b.report, queue_per_segment=(0, 9), memory_used=1 << 27, power_w=45.0)
    c = seen("c", {(0, 1.0): 7}, credit=10)
    c.report, c.up = None, False
    later = view(a, b, c, segment=1, previous=1.0, waiting=6, home="a", age=0.3, slack=0.7, now=0.25)
    later = msgspec.structs.replace(later, fifo_length=20, fifo_per_segment=(14, 6), completed=10)
    begun = seen("c", {(0, 1.0): 7, (1, 0.5): 4}, credit=10, loaded=((1, 0.5),), utilization=0.75)
    first = view(a, b, begun, waiting=3, age=0.1, now=1.5, completed=70)
    last = view(a, begun, segment=1, previous=0.5, waiting=40, home="c", now=2.5, completed=200)
    return [later, first, last]


def figures(kind: str) -> tuple[dict[str, list[list[float]]], dict[str, list[list[float]]]]:
    """By name and column: what all servers share in each view, and each server's in the first and in the second."""
    encoder = build_encoder(kind, FACTS, 0.1, lambda: Plans(FACTS, Table(), rho=0.9))
    found = [encoder.encode(now) for now in views()[: 2 if kind == "paper" else 3]]
    shared, rows = np.stack([seen.shared for seen in found]), np.concatenate([seen.servers for seen in found[:2]])

    def columns(values: np.ndarray, where: slice) -> list[list[float]]:
        return values[:, where].T.astype(float).round(3).tolist()

    of_all, of_server = encoder.layout
    assert (shared.shape[1], rows.shape[1]) == (of_all.size, of_server.size)
    return {n: columns(shared, of_all[n]) for n in of_all}, {n: columns(rows, of_server[n]) for n in of_server}


PAPER = {
    "fifo": [[0.381, 0.173]],
    "completed": [[0.171, 0.304]],
    "queue_0": [[0.416, 0.416]],
    "power_0": [[0.75, 0.75]],
    "utilization_0": [[0.25, 0.25]],
    "queue_1": [[0.461, 0.461]],
    "power_1": [[0.9, 0.9]],
    "utilization_1": [[-1.0, -1.0]],
    "queue_2": [[-1.0, 0.0]],
    "power_2": [[-1.0, -1.0]],
    "utilization_2": [[-1.0, 0.75]],
}
SHARED = {
    "segment": [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]],
    "previous_width": [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]],
    "waiting": [[0.389, 0.277, 0.743]],
    "age": [[0.462, 0.231, 0.0]],
    "slack": [[0.693, 0.0, 0.0]],
    "no_deadline": [[0.0, 1.0, 1.0]],
    "fifo": [[0.381, 0.173, 0.464]],
    "rate": [[0.0, 0.262, 0.84]],
    "per_server": [[0.333, 0.333, 0.5]],
    "fifo_per_segment": [[0.339, 0.173, 0.0], [0.243, 0.0, 0.464]],
}
SERVER = {
    "up": [[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]],
    "credit": [[0.922, 0.975, 0.3, 0.922, 0.975, -0.1]],
    "outstanding": [[0.358, 0.139, 0.416, 0.358, 0.139, 0.497]],
    "backlog": [[0.1, 0.047, 0.292, 0.1, 0.047, 0.343]],
    "report_age": [[0.375, 0.125, 1.0, 1.0, 0.75, 0.75]],
    "transfer": [[0.0, 0.0, 0.061, 0.0, 0.0, 0.061]],
    "is_home": [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]],
    "done": [[0.167, 0.312, 0.408, 0.135, 0.157, 0.427], [0.223, 0.413, 0.436, 0.255, 0.239, 0.436]],
    "run": [[0.087, 0.214, 0.087, 0.047, 0.124, 0.032], [0.157, 0.343, 0.157, 0.087, 0.214, 0.061]],
    "pending": [[0.0, 0.139, 0.0, 0.277, 0.0, 0.0], [0.22, 0.0, 0.0, 0.0, 0.0, 0.416]],
    "instances": [[0.5, 0.0, 0.0, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.5, 0.0]],
    "no_report": [[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
    "utilization": [[0.25, 0.0, 0.0, 0.25, 0.0, 0.75]],
    "utilization_unknown": [[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]],
    "power": [[0.75, 0.9, 0.0, 0.75, 0.9, 0.5]],
    "power_unknown": [[0.0, 0.0, 1.0, 0.0, 0.0, 1.0]],
    "memory": [[0.25, 0.125, 0.0, 0.25, 0.125, 0.0]],
    "power_among": [[1.333, 0.333, 1.333, 1.333, 0.333, 1.333]],
    "queued": [[0.22, 0.0, 0.0, 0.22, 0.0, 0.0], [0.358, 0.461, 0.0, 0.358, 0.461, 0.0]],
    "any_instance": [[1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]],
}
PLANNED_SHARED = {
    "planned_load": [[1.0, 0.38, 1.0]],  # the last one is a rise beyond chance
    "next_width": [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]],
}
PLANNED_SERVER = {
    "planned_share": [[0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.455, 0.0, 0.545]],
    "behind": [[0.375, 0.375, -2.0, -2.0, -2.0, -2.0], [-2.0, -2.0, -2.0, 0.17, -2.0, 0.205]],
    "next_server": [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]],
}


def test_each_figure_stands_where_its_name_says():
    assert LAYOUT == 1
    for kind, shared, of_server in (
        ("paper", PAPER, {}),
        ("extended", SHARED, SERVER),
        ("planned", SHARED | PLANNED_SHARED, SERVER | PLANNED_SERVER),
    ):
        found_shared, found_server = figures(kind)
        assert list(found_shared.items()) == list(shared.items()), "the order is part of the layout"
        assert list(found_server.items()) == list(of_server.items())


def test_no_two_figures_look_alike_here_so_that_none_can_take_anothers_place():
    for features in (SHARED, SERVER | PLANNED_SERVER):
        columns = [tuple(column) for feature in features.values() for column in feature]
        assert len(set(columns)) == len(columns)
