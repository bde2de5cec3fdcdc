"""`/metrics`: the counters of observers and dispatchers in Prometheus' text form.

Everything is read at the scrape, in one go on the event loop, so the numbers of one scrape agree with each other
(received = answered + rejected + expired + cancelled + failed + in flight). Triton's names are given as aliases where
they mean the same.
"""

import math
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from slim_scheduler.core.types import Outcome
from slim_scheduler.core.view import ServerView
from slim_scheduler.serve.metadata import VERSION
from slim_scheduler.serve.observer import Histogram, Observer
from slim_scheduler.serve.repository import Served
from slim_scheduler.serve.service import Service

WANTED_UTILIZATION = 0.7  # of a fleet that has room for bursts: the target that autoscalers are commonly given
OUTCOMES = [outcome.value for outcome in Outcome]


def registry_of(service: Service, responses: list[dict[int, int]]) -> CollectorRegistry:
    """A registry for one server; `responses` are its listeners' counts by HTTP status."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service, responses))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class ServiceCollector(Collector):
    """Reads one service."""

    def __init__(self, service: Service, responses: list[dict[int, int]]) -> None:
        self._service = service
        self._responses = responses

    def collect(self) -> Iterator[Metric]:
        served = list(self._service.repository.served.values())
        yield _gauge("slim_ready", "1 when an inference sent now would be served.", float(self._service.ready))
        yield self._http()
        yield from _work(served)
        yield from _decisions(served)
        yield from _devices(served)
        yield _desired(served)
        yield from _answers(served)
        yield from _triton(served)

    def describe(self) -> Iterable[Metric]:
        return []

    def _http(self) -> Metric:
        family = CounterMetricFamily("slim_http_responses", "Inference responses by HTTP status.", labels=["status"])
        total: dict[int, int] = {}
        for responses in self._responses:
            for status, count in responses.items():
                total[status] = total.get(status, 0) + count
        for status, count in sorted(total.items()):
            family.add_metric([str(status)], count)
        return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _work(served: list[Served]) -> Iterator[Metric]:
    """The conservation law, and how long requests took."""
    for unit in ("requests", "items"):
        received = CounterMetricFamily(f"slim_{unit}_received", f"{unit.title()} that came.", labels=["model"])
        ended = CounterMetricFamily(f"slim_{unit}", f"{unit.title()} by outcome.", labels=["model", "outcome"])
        flying = GaugeMetricFamily(f"slim_{unit}_in_flight", f"{unit.title()} not yet ended.", labels=["model"])
        for one in served:
            row, model = one.counts()[unit], one.card.name
            received.add_metric([model], row["received"])
            flying.add_metric([model], row["in_flight"])
            for outcome in OUTCOMES:
                ended.add_metric([model, outcome], row[outcome])
        yield from (received, ended, flying)
    seconds = HistogramMetricFamily(
        "slim_request_seconds", "From a request's arrival to its end, by outcome.", labels=["model", "outcome"]
    )
    for one in served:
        for outcome, histogram in one.observer.request_seconds.items():
            _add(seconds, [one.card.name, outcome.value], histogram)
    yield seconds


def _decisions(served: list[Served]) -> Iterator[Metric]:
    decisions = CounterMetricFamily(
        "slim_decisions", "Routing decisions by head and choice.", labels=["model", "head", "choice"]
    )
    fallbacks = CounterMetricFamily(
        "slim_router_fallbacks",
        "Decisions taken from the router: it failed, or was too slow.",
        labels=["model", "kind"],
    )
    blocks = HistogramMetricFamily(
        "slim_block_seconds",
        "From entering the queue for a segment to its result, per task.",
        labels=["model", "segment", "width", "server"],
    )
    for one in served:
        observer, model = one.observer, one.card.name
        for (head, choice), count in observer.decisions.items():
            decisions.add_metric([model, head, choice], count)
        fallbacks.add_metric([model, "failed"], observer.fallbacks)
        fallbacks.add_metric([model, "slow"], observer.suspensions)
        for (segment, width, server), histogram in observer.block_seconds.items():
            _add(blocks, [model, str(segment), f"{width:g}", server], histogram)
    yield from (decisions, fallbacks, blocks)


def _devices(served: list[Served]) -> Iterator[Metric]:
    labels = ["model", "server"]
    gauges = {
        "up": "1 while the server is in service.",
        "queue_length": "Tasks waiting at the server.",
        "outstanding_tasks": "Tasks sent and not yet reported done.",
        "utilization": "Share of recent time with a batch running.",
        "memory_used_bytes": "Device memory used.",
        "memory_total_bytes": "Device memory there is.",
        "power_watts": "Power drawn.",
        "pace": "How many times as long as its profile says batches took of late.",
    }
    families = {key: GaugeMetricFamily(f"slim_server_{key}", text, labels=labels) for key, text in gauges.items()}
    energy = CounterMetricFamily("slim_server_energy_joules", "Energy of the device.", labels=[*labels, "source"])
    sizes = HistogramMetricFamily("slim_batch_size", "Tasks per batch.", labels=labels)
    loads = CounterMetricFamily("slim_instance_loads", "Instances loaded.", labels=[*labels, "segment", "width"])
    unloads = CounterMetricFamily("slim_instance_unloads", "Instances unloaded.", labels=labels)
    outages = CounterMetricFamily("slim_server_outages", "Times the server was taken out.", labels=labels)
    fifo = GaugeMetricFamily("slim_fifo_length", "Tasks in the global queue.", labels=["model"])
    for one in served:
        observer, model = one.observer, one.card.name
        fifo.add_metric([model], one.engine.fifo_length)
        for name, view in one.engine.servers.items():
            for key, value in _readings(view):
                families[key].add_metric([model, name], value)
            if view.report is not None and view.report.energy_j is not None:
                energy.add_metric([model, name, view.report.energy_source], view.report.energy_j)
        for server, histogram in observer.batch_size.items():
            _add(sizes, [model, server], histogram)
        for (segment, width, server), count in observer.loads.items():
            loads.add_metric([model, server, str(segment), f"{width:g}"], count)
        for counts, family in ((observer.unloads, unloads), (observer.outages, outages)):
            for server, count in counts.items():
                family.add_metric([model, server], count)
    yield from (fifo, *families.values(), energy, sizes, loads, unloads, outages)


def _desired(served: list[Served]) -> Metric:
    """For an autoscaler: as a horizontal pod autoscaler reckons, from how busy the servers in service are."""
    family = GaugeMetricFamily(
        "slim_desired_servers",
        f"Servers that would be {WANTED_UTILIZATION:.0%} busy with the present work, at least one.",
        labels=["model"],
    )
    for one in served:
        up = [view for view in one.engine.servers.values() if view.up]
        busy = sum(view.report.utilization or 0.0 for view in up if view.report is not None)
        family.add_metric([one.card.name], desired_servers(busy, len(up), waiting=one.engine.held_up > 0))
    return family


def desired_servers(busy: float, up: int, waiting: bool) -> int:
    """Servers for work that keeps `busy` servers busy; one more than there are where work waits for room.

    A busy server says no more than 1, so an overloaded fleet grows in steps of 1 / 0.7.
    """
    wanted = max(1, math.ceil(busy / WANTED_UTILIZATION - 1e-9))
    return max(wanted, up + 1) if waiting else wanted


def _readings(view: ServerView) -> Iterator[tuple[str, float]]:
    """What is known of a server; what nobody reported is left out, because unknown is not zero."""
    yield "up", float(view.up)
    yield "outstanding_tasks", view.outstanding
    report = view.report
    if report is None:
        return
    yield "queue_length", report.queue_length
    yield "memory_used_bytes", report.memory_used
    yield "memory_total_bytes", report.memory_total
    yield "pace", report.pace
    if report.utilization is not None:
        yield "utilization", report.utilization
    if report.power_w is not None:
        yield "power_watts", report.power_w


def _answers(served: list[Served]) -> Iterator[Metric]:
    """What the answers were worth and what they cost."""
    tuples = CounterMetricFamily("slim_answered_items", "Answered items by width tuple.", labels=["model", "widths"])
    energy = CounterMetricFamily(
        "slim_items_energy_joules", "Energy that answered items took, of those whose energy is known.", labels=["model"]
    )
    known = CounterMetricFamily("slim_items_energy_known", "Answered items whose energy is known.", labels=["model"])
    accuracy = GaugeMetricFamily(
        "slim_expected_accuracy",
        "Mean chance that answers are right: of their confidence, else as their widths were measured. Where the images "
        "had no labels, that they agree with the best variant.",
        labels=["model"],
    )
    not_finite = CounterMetricFamily(
        "slim_items_not_finite",
        "Items whose output was NaN or infinite; they are among those that failed.",
        labels=["model"],
    )
    again = CounterMetricFamily("slim_second_passes", "Answered items that ran again.", labels=["model"])
    margins = HistogramMetricFamily("slim_first_pass_margin", "Margins of first passes, 0 to 1.", labels=["model"])
    for one in served:
        observer, model = one.observer, one.card.name
        again.add_metric([model], observer.second_passes)
        margins.add_metric([model], observer.margins.cumulative(), observer.margins.total)
        not_finite.add_metric([model], observer.not_finite)
        for widths, count in observer.width_items.items():
            tuples.add_metric([model, widths], count)
        if observer.items_energy_known:
            energy.add_metric([model], observer.items_energy)
            known.add_metric([model], observer.items_energy_known)
        if observer.accuracy_known:
            accuracy.add_metric([model], observer.accuracy_sum / observer.accuracy_known)
    yield from (tuples, energy, known, accuracy, not_finite, again, margins)


def _triton(served: list[Served]) -> Iterator[Metric]:
    """Untyped, because a counter would be given the suffix `_total`, which Triton's names do not have."""
    labels = ["model", "version"]
    names = (
        ("nv_inference_request_success", "Answered requests."),
        ("nv_inference_request_failure", "Requests that got no answer."),
        ("nv_inference_count", "Answered items."),
        ("nv_inference_exec_count", "Batches that ran."),
        ("nv_inference_request_duration_us", "Cumulative time of answered requests."),
        (
            "nv_inference_queue_duration_us",
            "Cumulative waiting time of answered requests: of the item that took longest.",
        ),
        ("nv_inference_compute_infer_duration_us", "Cumulative compute time of answered requests: of that item."),
    )
    families = [UnknownMetricFamily(name, text, labels=labels) for name, text in names]
    pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests not yet ended.", labels=labels)
    for one in served:
        requests, items, observer = one.counts()["requests"], one.counts()["items"], one.observer
        failed = sum(requests[outcome] for outcome in OUTCOMES if outcome != Outcome.ANSWERED.value)
        values = (
            requests["answered"],
            failed,
            items["answered"],
            batches(observer),
            observer.request_seconds[Outcome.ANSWERED].total * 1e6,
            observer.queue_seconds * 1e6,
            observer.compute_seconds * 1e6,
        )
        for family, value in zip(families, values, strict=True):
            family.add_metric([one.card.name, VERSION], value)
        pending.add_metric([one.card.name, VERSION], requests["in_flight"])
    yield from (*families, pending)
    yield from _triton_devices(served)


def _triton_devices(served: list[Served]) -> Iterator[Metric]:
    families = {
        "utilization": GaugeMetricFamily("nv_gpu_utilization", "Share of time busy.", labels=["gpu_uuid"]),
        "memory_used_bytes": GaugeMetricFamily("nv_gpu_memory_used_bytes", "Memory used.", labels=["gpu_uuid"]),
        "memory_total_bytes": GaugeMetricFamily("nv_gpu_memory_total_bytes", "Memory there is.", labels=["gpu_uuid"]),
        "power_watts": GaugeMetricFamily("nv_gpu_power_usage", "Power drawn, in watts.", labels=["gpu_uuid"]),
    }
    seen = set()
    for one in served:
        for name, view in one.engine.servers.items():
            if name not in seen:
                seen.add(name)
                for key, value in _readings(view):
                    if key in families:
                        families[key].add_metric([name], value)
    yield from families.values()


def batches(observer: Observer) -> int:
    """How many batches ran."""
    return sum(sum(histogram.buckets) for histogram in observer.batch_size.values())


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, histogram.cumulative(), histogram.total)
