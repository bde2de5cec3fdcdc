"""A family against what one would use instead: ONNX Runtime behind LitServe, the large variant alone or the small one.

Variants are the CIFAR-100 network at widths 0.25 and 1 as ONNX files. Every server gets the same files, one compute
thread, the same batch size and the same requests at the same times: calm, a surge that the large variant cannot carry,
calm again; both rates come from what LitServe carried in this run. Requests carry real test images, so answers are
judged. An item counts as good if its answer is there within the deadline, and as right if it is good and correct; both
are shares of all items that arrived. Servers take turns, and the one whose turn it is not is stopped. `SLIM_CIFAR100`
names the images (cifar-100-binary).

Before that, every variant alone in a closed loop: what choosing costs where there is nothing to choose.
"""

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks import serve_vs_litserve as base
from slim_scheduler.client.client import Constraints
from slim_scheduler.client.wire import ConnectionLostError, HttpConnection
from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.engine.automatic import measured_profile
from slim_scheduler.engine.inputs import Normalization
from slim_scheduler.model.data import load_data
from slim_scheduler.model.export import export_model
from slim_scheduler.model.family import load_family, load_family_manifest
from slim_scheduler.model.family_import import import_family
from slim_scheduler.setup.accuracy_files import TABLE_FILES, read_accuracy, write_accuracy

MODEL = Path(__file__).parents[1] / "models" / "cifar100"
VARIANTS = {"small": 0.25, "large": 1.0}
MAX_BATCH = 8
DEADLINE_MS = 250.0
CALM, SURGE = 0.5, 0.7  # of what LitServe carries with the large variant, and with the small one
STAGES = ((5.0, "calm"), (6.0, "surge"), (7.0, "calm"))  # seconds
ROUNDS = 3
CONNECTIONS = 32
IMAGES = 512
CONFIG = """
[model]
path = "{model}"
[[servers]]
name = "a"
device = "cpu"
profile = "{profile}"
max_batch = {batch}
max_upgrade = 0
threads = 1
batch_window_ms = "auto"
[dispatch]
reentry = "oldest-item"
[router]
name = "{router}"
"""


class Load(NamedTuple):
    """Requests as bytes, what each must be answered, and when they come."""

    requests: list[bytes]
    labels: list[int]
    read: Callable[[dict[str, str], bytes], int]  # the class that an answer says


class Outcome(NamedTuple):
    """Shares of all items that arrived, and the p99 of the answers in milliseconds."""

    good: float
    right: float
    p99_ms: float


