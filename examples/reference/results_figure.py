"""The figure of docs/reference-cluster.md: what each router makes of each load."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.ticker import ScalarFormatter

from slim_scheduler.report.measures import Measure
from slim_scheduler.report.theme import FIGURE_SIZE, SOFT, drawing, marker, series

Lines = Mapping[str, Mapping[str, Sequence[float]]]  # by router and share of the highest load: a value per measure
SAID = "made of "


def fingerprint(panels: Mapping[str, Lines], bound: Mapping[str, float]) -> str:
    """Changes with any value that is drawn. The file carries it, so that a stale one is noticed."""
    rounded = {
        title: {name: {load: [f"{v:.6g}" for v in row] for load, row in line.items()} for name, line in lines.items()}
        for title, lines in panels.items()
    }
    limits = {load: f"{value:.4g}" for load, value in bound.items()}
    return hashlib.sha256(json.dumps([rounded, limits], sort_keys=True).encode()).hexdigest()[:16]


def draw(panels: Mapping[str, Lines], measures: Sequence[Measure], bound: Mapping[str, float], path: Path) -> None:
    """Writes an SVG: a column per panel, a row per measure, in the measures' units; `bound` is the first one's."""
    width, height = FIGURE_SIZE
    routers = list(dict.fromkeys(router for lines in panels.values() for router in lines))  # alike in every panel
    with drawing() as figure, mpl.rc_context({"svg.hashsalt": path.name}):
        figure.set_size_inches(1.7 * width, 0.7 * height * len(measures))
        rows = figure.subplots(len(measures), len(panels), sharex=True, sharey="row", squeeze=False)
        for column, (title, lines) in enumerate(panels.items()):
            for row, measure in enumerate(measures):
                axes = rows[row][column]
                if row == 0:
                    axes.set_title(title)
                    axes.plot(list(map(float, bound)), list(bound.values()), ":", color=SOFT, label="the bound")
                for router, line in lines.items():
                    i = routers.index(router)
                    color, dash = series(i)
                    at, values = list(map(float, line)), [row_of[row] for row_of in line.values()]
                    axes.plot(at, values, dash, marker=marker(i), markersize=4, color=color, label=router)
                if measure.unit == "ms":
                    axes.set_yscale("log")
                    axes.yaxis.set_major_formatter(ScalarFormatter())
                if column == 0:
                    axes.set_ylabel(measure.heading)
                axes.set_xticks(list(map(float, bound)))
            rows[-1][column].set_xlabel("load, share of the highest")
        drawn = {label: line for axes in rows[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4)
        metadata = {"Date": None, "Description": SAID + fingerprint(panels, bound)}
        figure.savefig(path, facecolor="white", metadata=metadata)
