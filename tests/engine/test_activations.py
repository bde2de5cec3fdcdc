"""Rows of batches: gathered as views where they lie together, and never those of an attempt that was given up."""

import weakref

import torch

from slim_scheduler.core.types import ItemOutcome, Outcome, Task
from slim_scheduler.engine.activations import Activations, KeptRows, gather, runs


def task(task_id: int, item: int, segment: int, again: bool = False, keep: bool = False) -> Task:
    return Task(task_id, item, segment, None, None, 0.0, None, 0, again=again, keep=keep)


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
    activations = Activations()
    inputs, first = torch.zeros(2, 1), torch.ones(2, 1)
    activations.add((10, 11), inputs)
    attempts = [task(1, 10, 0), task(2, 11, 0)]
    activations.sent(attempts)
    assert activations.inputs(attempts) == (attempts, [(inputs, 0), (inputs, 1)])
    activations.store(attempts, first)
    following = [task(3, 11, 1), task(4, 10, 1)]
    activations.sent(following)
    assert activations.inputs(following) == (following, [(first, 1), (first, 0)])


def test_a_late_result_of_a_given_up_attempt_changes_nothing():
    activations = Activations()
    activations.add((10,), torch.zeros(1, 1))
    given_up, retried = task(1, 10, 0), task(2, 10, 0)
    activations.sent([given_up])
    activations.sent([retried])
    right = torch.ones(1, 1)
    activations.store([retried], right)
    activations.store([given_up], torch.full((1, 1), 9.0))
    assert activations.inputs([given_up]) == ([], []), "nobody waits for it, so it is not computed"
    following = [task(3, 10, 1)]
    activations.sent(following)
    assert activations.inputs(following) == (following, [(right, 0)])


def test_an_item_that_lost_its_activation_begins_again_from_its_input():
    activations = Activations()
    inputs = torch.zeros(1, 1)
    activations.add((10,), inputs)
    for attempt, segment in ((1, 0), (2, 1)):
        activations.sent([task(attempt, 10, segment)])
        activations.store([task(attempt, 10, segment)], torch.ones(1, 1))
    restart = task(3, 10, 0)
    activations.sent([restart])
    assert activations.inputs([restart]) == ([restart], [(inputs, 0)])


def test_an_item_that_ended_is_not_computed_and_its_rows_are_gone():
    activations = Activations()
    activations.add((10, 11), torch.zeros(2, 1))
    attempts = [task(1, 10, 0), task(2, 11, 0)]
    activations.sent(attempts)
    activations.forget([10])
    assert [t.item for t in activations.inputs(attempts)[0]] == [11]
    activations.forget([11])
    assert activations.held_bytes == 0


# ---- second passes: item 10, an ordinary network of one segment or the last of two; `again` marks the second pass


def ended(item: int, passes: int) -> ItemOutcome:
    return ItemOutcome(item, Outcome.ANSWERED, (1.0,), ("a",), 0.0, 0.0, passes=passes)


def ran(activations: Activations, attempt: Task, value: float) -> None:
    activations.sent([attempt])
    activations.store([attempt], torch.full((1, 1), value))


def test_a_first_pass_tried_again_after_it_had_run_is_answered_with_what_ran_last():
    activations = Activations()
    activations.add((10,), torch.zeros(1, 1))
    ran(activations, task(1, 10, 0), 1.0)  # the server was lost before it could say so
    ran(activations, task(2, 10, 0), 2.0)
    assert activations.results([ended(10, passes=1)]) == 2.0


def test_a_second_pass_keeps_the_answer_of_the_first_however_often_it_is_tried():
    activations = Activations()
    activations.add((10,), torch.zeros(1, 1))
    ran(activations, task(1, 10, 0), 1.0)
    ran(activations, task(2, 10, 0, again=True), 2.0)
    activations.sent([task(3, 10, 0, again=True)])
    assert activations.results([ended(10, passes=1)]) == 1.0, "the second never came to its end"
    activations.store([task(3, 10, 0, again=True)], torch.full((1, 1), 3.0))
    assert activations.results([ended(10, passes=2)]) == 3.0


def first_pass_of_three(activations: Activations) -> None:
    """Its outputs are 1, 2 and 3; that of the first segment is kept."""
    activations.add((10,), torch.zeros(1, 1))
    for segment in range(3):
        ran(activations, task(segment + 1, 10, segment, keep=segment == 1), segment + 1.0)


def test_a_second_pass_goes_on_from_the_activation_that_was_kept():
    activations = Activations()
    first_pass_of_three(activations)
    resumed = task(4, 10, 1, again=True)
    activations.sent([resumed])
    ((source, row),) = activations.inputs([resumed])[1]
    assert source[row] == 1.0
    activations.sent([task(5, 10, 1, again=True)])
    assert len(activations.inputs([task(5, 10, 1, again=True)])[1]) == 1, "the same for another try"
    assert activations.results([ended(10, passes=1)]) == 3.0
    ran(activations, task(5, 10, 1, again=True), 20.0)
    ran(activations, task(6, 10, 2, again=True), 30.0)
    assert activations.results([ended(10, passes=2)]) == 30.0


def test_what_was_kept_is_dropped_when_the_second_pass_does_not_need_it():
    for attempts in ([task(4, 10, 0, again=True)], [task(4, 10, 1, again=True), task(5, 10, 0, again=True)]):
        activations = Activations()
        first_pass_of_three(activations)
        assert activations.held_bytes == 3 * 4, "input, kept, answer"
        for attempt in attempts:
            activations.sent([attempt])
        assert activations.held_bytes == 2 * 4, "input; the answer is held until the end"


def test_few_rows_that_are_kept_do_not_hold_their_whole_batch():
    output = torch.arange(32.0).reshape(8, 4)
    rows, gone = KeptRows(), weakref.ref(output)
    for at in range(8):
        rows.put(at, (output, at))
    kept = output.clone()
    del output
    for at in (0, 2, 3, 5, 7):
        rows.drop(at)
    assert gone() is not None, "three of eight are left"
    rows.drop(6)
    rows.drop(6)
    assert gone() is None
    assert len(rows) == 2
    assert torch.equal(gather([rows[1], rows[4]]), kept[[1, 4]])
    assert rows[1][0] is rows[4][0], "side by side in a tensor of their own"
    assert rows[1][0].shape == (2, 4)
    rows.put(1, (torch.zeros(1, 4), 0))
    assert torch.equal(gather([rows[1], rows[4]]), torch.stack((torch.zeros(4), kept[4])))


def test_an_item_that_waits_for_its_second_pass_does_not_hold_its_batch():
    activations = Activations()
    items = range(8)
    activations.add(items, torch.zeros(8, 1))
    first = [task(item, item, 0) for item in items]
    activations.sent(first)
    activations.store(first, torch.arange(800.0).reshape(8, 100))
    last = [task(100 + item, item, 1, keep=True) for item in items]
    activations.sent(last)
    activations.store(last, torch.zeros(8, 1))
    activations.forget(items[1:])
    again = task(200, 0, 1, again=True)
    activations.sent([again])
    (_, (row,)) = activations.inputs([again])
    assert torch.equal(gather([row]), torch.arange(100.0).reshape(1, 100))
    assert len(row[0]) == 2, "of eight"
