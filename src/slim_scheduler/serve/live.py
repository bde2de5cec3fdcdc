"""The live page's numbers: one sample a second, shared by everybody who looks.

Rates are differences between samples of the same counters that `/metrics` shows; percentiles are over the answers of
the last seconds. A page that opens gets the last minutes at once, then one event per sample.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from slim_scheduler.core.errors import InputError
from slim_scheduler.serve.service import Service
from slim_scheduler.setup.config import Config

PERIOD_S = 1.0
HISTORY = 300
WINDOW_S = 10.0
MOST_VIEWERS = 64


class Live:
    """Samples a service while `run` runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._fresh = asyncio.Condition()
        self._before: dict[str, tuple[float, ...]] = {}
        self._reckoning = asyncio.Lock()
        self._bounds_of: Config | None = None
        self._bounds: dict[float, dict[str, list[tuple[float, float]]]] = {}  # by load: a few dozen at most
        self.viewers = 0
        self._stopped = False

    async def run(self) -> None:
        """Samples once a second, until cancelled."""
        while True:
            self._history.append(self.sample())
            async with self._fresh:
                self._fresh.notify_all()
            await asyncio.sleep(PERIOD_S)

    async def stop(self) -> None:
        """Ends every view: the server stops."""
        self._stopped = True
        async with self._fresh:
            self._fresh.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: the history, then each new sample, until `stop`."""
        self.viewers += 1
        try:
            yield b"retry: 2000\nevent: history\ndata: " + msgspec.json.encode(list(self._history)) + b"\n\n"
            while not self._stopped:
                async with self._fresh:
                    await self._fresh.wait()
                if self._history and not self._stopped:
                    yield b"event: sample\ndata: " + msgspec.json.encode(self._history[-1]) + b"\n\n"
        finally:
            self.viewers -= 1

    def latest(self) -> dict[str, Any]:
        """The last sample."""
        return self._history[-1] if self._history else self.sample()

    def sample(self) -> dict[str, Any]:
        """The state now, with rates since the last sample."""
        service = self._service
        return {
            "time": time.time(),
            "state": service.state.value,
            "ready": service.ready,
            "uptime_s": time.monotonic() - service.started,
            "models": [self._model(name) for name in service.repository.served],
        }

    def _model(self, name: str) -> dict[str, Any]:
        served = self._service.repository.served[name]
        observer = served.observer
        now = time.monotonic()
        counts = served.counts()
        answered = counts["items"]["answered"]
        sums = (
            now,
            answered,
            observer.items_energy,
            observer.items_energy_known,
            observer.accuracy_sum,
            observer.accuracy_known,
        )
        last = self._before.get(name, (now - PERIOD_S, *sums[1:]))
        self._before[name] = sums
        period, items, energy, measured, accuracy, known = (a - b for a, b in zip(sums, last, strict=True))
        recent = sorted(seconds for when, seconds in observer.recent if now - when <= WINDOW_S)
        return {
            "name": name,
            "router": served.config.router.name,
            "deciding": observer.router,
            "requests": counts["requests"],
            "items": counts["items"],
            "throughput": items / max(period, 1e-9),
            "p50_ms": _percentile_ms(recent, 0.50),
            "p99_ms": _percentile_ms(recent, 0.99),
            "energy_per_item_j": energy / measured if measured else None,
            "expected_accuracy": accuracy / known if known else _mean(observer.accuracy_sum, observer.accuracy_known),
            "agreement": served.accuracy is not None and bool(served.accuracy.agreement),
            "fifo": served.engine.fifo_length,
            "widths": dict(observer.width_items),
            "decisions": _by_head(observer.decisions),
            "fallbacks": observer.fallbacks,
            "suspensions": observer.suspensions,
            "reasons": list(observer.fallback_reasons),
            "second_passes": observer.second_passes,
            "margins": observer.margins.buckets[:-1] if any(observer.margins.buckets) else None,
            "servers": [_server(view) for view in served.engine.servers.values()],
        }

    async def bound(self, name: str) -> dict[str, Any]:
        """What accuracy costs at the bound at a model's load now, rounded to a tenth of its size: by kind of plan
        `[[joules per item, accuracy], ...]`. Empty where nothing is served or profiles or margins are not known.

        Raises Refusal for an unknown model.
        """
        served = self._service.repository.find(name)
        sample = next((m for m in self.latest()["models"] if m["name"] == name), None)
        if sample is None or sample["throughput"] < 1 or sample["margins"] is None:
            return {}
        load = float(f"{sample['throughput']:.1g}")
        async with self._reckoning:  # one at a time, away from the event loop
            config = served.engine.config
            if self._bounds_of is not config:
                self._bounds_of, self._bounds = config, {}
            if load not in self._bounds:
                self._bounds[load] = await asyncio.to_thread(_hulls, config, load)
        return {"load_items_s": load, "hulls": self._bounds[load]}


def _hulls(config: Config, load: float) -> dict[str, list[tuple[float, float]]]:
    from slim_scheduler.run.frontier import hulls  # the solver takes a while to import

    try:
        return hulls(config, load)
    except InputError:
        return {}


def _server(view: Any) -> dict[str, Any]:
    report = view.report
    row = {"name": view.name, "up": view.up, "outstanding": view.outstanding, "credit": view.credit_tasks}
    if report is not None:
        row |= {
            "queue": report.queue_length,
            "utilization": report.utilization,
            "pace": report.pace,
            "memory_used": report.memory_used,
            "memory_total": report.memory_total,
            "power_w": report.power_w,
            "energy_j": report.energy_j,
            "energy_source": report.energy_source,
        }
    return row


def _by_head(decisions: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    heads: dict[str, dict[str, int]] = {"server": {}, "width": {}, "group": {}}
    for (head, choice), count in decisions.items():
        heads[head][choice] = count
    return heads


def _percentile_ms(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
