"""The terminal's tables of runs and comparisons."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from slim_scheduler.report.comparison import Comparison
from slim_scheduler.report.measures import HEADLINE, Estimate
from slim_scheduler.report.notes import router_title
from slim_scheduler.report.run_folder import origin


def comparison_table(comparison: Comparison) -> Table:
    """One line per router, mean and 95 % interval where there are several runs."""
    table = _table(comparison.summaries)
    for router, estimates in comparison.estimates.items():
        runs = comparison.summaries[router]
        completed = sum(run["items_completed"] for run in runs)
        arrived = sum(run["items_arrived"] for run in runs)
        table.add_row(escape(router_title(router, runs)), f"{completed:,} of {arrived:,}", *_cells(estimates))
    return table


def difference_table(comparison: Comparison) -> Table | None:
    """Paired differences to the first router, mean and 95 % interval; bold where the interval excludes zero."""
    if not comparison.differences:
        return None
    table = _table(comparison.summaries, title=f"difference to {comparison.first}, same arrivals")
    for router, differences in comparison.differences.items():
        table.add_row(escape(router_title(router, comparison.summaries[router])), "", *_cells(differences, mark=True))
    return table


def _table(summaries: Mapping[str, Sequence[dict[str, Any]]], title: str | None = None) -> Table:
    origins = " / ".join(dict.fromkeys(origin(run) for runs in summaries.values() for run in runs))
    table = Table(
        title=title, caption=origins, caption_justify="left", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("router", no_wrap=True)
    table.add_column("answered" if title is None else "", justify="right")
    for measure in HEADLINE:
        table.add_column(measure.title + (f"\n{measure.unit}" if measure.unit else ""), justify="right")
    return table


def _cells(estimates: Mapping[str, Estimate], mark: bool = False) -> list[str]:
    cells = []
    for measure in HEADLINE:
        value = estimates.get(measure.key, Estimate(None, None, ()))
        text = measure.show(value.mean, value.ci95)
        sure = mark and value.mean is not None and value.ci95 is not None and abs(value.mean) > value.ci95
        cells.append(f"[bold]{text}[/bold]" if sure else text)
    return cells
