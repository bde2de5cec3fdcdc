"""A small network and device with round numbers, for stories with exact times."""

from slim_scheduler.core.profile import Curve, Latency, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Batch, Task, Width

WIDTHS = (0.5, 1.0)
SEGMENTS = 2


def small_shape() -> ModelShape:
    """Two segments, two widths. An item is 1,000 bytes, its activation 4,000 at width 0.5 and 8,000 at 1."""
    return ModelShape(
        name="small",
        segments=SEGMENTS,
        widths=WIDTHS,
        classes=10,
        item_shape=(1, 10, 25),
        input_bytes=1_000,
        activation_bytes=((4_000, 8_000),) * 2,
        weight_bytes=((100_000, 200_000),) * 2,
        variant_bytes=((((10_000, 20_000),) * 2),) * 2,
        workspace_bytes=((1_000, 2_000),) * 2,
        macs=((((1_000, 2_000),) * 2),) * 2,
    )


def small_profile(**changes: object) -> Profile:
    """A batch of n takes (4 + n) ms at width 0.5 and twice that at 1. Idle 100 W, busy 200 W. Loads 1 MB/s + 0.1 s."""
    rows = []
    for segment in range(SEGMENTS):
        for previous in (None,) if segment == 0 else WIDTHS:
            for width in WIDTHS:
                seconds = tuple((0.004 + 0.001 * n) * width / 0.5 for n in (1, 8))
                rows.append(Latency(segment, previous, width, seconds))
    fields: dict[str, object] = {
        "device": "small",
        "model": "small",
        "source": "round numbers for tests",
        "batches": (1, 8),
        "latency_rows": tuple(rows),
        "load_s": 0.1,
        "load_bytes_per_s": 1e6,
        "memory_bytes": 10_000_000,
        "power": Curve((0.0, 1.0), (100.0, 200.0)),
    }
    return Profile(**{**fields, **changes})  # type: ignore[arg-type]


def batch(batch_id: int, size: int = 6, segment: int = 0, width: Width = 0.5, previous: Width | None = None) -> Batch:
    """Alone on the small device, 6 items at width 0.5 take 10 ms."""
    tasks = tuple(
        Task(
            task_id=100 * batch_id + i,
            item=i,
            segment=segment,
            previous_width=previous,
            home=None,
            entered=0.0,
            deadline=None,
            priority=0,
        )
        for i in range(size)
    )
    return Batch(batch_id, 0, segment, width, width, previous, tasks, 0.0)
