"""A run's `summary.json`: every measure as docs/measures.md defines it, computed from the record with numpy.

Items and blocks count from the warm-up's end on: items by their intended arrival, blocks by their decision, rates by
completions after it. What nobody measured is None, never 0. The devices' curves are
`record/device_curves.py`'s, the reward's formula `core/reward.py`'s.
"""

from typing import Any

import numpy as np

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.reward import block_reward, undone_reward
from slim_scheduler.core.types import Seconds
from slim_scheduler.record.columns import (
    Blocks,
    Floats,
    Indices,
    Items,
    Mask,
    blocks_of,
    items_of,
    numbers,
    parse_widths,
)
from slim_scheduler.record.device_curves import DeviceCurves
from slim_scheduler.record.recorder import Record
from slim_scheduler.setup.config import Config

Number = float | None


def summarize(record: Record, config: Config, accuracy: AccuracyTable | None = None) -> dict[str, Any]:
    """The summary of one run. Without an accuracy table, block accuracy and reward are unknown where they need it."""
    info = record.info
    started, ended = info.started_at, _end(record)
    warm = started + config.workload.warmup
    items, blocks, curves = items_of(record), blocks_of(record), DeviceCurves.of(record, ended)
    measured = items.arrival >= warm
    answered = measured & items.answered
    undone = {
        "items_" + outcome.replace("-", "_"): int(np.sum(measured & (items.outcome == outcome)))
        for outcome in ("rejected", "expired", "cancelled", "failed", "in-flight")
    }
    latency = (items.ended - items.arrival)[answered]
    window = max(ended - warm, 0.0)
    slo = np.where(np.isnan(items.deadline), items.arrival + config.workload.slo_ms / 1000, items.deadline)
    on_time = items.answered & (items.ended <= slo)
    after_warmup = items.ended >= warm
    in_window = (blocks.decided >= warm) & (blocks.done > 0)
    weight = blocks.done * in_window
    energy = curves.block_energy(blocks.decided, blocks.finished, blocks.latency)
    device_energy = curves.energy(warm, ended) if window > 0 else None
    right = items.right[answered]
    reward = _rewards(items, measured, blocks, energy, curves, config, accuracy, ended)
    decisions = int(np.sum(blocks.decided >= warm))
    return {
        "router": info.router,
        "seed": info.seed,
        "mode": info.mode,
        "interrupted": info.interrupted,
        "duration_s": ended - started,
        "measured_s": window,
        "items_arrived": int(np.sum(measured)),
        "items_completed": int(np.sum(answered)),
        **undone,
        "throughput_items_s": _ratio(np.sum(items.answered & after_warmup), window),
        "goodput_items_s": _ratio(np.sum(on_time & after_warmup), window),
        "slo_attainment": _ratio(np.sum(on_time & measured), np.sum(measured)),
        "generator_lag_s": {"p99": _percentile(_generator_lags(record, warm), 99)},
        "accuracy": _mean(right) if not np.isnan(right).any() else None,
        "accuracy_arrived": _ratio(np.sum(right), np.sum(measured)) if not np.isnan(right).any() else None,
        "second_pass_share": _ratio(np.sum(items.again & answered), np.sum(answered)),
        "agreement": "" if accuracy is None else accuracy.agreement,
        "latency_s": {**_mean_sd(latency), **{f"p{p}": _percentile(latency, p) for p in (50, 95, 99)}},
        "block_latency_s": _mean_sd_p99(blocks.latency, weight),
        "energy_block_j": _mean_sd_p99(energy, weight),
        "energy_device_j": device_energy,
        "energy_per_item_j": _ratio(device_energy, np.sum(items.answered & after_warmup)),
        "energy_source": curves.source,
        "cpu_s_per_item": None if info.cpu_s is None else _ratio(info.cpu_s, np.sum(items.answered)),
        "utilization_variance": curves.variance_over_time(warm, ended),
        "reward": _mean_sd(reward),
        "width_share": _width_share(blocks, in_window),
        "decisions": decisions,
        "decision_us": info.decision_us or {"mean": None, "p99": None},
        **_fallbacks(record, blocks, warm, decisions),
    }


def _fallbacks(record: Record, blocks: Blocks, warm: Seconds, decisions: int) -> dict[str, Any]:
    """How many of the decisions were the fallback's, and how often and why in the whole run the router gave none.

    The fallback decides once where the router's choice was replaced, and everything while it was suspended.
    """
    rows = record.of("RouterFellBack")
    times, until = numbers(rows, "time"), numbers(rows, "until")
    replaced = int(np.sum(np.isnan(until) & (times >= warm)))
    for begin, end in zip(times, until, strict=True):
        replaced += int(np.sum((blocks.decided >= max(begin, warm)) & (blocks.decided < end)))  # a NaN end: none
    raised = rows["raised"].to_numpy(zero_copy_only=False).astype(bool)
    reasons = rows["reason"].to_pylist()
    first = next((reason for reason, of_error in zip(reasons, raised, strict=True) if of_error), None)
    replaced = min(replaced, decisions)  # a decision whose block did not end is not among them
    return {
        "fallbacks": replaced,
        "fallback_share": _ratio(replaced, decisions),
        "fallback_events": len(reasons),
        "fallback_reason": first or next(iter(reasons), None),
        "router_raised": int(raised.sum()),
    }


