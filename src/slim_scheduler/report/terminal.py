"""The terminal's tables of runs and comparisons."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from slim_scheduler.report.comparison import Comparison
from slim_scheduler.report.measures import NOTHING, Estimate, Measure, headline, is_sure
from slim_scheduler.report.notes import is_metered, router_title
from slim_scheduler.report.run_folder import origin


def comparison_table(comparison: Comparison) -> Table:
    """One line per router, mean and 95 % interval where there are several runs."""
    measures = _measures(comparison)
    table = _table(comparison.summaries, measures)
    places = _places(comparison.estimates, measures)
    for router, estimates in comparison.estimates.items():
        runs = comparison.summaries[router]
        completed = sum(run["items_completed"] for run in runs)
        arrived = sum(run["items_arrived"] for run in runs)
        name = escape(router_title(router, runs))
        table.add_row(name, f"{completed:,} of {arrived:,}", *_cells(estimates, measures, places))
    return table


def difference_table(comparison: Comparison) -> Table | None:
    """Paired differences to the first router, mean and 95 % interval; bold where the interval excludes zero."""
    if not comparison.differences:
        return None
    measures = _measures(comparison)
    table = _table(comparison.summaries, measures, title=f"difference to {comparison.first}, same arrivals")
    places = _places(comparison.differences, measures)
    metered = is_metered([run for runs in comparison.summaries.values() for run in runs])
    for router, differences in comparison.differences.items():
        name = escape(router_title(router, comparison.summaries[router]))
        table.add_row(name, "", *_cells(differences, measures, places, mark=True, metered=metered))
    return table


def _measures(comparison: Comparison) -> Sequence[Measure]:
    return headline(run for runs in comparison.summaries.values() for run in runs)


def _table(
    summaries: Mapping[str, Sequence[dict[str, Any]]], measures: Sequence[Measure], title: str | None = None
) -> Table:
    origins = " / ".join(dict.fromkeys(origin(run) for runs in summaries.values() for run in runs))
    table = Table(
        title=title, caption=origins, caption_justify="left", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("router", no_wrap=True)
    table.add_column("answered" if title is None else "", justify="right")
    for measure in measures:
        table.add_column(measure.title + (f"\n{measure.unit}" if measure.unit else ""), justify="right")
    return table


def _places(rows: Mapping[str, Mapping[str, Estimate]], measures: Sequence[Measure]) -> dict[str, int]:
    """Digits after the point, alike in a column."""
    return {m.key: m.places([of[m.key].mean for of in rows.values() if m.key in of]) for m in measures}


def _cells(
    estimates: Mapping[str, Estimate],
    measures: Sequence[Measure],
    places: Mapping[str, int],
    mark: bool = False,
    metered: bool = True,
) -> list[str]:
    cells = []
    for measure in measures:
        value = estimates.get(measure.key, NOTHING)
        text = measure.show(value.mean, value.ci95, places[measure.key])
        sure = mark and is_sure(value) and (metered or not measure.is_energy)
        cells.append(f"[bold]{text}[/bold]" if sure else text)
    return cells