def run() -> dict[str, dict[str, Any]]:
    data = os.environ.get("SLIM_CIFAR100")
    if not data:
        print("left out: set SLIM_CIFAR100 to a folder of cifar-100-binary", flush=True)
        return {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        here = Path(folder)
        files = {name: export_model(MODEL, (width,), "onnx", here / f"{name}.onnx") for name, width in VARIANTS.items()}
        family, profile = _family(here, list(files.values()))
        manifest = load_family_manifest(family)
        test = load_data(data, manifest.shape.item_shape).test
        pick = np.random.default_rng(0).permutation(len(test))[:IMAGES]
        items = Normalization(manifest.mean, manifest.std).apply(test.pixels[pick])[:, None]  # one image per request
        labels = test.labels[pick].tolist()
        shape = "x".join(map(str, manifest.shape.item_shape))

        def ours(router: str) -> base.Server:
            config = here / f"{router.replace(':', '-')}.toml"
            text = CONFIG.format(model=family, profile=profile, batch=MAX_BATCH, router=router)
            config.write_text(text)
            return stack.enter_context(base._served(config))

        servers = {
            name: stack.enter_context(base.litserve("benchmarks._litserve_onnx", file, shape, MAX_BATCH))
            for name, file in files.items()
        }
        servers |= {"ours": ours("lp"), "small alone": ours("jsq:1"), "large alone": ours("jsq:2")}
        constraints = Constraints(deadline_ms=DEADLINE_MS)
        loads = {}
        for name, server in servers.items():
            if name in files:
                loads[name] = Load(base._their_requests(server.port, items), labels, _their_answer)
            else:
                wanted = constraints if name == "ours" else Constraints()
                loads[name] = Load(base._our_requests(server.port, "cifar", items, wanted), labels, _our_answer)
        alone, peaks = _alone(servers, loads)
        return _surge(servers, loads, {"calm": CALM * peaks["large"], "surge": SURGE * peaks["small"]}) | alone


def _family(folder: Path, files: list[Path]) -> tuple[Path, Path]:
    """The family and its profile on this CPU."""
    import_family(files, folder / "cifar", None)
    measured = read_accuracy(MODEL)  # of the same weights
    uniform = {(rank,): (width,) * measured.segments for rank, width in zip((1.0, 2.0), VARIANTS.values(), strict=True)}
    family = load_family(folder / "cifar")
    assert [variant.name for variant in family.manifest.variants] == list(VARIANTS)
    table = AccuracyTable(
        {rank: measured.correct(widths) for rank, widths in uniform.items()},
        margins={rank: measured.margin(widths) for rank, widths in uniform.items()},
        split="test",
        data=measured.data,
        weights_sha256=family.manifest.weights_sha256,
    )
    write_accuracy(table, folder / "cifar" / TABLE_FILES["test"])
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # measured now, beside what it is compared with
    path, _ = measured_profile(family, "cpu", "fp32", 1, 2.0)
    return folder / "cifar", path


# ---- the surge


def _surge(
    servers: dict[str, base.Server], loads: dict[str, Load], rates: dict[str, float]
) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(0)
    times, begin = [], 0.0
    for seconds, stage in STAGES:
        count = int(rng.poisson(rates[stage] * seconds))
        times += (begin + np.sort(rng.uniform(0.0, seconds, count))).tolist()
        begin += seconds
    rounds: dict[str, list[Outcome]] = {name: [] for name in (*VARIANTS, "ours")}
    for _ in range(ROUNDS):
        for name in rounds:
            rounds[name].append(base._turn(servers[name], _offer, loads[name], times))
            base._say(f"{name}: {rounds[name][-1]}")
    found = {name: Outcome(*map(statistics.median, zip(*those, strict=True))) for name, those in rounds.items()}
    ours = found["ours"]
    hull = _hull_at(ours.good, [(found[name].good, found[name].right) for name in VARIANTS])
    goodput = {name: round(those.good * len(times) / begin, 2) for name, those in found.items()}
    about = f"calm {rates['calm']:.0f}/s, surge {rates['surge']:.0f}/s, deadline {DEADLINE_MS:.0f} ms"
    extra = {
        "goodput_items_s": goodput,
        "good": {name: round(those.good, 4) for name, those in found.items()},
        "right": {name: round(those.right, 4) for name, those in found.items()},
        "p99_ms": {name: round(those.p99_ms, 1) for name, those in found.items()},
        "rounds_right": {name: [round(o.right, 4) for o in those] for name, those in rounds.items()},
    }
    unit = f"share of arrived items answered rightly in time, against the hull of both variants at our goodput; {about}"
    row = base._row(ours.right / hull, 100 * ours.right, 100 * hull, unit, 1.0)
    return {"family_surge": row | extra | {"margin_points": round(100 * (ours.right - hull), 2)}}


def _hull_at(good: float, points: list[tuple[float, float]]) -> float:
    """The most that is right at this goodput or a higher one, by switching between the points over time."""
    points = sorted(points)
    best = max((right for other, right in points if other >= good), default=0.0)
    (a, right_a), (b, right_b) = points[0], points[-1]
    if a < good < b:
        best = max(best, right_a + (right_b - right_a) * (good - a) / (b - a))
    return best or max(right for _, right in points)


def _offer(port: int, load: Load, times: list[float]) -> Outcome:
    async def main() -> Outcome:
        free: list[HttpConnection] = []
        ended: list[tuple[float, bool]] = []  # (latency, right) of what was answered

        async def one(number: int, intended: float) -> None:
            connection = free.pop() if free else await HttpConnection.open("127.0.0.1", port)
            which = number % len(load.requests)
            try:
                status, headers, body = await connection.send(load.requests[which])
            except (OSError, ConnectionLostError):
                return
            if status == 200:
                ended.append((time.perf_counter() - intended, load.read(headers, body) == load.labels[which]))
            if connection.open_for_more:
                free.append(connection)

        start, running = time.perf_counter() + 0.1, []
        for number, offset in enumerate(times):
            if (wait := start + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            running.append(asyncio.create_task(one(number, start + offset)))
        await asyncio.gather(*running)
        for connection in free:
            connection.close()
        good = [right for latency, right in ended if latency <= DEADLINE_MS / 1e3]
        p99 = float(np.percentile([latency for latency, _ in ended], 99)) if ended else float("inf")
        return Outcome(len(good) / len(times), sum(good) / len(times), 1e3 * p99)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _our_answer(headers: dict[str, str], body: bytes) -> int:
    return int(np.frombuffer(body, "<f4", offset=int(headers["inference-header-content-length"])).argmax())


def _their_answer(headers: dict[str, str], body: bytes) -> int:
    return int(np.argmax(json.loads(body)["logits"]))


# ---- every variant alone


def _alone(
    servers: dict[str, base.Server], loads: dict[str, Load]
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Rows of both variants, and LitServe's requests per second with each."""
    rows, peaks = {}, {}
    for name, server in servers.items():  # everything has been used once
        base._turn(server, base._closed, loads[name].requests)
    for name in VARIANTS:
        pairs = []
        for _ in range(ROUNDS):
            ours, theirs = (
                base._turn(servers[who], base._closed, loads[who].requests).throughput_items_s
                for who in (f"{name} alone", name)
            )
            pairs.append((ours, theirs))
            base._say(f"{name} alone: {ours:.1f} against {theirs:.1f} requests/s")
        ratios = [ours / theirs for ours, theirs in pairs]
        mine, its = (statistics.median(values) for values in zip(*pairs, strict=True))
        peaks[name] = its
        unit = f"requests/s of the {name} variant, closed loop, {CONNECTIONS} connections"
        rows[f"family_fixed_{name}"] = base._row(statistics.median(ratios), mine, its, unit, 0.95) | {
            "rounds": [round(ratio, 3) for ratio in ratios]
        }
    return rows, peaks


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
