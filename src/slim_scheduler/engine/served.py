"""A profile as it holds while servers serve: scaled by what their batches take then.

`measure.py` times the batches of servers that only compute. A serving process also reads arrivals, routes and answers,
on the same cores, and beside that the work of a batch takes longer. So the configured servers are run at each width in
turn, with more to do than they carry, and the rows of a width are scaled by how much longer its batches took.
"""

from collections.abc import Callable

import msgspec

from slim_scheduler.core.profile import Latency, LatencyTable, Profile
from slim_scheduler.core.types import Seconds, Width
from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.bench import bench
from slim_scheduler.record.recorder import Record
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.machines import carried_by_width

SERVED: Seconds = 4.0  # at each width
LOADING: Seconds = 1.0  # of these, in which instances load
BEYOND = 1.3  # times what the servers carry at a width: batches are full, and few requests are refused
WAITING = 16  # full batches per server that may wait; the rest is refused


def as_served(config: Config, profile: Profile, progress: Callable[[float], None] | None = None) -> Profile:
    """The profile, scaled by width. `config`'s servers have this profile, share this process, and run its workload's
    images. Raises InputError, and KeyboardInterrupt where a run was interrupted."""
    config = live_config(config)
    carried = carried_by_width(config)
    factors: dict[Width, float] = {}
    for done, (width, rate) in enumerate(carried.items()):
        run = bench(_flooded(config, BEYOND * rate), f"jsq:{width:g}")
        if run.info.interrupted:
            raise KeyboardInterrupt
        factors[width] = slower(run.recorder.record(run.info), config, profile)
        if progress is not None:
            progress((done + 1) / len(carried))
    rows = tuple(_scaled(row, factors[row.width]) for row in profile.latency_rows)
    said = ", ".join(f"{factor:.2f} at {width:g}" for width, factor in factors.items())
    notes = f"{profile.notes} Scaled to what batches took while serving: {said}.".strip()
    return msgspec.structs.replace(profile, latency_rows=rows, notes=notes)


def slower(record: Record, config: Config, profile: Profile) -> float:
    """How many times as long as the profile says the batches of a run took, once instances were loaded."""
    slowdown = {server.name: server.slowdown for server in config.servers}
    table = LatencyTable(profile, max(server.max_batch for server in config.servers))
    started = {(row["machine"], row["batch"]): row for row in record.of("StartBatch").to_pylist()}
    took = expected = 0.0
    for row in record.of("BatchReported").to_pylist():
        batch = started.get((row["server"], row["batch"]))
        if batch is not None and row["started"] >= record.info.started_at + LOADING:
            took += row["finished_at"] - row["started"]
            expected += slowdown[row["server"]] * table.seconds(
                batch["segment"], batch["previous_width"], batch["width"], batch["size"]
            )
    return took / expected if expected else 1.0


def _flooded(config: Config, rate: float) -> Config:
    workload = msgspec.structs.replace(
        config.workload,
        kind="poisson",
        rate=rate,
        rate_unit="items/s",
        duration_s=SERVED,
        warmup_s=0.0,
        deadline_ms=0.0,
        items_per_request=1,
        end="cut",
    )
    waiting = sum(WAITING * server.max_batch for server in config.servers)
    dispatch = msgspec.structs.replace(config.dispatch, max_waiting_items=waiting)
    record = msgspec.structs.replace(config.record, level="blocks")
    servers = tuple(msgspec.structs.replace(server, slowdown_of="work") for server in config.servers)
    return msgspec.structs.replace(config, servers=servers, workload=workload, dispatch=dispatch, record=record)


def _scaled(row: Latency, factor: float) -> Latency:
    def times(seconds: tuple[Seconds, ...]) -> tuple[Seconds, ...]:
        return tuple(factor * second for second in seconds)

    return msgspec.structs.replace(
        row,
        seconds=times(row.seconds),
        spread=times(row.spread),
        mean=times(row.mean),
        deviation=times(row.deviation),
    )
