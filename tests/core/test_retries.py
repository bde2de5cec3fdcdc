"""Another try has its bounds, and its end says why."""

from slim_scheduler.core.dispatch.recovery import BUDGET_AT_START
from slim_scheduler.core.messages import (
    TasksReturned,
)
from slim_scheduler.core.types import Outcome
from tests.core.networks import arrive, dispatcher, replies, request, sent


def test_retries_end_with_a_clear_error():
    made = dispatcher(max_retries=2)
    (block,) = sent(arrive(made, request(1), 0.0))
    for at in (1.0, 2.0, 3.0):
        commands = made.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), at)
        block = (sent(commands) or [None])[0]
    answer = replies(commands)[0]
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, "device lost; gave up after 2 retries")


def test_retries_are_paid_for_by_arrivals():
    made = dispatcher(credit=400, retry_budget=0.25, max_retries=1000)
    blocks = [b for i in range(1, 9) for b in sent(arrive(made, request(i), 0.0))]
    (block, *_), retries = blocks, -1
    while block is not None:
        commands = made.handle(TasksReturned("a", 0, (block.tasks[0].task_id,), "device lost"), 1.0)
        block, retries = (sent(commands) or [None])[0], retries + 1
    assert retries == BUDGET_AT_START + 2, "eight arrivals earn two retries"
    assert replies(commands)[0].reason == "device lost; the retry budget is spent"
