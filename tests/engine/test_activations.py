"""Rows of batches: gathered as views where they lie together, and never those of an attempt that was given up."""

import torch

from slim_scheduler.core.types import ItemOutcome, Outcome, Task
from slim_scheduler.engine.activations import Ledger, gather, runs


def task(task_id: int, item: int, segment: int, again: bool = False) -> Task:
    return Task(task_id, item, segment, None, None, 0.0, None, 0, again=again)


def test_rows_side_by_side_are_one_view_of_the_batch():
    batch = torch.arange(12.0).reshape(6, 2)
    rows = [(batch, 2), (batch, 3), (batch, 4)]
    assert gather(rows).data_ptr() == batch[2].data_ptr()
    assert torch.equal(gather(rows), batch[2:5])


def test_scattered_rows_are_copied_in_order():
    one, other = torch.arange(4.0).reshape(4, 1), torch.arange(10.0, 14.0).reshape(4, 1)
    rows = [(one, 3), (one, 0), (one, 1), (other, 2), (other, 3)]
    assert [len(view) for view in runs(rows)] == [1, 2, 2]
    assert gather(rows).flatten().tolist() == [3, 0, 1, 12, 13]


def test_gathering_keeps_the_layout_of_convolutions():
    batch = torch.zeros(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    assert gather([(batch, 2), (batch, 0)]).is_contiguous(memory_format=torch.channels_last)


def test_an_items_next_segment_reads_what_its_last_one_wrote():
    ledger = Ledger()
    inputs, first = torch.zeros(2, 1), torch.ones(2, 1)
    ledger.add((10, 11), inputs)
    attempts = [task(1, 10, 0), task(2, 11, 0)]
    ledger.sent(attempts)
    assert ledger.inputs(attempts) == (attempts, [(inputs, 0), (inputs, 1)])
    ledger.store(attempts, first)
    following = [task(3, 11, 1)]
    ledger.sent(following)
    assert ledger.inputs(following) == (following, [(first, 1)])
    assert torch.equal(ledger.result(10, 0), first[0])


def test_a_late_result_of_a_given_up_attempt_changes_nothing():
    ledger = Ledger()
    ledger.add((10,), torch.zeros(1, 1))
    given_up, retried = task(1, 10, 0), task(2, 10, 0)
    ledger.sent([given_up])
    ledger.sent([retried])
    right = torch.ones(1, 1)
    ledger.store([retried], right)
    ledger.store([given_up], torch.full((1, 1), 9.0))
    assert ledger.result(10, 0) == 1
    assert ledger.inputs([given_up]) == ([], []), "nobody waits for it, so it is not computed"


def test_an_item_that_lost_its_activation_begins_again_from_its_input():
    ledger = Ledger()
    inputs = torch.zeros(1, 1)
    ledger.add((10,), inputs)
    for attempt, segment in ((1, 0), (2, 1)):
        ledger.sent([task(attempt, 10, segment)])
        ledger.store([task(attempt, 10, segment)], torch.ones(1, 1))
    restart = task(3, 10, 0)
    ledger.sent([restart])
    assert ledger.inputs([restart]) == ([restart], [(inputs, 0)])


def test_an_item_that_ended_is_not_computed_and_its_rows_are_gone():
    ledger = Ledger()
    ledger.add((10, 11), torch.zeros(2, 1))
    attempts = [task(1, 10, 0), task(2, 11, 0)]
    ledger.sent(attempts)
    ledger.forget([10])
    assert [t.item for t in ledger.inputs(attempts)[0]] == [11]
    ledger.forget([11])
    assert ledger.held_bytes == 0


# ---- second passes: item 10, an ordinary network of one segment or the last of two; `again` marks the second pass


def ended(item: int, passes: int) -> ItemOutcome:
    return ItemOutcome(item, Outcome.ANSWERED, (1.0,), ("a",), 0.0, 0.0, passes=passes)


def ran(ledger: Ledger, attempt: Task, value: float) -> None:
    ledger.sent([attempt])
    ledger.store([attempt], torch.full((1, 1), value))


def test_a_first_pass_tried_again_after_it_had_run_is_answered_with_what_ran_last():
    ledger = Ledger()
    ledger.add((10,), torch.zeros(1, 1))
    ran(ledger, task(1, 10, 0), 1.0)  # the server was lost before it could say so
    ran(ledger, task(2, 10, 0), 2.0)
    assert ledger.results([ended(10, passes=1)]) == 2.0


def test_a_second_pass_keeps_the_answer_of_the_first_however_often_it_is_tried():
    ledger = Ledger()
    ledger.add((10,), torch.zeros(1, 1))
    ran(ledger, task(1, 10, 0), 1.0)
    ran(ledger, task(2, 10, 0, again=True), 2.0)
    ledger.sent([task(3, 10, 0, again=True)])
    assert ledger.results([ended(10, passes=1)]) == 1.0, "the second never came to its end"
    ledger.store([task(3, 10, 0, again=True)], torch.full((1, 1), 3.0))
    assert ledger.results([ended(10, passes=2)]) == 3.0
