"""`report.html`: one file with everything in it, from the runs of one or several routers.

No script, no outside request; light or dark as the reader's system is, readable on a phone. Numbers come from
summaries, figures from records; nothing is computed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from html import escape
from importlib.resources import files
from pathlib import Path

from matplotlib.figure import Figure

from slim_scheduler.record.columns import blocks_of
from slim_scheduler.report import figures
from slim_scheduler.report.comparison import Comparison
from slim_scheduler.report.measures import NOTHING, REWARDED, Estimate, Measure, is_sure, served
from slim_scheduler.report.notes import count, is_metered, notes
from slim_scheduler.report.run_folder import CONFIG, RunFolder, by_router, shown
from slim_scheduler.report.theme import css_variables, inline_svg
from slim_scheduler.setup.config import WorkloadConfig

Groups = Mapping[str, Sequence[RunFolder]]


def write_report(runs: Sequence[RunFolder], path: Path, title: str = "Slim Scheduler report") -> None:
    """Writes the page for some runs, grouped by router."""
    groups = shown(by_router(runs))
    body = "\n".join([*_head(groups, title), *_first(groups), *tables(groups), *_figures(groups), *_details(groups)])
    write_page(path, title, body)


def write_page(path: Path, title: str, body: str) -> None:
    """Writes a page of this look around a body of HTML: no script, light or dark as the reader's system is."""
    css = files("slim_scheduler.report").joinpath("page.css").read_text()
    light, dark = css_variables(dark=False), css_variables(dark=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n:root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{css}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(groups: Groups, title: str) -> Iterator[str]:
    first = next(iter(groups.values()))[0]
    workload, runs = first.config.workload, [run for of in groups.values() for run in of]
    servers = ", ".join(
        f"{s.name} ({s.device}{f', {s.slowdown:g} times as slow' if s.slowdown != 1 else ''})"
        for s in first.config.servers
    )
    yield f"<h1>{escape(title)}</h1>"
    yield (
        f'<p class="soft">{count(len(groups), "router")}, {count(len(runs), "run")} · {_arrivals(workload)} '
        f"for {workload.duration_s:g} s, the first {workload.warmup:g} s not measured · "
        f"data {escape(workload.data)} · servers {escape(servers)}</p>"
    )
    yield "".join(f'<span class="origin">{escape(origin)}</span>' for origin in dict.fromkeys(r.origin for r in runs))
    yield from (f'<p class="note">{escape(note)}</p>' for note in notes([run.summary for run in runs]))


def _arrivals(workload: WorkloadConfig) -> str:
    if workload.kind == "trace":
        file = escape(Path(workload.trace or "").name)
        return f"arrivals of {file}, " + (f"{workload.rate:g} items/s" if workload.trace_at_rate else "as recorded,")
    if workload.kind == "steps":
        factors = [factor for _, factor in workload.steps]
        return f"arrivals in steps, {workload.rate * min(factors):g} to {workload.rate * max(factors):g} items/s"
    return f"{workload.kind} arrivals, {workload.rate:g} items/s"


def _first(groups: Groups) -> Iterator[str]:
    """What happened when, before any table."""
    title = "Load, widths, latency and accuracy over time"
    same = "on the same arrivals" if figures.alike(groups)[1] else "of different seeds: the arrivals are not the same"
    caption = f"One run of each router, {same}. The shaded start is not measured."
    yield f'<div class="first">{figure_element(figures.over_time(groups), title, caption)}</div>'


def tables(groups: Groups) -> Iterator[str]:
    """The page's tables: what users get, what routers are rewarded for, and paired differences to the first router."""
    comparison = Comparison({router: [run.summary for run in of] for router, of in groups.items()})
    widths = _widths(groups)
    metered = is_metered([run.summary for of in groups.values() for run in of])
    several = max(len(of) for of in groups.values()) > 1
    interval = (
        "mean ± half of the 95 % interval over seeds; bold: better than every other by more than noise"
        if several
        else ""
    )
    user_gets = served(run.summary for of in groups.values() for run in of)
    best = {
        (router, measure.key)
        for router in comparison.summaries
        for measure in (*user_gets, *REWARDED)
        if comparison.is_clearly_best(router, measure) and (metered or not measure.is_energy)
    }
    yield "<h2>Results</h2>"
    yield from _table(groups, comparison.estimates, user_gets, interval, best, widths=widths)
    yield (
        '<div class="key soft">'
        + "".join(
            f'<span><i style="background:var(--{_ramp(i, len(widths))})"></i>width {escape(width)}</span>'
            for i, width in enumerate(widths)
        )
        + "</div>"
    )
    said = "what a router is rewarded for (eq. 7)" + (f", {interval}" if several else "")
    yield "<h2>Blocks</h2>"
    yield from _table(groups, comparison.estimates, REWARDED, said, best)
    if several and comparison.differences:
        said = "paired by seed: same arrivals, same items; bold where the 95 % interval excludes zero"
        sure = {
            (router, measure.key)
            for router, differences in comparison.differences.items()
            for measure in (*user_gets, *REWARDED)
            if is_sure(differences.get(measure.key, NOTHING)) and (metered or not measure.is_energy)
        }
        yield f"<h2>Difference to {escape(comparison.first)}</h2>"
        yield from _table(groups, comparison.differences, user_gets, said, sure)
        yield from _table(groups, comparison.differences, REWARDED, said, sure)


def _table(
    groups: Groups,
    rows: Mapping[str, Mapping[str, Estimate]],
    measures: Sequence[Measure],
    said: str,
    bold: AbstractSet[tuple[str, str]],
    *,
    widths: Sequence[str] = (),
) -> Iterator[str]:
    """One row per router; with `widths` also how many items it answered, and at which widths.

    `bold` are the cells by router and measure.
    """
    places = {m.key: m.places([of[m.key].mean for of in rows.values() if m.key in of]) for m in measures}
    origins = " / ".join(dict.fromkeys(run.origin for of in groups.values() for run in of))
    titles = [f"<th>{m.title}<small>{m.unit or '&nbsp;'}</small></th>" for m in measures]
    titles += ["<th>widths</th>", "<th>answered</th>"] if widths else []
    yield '<div class="wide" tabindex="0"><table>'
    yield f"<caption><span>{escape(origins)}{', ' if said else ''}{said}</span></caption>"
    yield f"<thead><tr><th>router</th>{''.join(titles)}</tr></thead><tbody>"
    for i, (router, of) in enumerate(groups.items()):
        if router not in rows:
            continue
        extra = ""
        if widths:
            completed, arrived = (sum(run.summary[f"items_{key}"] for run in of) for key in ("completed", "arrived"))
            extra = f"<td>{_mix(rows[router], widths)}</td><td>{completed:,} <small>of {arrived:,}</small></td>"
        name = f'<th scope="row"><i style="background:var(--s{i % 8})"></i>{escape(router)}</th>'
        cells = (_cell(rows[router].get(m.key, NOTHING), m, places[m.key], (router, m.key) in bold) for m in measures)
        yield f"<tr>{name}{''.join(cells)}{extra}</tr>"
    yield "</tbody></table></div>"


def _widths(groups: Groups) -> list[str]:
    """All widths that ran anywhere, ascending."""
    return sorted({width for of in groups.values() for run in of for width in run.summary["width_share"]}, key=float)


def _cell(value: Estimate, measure: Measure, places: int, bold: bool) -> str:
    text = escape(measure.show(value.mean, None, places))
    if value.ci95 is not None:
        text += f" <small>± {escape(measure.show(value.ci95, None, places))}</small>"
    return f'<td class="best">{text}</td>' if bold else f"<td>{text}</td>"


def _mix(estimates: Mapping[str, Estimate], widths: Sequence[str]) -> str:
    shares = [(estimates[f"width_share.{w}"].mean or 0.0) if f"width_share.{w}" in estimates else 0.0 for w in widths]
    said = ", ".join(f"width {width}: {share:.0%}" for width, share in zip(widths, shares, strict=True))
    bars = "".join(
        f'<b style="flex:{share:.4f};background:var(--{_ramp(i, len(widths))})"></b>'
        for i, share in enumerate(shares)
        if share > 0
    )
    return f'<span class="mix" role="img" aria-label="{escape(said)}" title="{escape(said)}">{bars}</span>'


def _ramp(i: int, widths: int) -> str:
    return f"w{round(i * 3 / max(widths - 1, 1))}"


def _figures(groups: Groups) -> Iterator[str]:
    yield '<h2>Accuracy and its price</h2><div class="grid">'
    caption = "How long an item takes from its intended arrival to its answer; the median is at 50 %."
    yield figure_element(figures.latency_curves(groups), "Latency distribution", caption)
    for key, label, scale, title in (
        ("latency_s.mean", "mean latency of an item, ms", 1000.0, "Accuracy against latency"),
        ("latency_s.p99", "99th percentile of latency, ms", 1000.0, "Accuracy against tail latency"),
        ("energy_per_item_j", "energy per answered item, mJ", 1000.0, "Accuracy against energy"),
    ):
        # Energy that nobody metered is drawn only beside the bound of the same profiles.
        bounds = key.startswith("energy") and figures.runs_again(groups)
        metered = is_metered([run.summary for of in groups.values() for run in of])
        if key.startswith("energy") and not metered and not bounds:
            continue
        drawn = figures.accuracy_against(groups, key, label, scale, bounds)
        if drawn is not None:
            said = " Lines: the least that the same profiles allow at the runs' mean arrivals." if bounds else ""
            yield figure_element(drawn, title, f"Up and to the left is better.{said}")
    if figures.runs_again(groups):
        caption = "The difference of an answer's two highest probabilities. Filled: the items that ran again."
        yield figure_element(figures.first_margins(groups), "How sure first answers were", caption)
    yield "</div>"
    yield "<h2>Servers over time</h2>"
    yield '<p class="soft">The first seed of each router; the shaded start is not measured.</p>'
    yield '<div class="grid">'
    for router, runs in groups.items():
        drawn = figures.servers_over_time(runs[0])
        yield figure_element(drawn, router, "How busy each server was, and how many tasks waited there.", "servers")
    yield '</div><h2>Widths over time</h2><div class="grid">'
    blocks = {router: blocks_of(runs[0].record) for router, runs in groups.items()}
    ran = [width for some in blocks.values() for width in figures.widths_that_ran(some)]  # in the warm-up as well
    served = sorted({*map(float, _widths(groups)), *ran})
    for router, runs in groups.items():
        drawn = figures.widths_over_time(runs[0], blocks[router], served)
        yield figure_element(drawn, router, "The widths at which its tasks ran.", "widths")
    yield "</div>"


def figure_element(figure: Figure, title: str, caption: str, kind: str = "") -> str:
    """A figure with its title and caption as HTML; `kind` keeps its ids apart from a figure of the same title."""
    salt = "f" + "".join(c if c.isalnum() else f"_{ord(c):x}" for c in kind + title)
    svg = inline_svg(figure, f"{title}: {caption}", salt)
    return f"<figure><figcaption><b>{escape(title)}</b>{escape(caption)}</figcaption>{svg}</figure>"


def _details(groups: Groups) -> Iterator[str]:
    first = next(iter(groups.values()))[0]
    folders = "\n".join(str(run.path) for of in groups.values() for run in of)
    machines = "\n".join(dict.fromkeys(run.record.info.machine for of in groups.values() for run in of))
    yield f"<details><summary>Configuration, machine and folders of the runs</summary><pre>{escape(machines)}</pre>"
    yield f"<pre>{escape((first.path / CONFIG).read_text())}</pre><pre>{escape(folders)}</pre></details>"