def _end(record: Record) -> Seconds:
    if record.info.ended_at is not None:
        return record.info.ended_at
    return max(record.info.started_at, float(np.max(record.rows["time"].to_numpy(), initial=0.0)))


def _rewards(
    items: Items,
    measured: Mask,
    blocks: Blocks,
    energy: Floats,
    curves: DeviceCurves,
    config: Config,
    accuracy: AccuracyTable | None,
    ended: Seconds,
) -> Floats:
    """Reward of each measured item: the sum over its segments' tasks, or what an undone item is charged."""
    if accuracy is None:
        return np.full(int(np.sum(measured)), np.nan)
    order = np.argsort(items.item)
    owner = order[np.searchsorted(items.item, blocks.task_item, sorter=order)]
    per_block = _per_block(_task_accuracy(blocks, owner, items.right, accuracy), blocks)
    rewards = block_reward(
        config.reward,
        per_block,
        blocks.latency,
        energy if config.reward.gamma else np.zeros_like(energy),
        curves.variance_at(blocks.finished) if config.reward.delta else np.zeros_like(energy),
        accuracy.prior(()),
    )
    earned = np.zeros(len(items.item))
    np.add.at(earned, owner, rewards[blocks.task_block])
    asked = np.where(np.isnan(items.deadline), config.workload.slo_ms / 1000, items.deadline - items.arrival)
    age = np.maximum(ended - items.arrival, asked)
    undone = undone_reward(config.reward, accuracy.segments, age, accuracy.prior(()))
    return np.asarray(np.where(items.answered, earned, undone)[measured])


def _task_accuracy(blocks: Blocks, owner: Indices, right: Floats, accuracy: AccuracyTable) -> Floats:
    """Per done task of item `owner`: whether that was answered right after the last segment, the prior of its widths
    before. The end of a first pass whose item ran again counts nothing, as in training: only one answer is given."""
    widths = [parse_widths(name) for name in blocks.ran_names]
    prior = np.array([accuracy.prior(ran) for ran in widths], float)
    last = np.array([len(ran) == accuracy.segments for ran in widths], bool)
    complete = np.flatnonzero(last[blocks.task_ran])
    complete = complete[np.lexsort((blocks.decided[blocks.task_block[complete]], owner[complete]))]
    was_first = complete[:-1][owner[complete[:-1]] == owner[complete[1:]]]
    found = np.where(last[blocks.task_ran] & ~np.isnan(right[owner]), right[owner], prior[blocks.task_ran])
    found[was_first] = accuracy.prior(())
    return found


def _per_block(values: Floats, blocks: Blocks) -> Floats:
    sums = np.bincount(blocks.task_block, values, minlength=len(blocks.done))
    return sums / np.maximum(blocks.done, 1)


def _width_share(blocks: Blocks, in_window: Mask) -> dict[str, float]:
    """Share of the tasks that ran at each width."""
    last = np.array([name.rpartition("/")[2] for name in blocks.ran_names], object)
    counts = np.bincount(blocks.task_ran[in_window[blocks.task_block]], minlength=len(last))
    total = counts.sum()
    return {
        str(width): float(counts[last == width].sum() / total) for width in sorted(set(last[counts > 0]), key=float)
    }


def _generator_lags(record: Record, warm: Seconds) -> Floats:
    asked = record.of("RequestArrived")
    arrival = numbers(asked, "arrival")
    return (numbers(asked, "time") - arrival)[arrival >= warm]


def _ratio(value: Any, of: Any) -> Number:
    return float(value / of) if value is not None and of > 0 else None


def _mean(values: Floats) -> Number:
    return float(np.mean(values)) if len(values) else None


def _mean_sd(values: Floats, weight: Floats | None = None) -> dict[str, Number]:
    """Mean and population standard deviation; None for nothing, or where a value is unknown."""
    weight = np.ones(len(values)) if weight is None else weight
    values, weight = values[weight > 0], weight[weight > 0]
    if not len(values) or np.isnan(values).any():
        return {"mean": None, "sd": None}
    mean = np.average(values, weights=weight)
    return {"mean": float(mean), "sd": float(np.sqrt(np.average((values - mean) ** 2, weights=weight)))}


def _mean_sd_p99(values: Floats, weight: Floats) -> dict[str, Number]:
    return {**_mean_sd(values, weight), "p99": _weighted_percentile(values, weight, 99)}


def _percentile(values: Floats, percent: float) -> Number:
    return float(np.percentile(values, percent)) if len(values) else None


def _weighted_percentile(values: Floats, weight: Floats, percent: float) -> Number:
    """The least value at which the weight up to it reaches the percentage of all; None as in `_mean_sd`."""
    values, weight = values[weight > 0], weight[weight > 0]
    if not len(values) or np.isnan(values).any():
        return None
    order = np.argsort(values)
    reached = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(reached, reached[-1] * percent / 100 - 1e-9)])
