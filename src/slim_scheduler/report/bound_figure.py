"""The figure of `slim frontier`: what accuracy a load allows, and what energy an accuracy costs."""

from collections.abc import Sequence
from pathlib import Path

from slim_scheduler.report.theme import FIGURE_SIZE, drawing, series
from slim_scheduler.run.frontier import FrontierPoint

MOST_LABELS = 10


def write_bound_figure(points: Sequence[FrontierPoint], path: Path) -> None:
    """Writes an image of the kind that the name says."""
    feasible = [(p.load_items_s, p.plan) for p in points if p.plan is not None]
    by_load = {load: [plan for at, plan in feasible if at == load] for load, _ in feasible}
    with drawing() as figure:
        figure.set_size_inches(2 * FIGURE_SIZE[0], FIGURE_SIZE[1])
        left, right = figure.subplots(1, 2)
        # The last plan of a load is its most accurate.
        left.plot(list(by_load), [100 * plans[-1].accuracy for plans in by_load.values()], marker="o", label="one pass")
        again = {p.load_items_s: 100 * p.again.accuracy for p in points if p.again is not None}
        if again:
            color, dash = series(1)
            left.plot(*zip(*again.items(), strict=True), color=color, linestyle=dash, marker="o", label="two passes")
            left.legend()
        left.set(xlabel="load, items/s", ylabel="highest accuracy, %")
        for i, (load, plans) in enumerate(by_load.items()):
            color, dash = series(i)
            accuracies = [100 * plan.accuracy for plan in plans]
            energies = [plan.energy_per_item for plan in plans]
            right.plot(accuracies, energies, color=color, linestyle=dash, marker="o", label=f"{load:,.0f} items/s")
        right.set(xlabel="accuracy, %", ylabel="least energy, J per item")
        if 0 < len(by_load) <= MOST_LABELS:
            right.legend()
        figure.savefig(path)
