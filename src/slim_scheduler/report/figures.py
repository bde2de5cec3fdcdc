"""The figures of a report, drawn from records: latency, utilisation and queues, widths, accuracy against its price.

Each function takes runs and gives a matplotlib figure that says by itself whether it is simulated or live and where
energy comes from. Colours and sizes are `theme.py`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from slim_scheduler.core.errors import InputError
from slim_scheduler.record.columns import Blocks, Floats, blocks_of, items_of, numbers, texts
from slim_scheduler.report.measures import Estimate, aggregate
from slim_scheduler.report.run_folder import RunFolder
from slim_scheduler.report.theme import CARD, FIGURE_SIZE, SOFT, drawing, marker, series, width_color
from slim_scheduler.run.frontier import hulls
from slim_scheduler.setup.machines import carried_by_width

Groups = Mapping[str, Sequence[RunFolder]]
CURVE_POINTS = 300
TIME_BINS = 60
MARGIN_BINS = 20
WINDOWS = 30  # of the picture over time: at the demo's load each has a hundred items and more


def alike(groups: Groups) -> tuple[dict[str, RunFolder], bool]:
    """A run of each router, and whether they are of one seed: the lowest that all have, else each one's lowest."""
    common = set.intersection(*[{run.summary["seed"] for run in runs} for runs in groups.values()])
    return {
        router: min(runs, key=lambda run: (run.summary["seed"] not in common, run.summary["seed"]))
        for router, runs in groups.items()
    }, bool(common)


