"""An output that is NaN or infinite is that item's failure, and nobody else's."""

import numpy as np

from slim_scheduler.core.messages import BatchReported, ServerChanged
from slim_scheduler.core.types import NOT_FINITE, Outcome
from tests.engine.live import TOLERANCE, Watch, config_of, engine_of, expected, images


async def test_an_item_without_a_finite_output_fails_and_the_others_of_its_batch_are_answered():
    watch, items = Watch(), images(4)
    items[2] = np.inf  # what the front end refuses; in process nobody looks
    router = {"name": "jsq:0.5", "fallback": "jsq:0.5"}
    async with engine_of(config_of(({}, {}), router=router), recorder=watch) as engine:
        together = await engine.infer(items)
        alone = [await engine.infer(items[row : row + 1]) for row in range(4)]
        counts = engine.counts["items"]
    assert together.outcome is Outcome.FAILED
    assert together.logits is None
    assert [item.outcome for item in together.items] == [Outcome.ANSWERED] * 2 + [Outcome.FAILED, Outcome.ANSWERED]
    assert together.items[2].reason == together.reason == NOT_FINITE
    assert [result.outcome for result in alone] == [item.outcome for item in together.items]
    good = expected(items[:1], (0.5,) * 4)
    assert np.abs(alone[0].logits - good).max() < TOLERANCE
    assert (counts["answered"], counts["failed"], counts["in_flight"]) == (6, 2, 0)
    heard = [event for machine, _, event, _ in watch.steps if machine == "dispatcher"]
    assert sum(len(event.not_finite) for event in heard if isinstance(event, BatchReported)) == 2
    assert not watch.seen(ServerChanged), "no server is blamed, and nothing is run again"