def over_time(groups: Groups) -> Figure:
    """Load, mean width, p99 and accuracy of the items by the time of their arrival: one line per router, its run of
    `alike`.

    An item without an answer counts in p99 with its age when the run ended. Accuracy is of the answered items.
    """
    first = alike(groups)[0]
    duration = max(run.config.workload.duration_s for run in first.values())
    edges = np.linspace(0.0, duration, WINDOWS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    with drawing(height=7.2) as figure:
        figure.set_figwidth(1.3 * FIGURE_SIZE[0])
        load, width, p99, accuracy = all_axes = figure.subplots(4, sharex=True, height_ratios=(0.8, 1, 1.2, 1.2))
        _say_origin(load, groups)
        for i, (router, run) in enumerate(first.items()):
            color, dash = series(i)
            items, blocks = items_of(run.record), blocks_of(run.record)
            started = run.record.info.started_at
            window = np.digitize(items.arrival - started, edges) - 1
            if i == 0:
                rates = np.bincount(window, minlength=WINDOWS)[:WINDOWS] / np.diff(edges)
                load.stairs(rates, edges, fill=True, color=SOFT, alpha=0.35, lw=0)
            ended = np.where(items.answered, items.ended, run.summary["duration_s"] + started)
            slow = [_percentile_99((ended - items.arrival)[window == k]) for k in range(WINDOWS)]
            p99.plot(middle, 1000 * np.array(slow), color=color, ls=dash, label=router)
            right = [_mean(items.right[(window == k) & items.answered]) for k in range(WINDOWS)]
            accuracy.plot(middle, 100 * np.array(right), color=color, ls=dash)
            at = np.digitize(blocks.decided[blocks.task_block] - started, edges) - 1
            ran = np.array(widths_that_ran(blocks), float)[blocks.task_ran] if len(blocks.task_ran) else np.zeros(0)
            width.plot(middle, [_mean(ran[at == k]) for k in range(WINDOWS)], color=color, ls=dash)
        load.set_ylabel("load, items/s")
        load.set_ylim(bottom=0)
        for name, most in _carried(next(iter(first.values()))).items():
            load.axhline(most, color=SOFT, lw=1, ls=":")
            load.annotate(name, (duration, most), ha="right", va="bottom", fontsize=8, color=SOFT)
        width.set_ylabel("mean width")
        width.set_ylim(0, 1.05)
        p99.set_ylabel("p99, ms")
        if any(np.isfinite(line.get_ydata()).any() for line in p99.lines):  # else nothing came, and log would refuse
            p99.set_yscale("log")
            for set_formatter in (p99.yaxis.set_major_formatter, p99.yaxis.set_minor_formatter):
                set_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
        accuracy.set_ylabel("accuracy, %")
        accuracy.set_xlabel("time of arrival, s")
        figure.legend(*p99.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        for axes in all_axes:
            axes.set_xlim(0, duration)
        _shade_warmup(next(iter(first.values())), *all_axes)
    return figure


def _carried(run: RunFolder) -> dict[str, float]:
    """What all servers together carry at the widest and at the narrowest width; empty where a profile is not there."""
    try:
        carried = carried_by_width(run.config)
    except InputError:
        return {}
    return {
        f"all at width {width:g} carry {carried[width]:,.0f}/s": carried[width]
        for width in (min(carried), max(carried))
    }


def _percentile_99(values: Floats) -> float:
    return float(np.percentile(values, 99)) if len(values) else np.nan


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else np.nan


def latency_curves(groups: Groups) -> Figure:
    """Share of the answered items that had their answer within a time, one curve per router."""
    with drawing() as figure:
        axes = figure.subplots()
        _say_origin(axes, groups)
        share = np.concatenate([np.linspace(0, 0.98, CURVE_POINTS), 1 - np.geomspace(0.02, 1e-4, CURVE_POINTS // 3)])
        for i, (router, runs) in enumerate(groups.items()):
            latency = np.concatenate([_latencies(run) for run in runs])
            if len(latency):
                color, dash = series(i)
                axes.plot(np.quantile(latency, share) * 1000, share, color=color, ls=dash, label=router)
        axes.set_xscale("log")
        _plain_log(axes)
        axes.set_xlabel("latency of an item, ms (logarithmic)")
        axes.set_ylabel("items answered within")
        axes.set_ylim(0, 1.005)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def servers_over_time(run: RunFolder) -> Figure:
    """Utilisation and queue of every server over one run, as the servers reported them."""
    with drawing(height=4.3) as figure:
        upper, lower = figure.subplots(2, sharex=True)
        _say_origin(upper, {run.router: [run]})
        reports = run.record.of("ServerReported")
        names, at = texts(reports, "server"), numbers(reports, "time") - run.record.info.started_at
        queue = _queue_lengths(reports)
        for i, name in enumerate(sorted(set(names))):
            color, dash = series(i)
            mine = names == name
            upper.plot(*_binned(at[mine], numbers(reports, "utilization")[mine]), color=color, ls=dash, label=name)
            lower.plot(*_binned(at[mine], queue[mine]), color=color, ls=dash)
        upper.set_ylabel("utilisation")
        upper.set_ylim(0, 1.05)
        upper.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        upper.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=6)
        lower.set_ylabel("tasks waiting")
        lower.set_ylim(0, max(1.0, lower.get_ylim()[1]))  # an empty queue is not drawn at 0.04 tasks a line
        lower.set_xlabel("time, s")
        _shade_warmup(run, upper, lower)
    return figure


def widths_that_ran(blocks: Blocks) -> list[float]:
    """Each task's last width, one per name in `blocks.ran_names`."""
    return [float(name.rpartition("/")[2]) for name in blocks.ran_names]


def widths_over_time(run: RunFolder, blocks: Blocks, served: Sequence[float]) -> Figure:
    """Share of the tasks that ran at each of the served widths, over the time of their routing."""
    with drawing() as figure:
        axes = figure.subplots()
        _say_origin(axes, {run.router: [run]})
        decided = blocks.decided[blocks.task_block] - run.record.info.started_at
        last = np.array(widths_that_ran(blocks), float)
        widths = sorted(set(last))
        colors = [width_color(served.index(width), len(served)) for width in widths]
        edges = np.linspace(0, max(decided.max(initial=0.0), 1e-9), TIME_BINS // 2 + 1)
        of_task = last[blocks.task_ran]
        counts = np.array([np.histogram(decided[of_task == width], edges)[0] for width in widths], float)
        if widths:
            share = counts / np.maximum(counts.sum(axis=0), 1)
            middle = (edges[1:] + edges[:-1]) / 2
            labels = [f"width {width:g}" for width in widths]
            axes.stackplot(middle, share, colors=colors, labels=labels, edgecolor=CARD, linewidth=0.8)
            axes.set_xlim(middle[0], middle[-1])
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, handlelength=1.0)
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of tasks")
        axes.set_xlabel("time, s")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def runs_again(groups: Groups) -> bool:
    """Whether some router ran items a second time."""
    return any(run.summary.get("second_pass_share") for runs in groups.values() for run in runs)


def first_margins(groups: Groups) -> Figure:
    """How sure first answers were: the share of the answered items by the margin after their first pass.

    Filled: those that ran again.
    """
    edges = np.linspace(0.0, 1.0, MARGIN_BINS + 1)
    with drawing() as figure:
        axes = figure.subplots()
        _say_origin(axes, groups)
        for i, (router, runs) in enumerate(groups.items()):
            items = [items_of(run.record) for run in runs]
            margin, again = (
                np.concatenate([getattr(of, name)[of.answered] for of in items]) for name in ("margin", "again")
            )
            told = ~np.isnan(margin)
            if not again.any() or not told.any():
                continue
            color, dash = series(i)
            weight = 1 / told.sum()
            counts, twice = (np.histogram(margin[told & of], edges)[0] * weight for of in (told, again))
            axes.stairs(twice, edges, fill=True, color=color, alpha=0.3, lw=0)
            label = f"{router}: {again.mean():.0%} ran again"
            axes.stairs(counts, edges, color=color, ls=dash, lw=1.6, label=label)
        axes.set_xlim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("margin after the first pass")
        axes.set_ylabel("share of the items")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)
    return figure


def _bounds(groups: Groups) -> dict[str, list[tuple[float, float]]]:
    """What accuracy costs at the bound and the runs' mean arrivals; nothing where profiles or tables are not there."""
    runs = [run for of in groups.values() for run in of]
    arrived, seconds = sum(run.summary["items_arrived"] for run in runs), sum(_arriving_s(run) for run in runs)
    if not arrived or not seconds > 0:
        return {}
    try:
        return hulls(runs[0].config, arrived / seconds)
    except InputError:
        return {}


def _arriving_s(run: RunFolder) -> float:
    """Seconds after the warm-up in which items came; while a run drains none do."""
    lasted, warmup = run.summary["duration_s"], run.summary["duration_s"] - run.summary["measured_s"]
    return min(float(lasted), run.config.workload.duration_s) - float(warmup)


def accuracy_against(groups: Groups, key: str, label: str, scale: float = 1.0, bounds: bool = False) -> Figure | None:
    """Accuracy over a price that is paid for it: one point per router, with 95 % intervals over its runs.

    `bounds` draws the bound's hulls of one pass and of two beside them. None where no router knows both.
    """
    points = []
    for i, (router, runs) in enumerate(groups.items()):
        estimates = aggregate([run.summary for run in runs])
        accuracy, price = estimates.get("accuracy"), estimates.get(key)
        if accuracy and price and accuracy.mean is not None and price.mean is not None:
            points.append((i, router, accuracy, price))
    if not points:
        return None
    with drawing() as figure:
        axes = figure.subplots()
        _say_origin(axes, groups)
        for i, router, accuracy, price in points:
            color = series(i)[0]
            x, y = _value(price) * scale, _value(accuracy) * 100
            bars: dict[str, Any] = {"xerr": _half(price, scale), "yerr": _half(accuracy, 100)}
            bars |= {"elinewidth": 1.4, "capsize": 0, "label": router}
            axes.errorbar(x, y, fmt=marker(i), ms=8, color=color, mec=CARD, mew=1.2, **bars)
        for i, (name, hull) in enumerate((_bounds(groups) if bounds else {}).items()):
            energies, accuracies = zip(*hull, strict=True) if hull else ((), ())
            style: Any = {"color": SOFT, "ls": ("-", "--")[i % 2], "lw": 1.2, "label": f"bound, {name}"}
            axes.plot(np.array(energies) * scale, 100 * np.array(accuracies), **style)
        prices = [_value(price) for *_, price in points]
        if max(prices) > 8 * max(min(prices), 1e-12):
            axes.set_xscale("log")
            _plain_log(axes)
        axes.margins(0.1, 0.15)
        axes.set_ylim(top=min(100.0, axes.get_ylim()[1]))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, handlelength=1.0)
        axes.set_xlabel(label)
        axes.set_ylabel("accuracy, %")
    return figure


def _say_origin(axes: Axes, groups: Groups) -> None:
    origins = dict.fromkeys(run.origin for runs in groups.values() for run in runs)
    axes.set_title(" / ".join(origins), loc="right", fontsize=8, color=SOFT)


def _latencies(run: RunFolder) -> Floats:
    """Latencies of the measured, answered items of a run."""
    items = items_of(run.record)
    measured = items.arrival >= run.record.info.started_at + run.config.workload.warmup
    return np.asarray((items.ended - items.arrival)[measured & items.answered])


def _queue_lengths(reports: Any) -> Floats:
    """Tasks waiting at the server, over all segments, per report."""
    queues = reports["queue"].combine_chunks()
    lengths = np.asarray(queues.value_lengths()).astype(np.int64)
    report = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(report, queues.flatten().to_numpy(), minlength=len(lengths)).astype(float)


def _binned(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Means over equal spans of time, so that a long run is a readable line. Unknown values are left out."""
    at, values = at[~np.isnan(values)], values[~np.isnan(values)]
    if len(at) <= TIME_BINS:
        return at, values
    place = np.minimum(((at - at[0]) / max(at[-1] - at[0], 1e-9) * TIME_BINS).astype(np.int64), TIME_BINS - 1)
    count = np.bincount(place, minlength=TIME_BINS)
    kept = count > 0
    means = [np.bincount(place, column, TIME_BINS)[kept] / count[kept] for column in (at, values)]
    return means[0], means[1]


def _shade_warmup(run: RunFolder, *many: Axes) -> None:
    for axes in many:
        axes.axvspan(0, run.config.workload.warmup, color=SOFT, alpha=0.1, lw=0)
        axes.set_xlim(left=0)


def _plain_log(axes: Axes) -> None:
    """10, 100, 1,000 instead of powers; between decades also 2 and 5 where there are few."""
    low, high = axes.get_xlim()
    if high / max(low, 1e-12) < 300:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _value(estimate: Estimate) -> float:
    assert estimate.mean is not None
    return estimate.mean


def _half(estimate: Estimate, scale: float) -> float | None:
    return None if estimate.ci95 is None else estimate.ci95 * scale
