"""Tensors find their tasks: rows at the servers, whereabouts at the router, and nothing kept of what has ended."""

import torch

from slim_scheduler.core.types import Block, ItemOutcome, Outcome, Task
from slim_scheduler.engine.cluster.activation_store import ServerActivations
from slim_scheduler.engine.cluster.item_store import ClusterItemStore
from slim_scheduler.engine.cluster.wire import Forget

LAST = 1  # of two segments


def task(task_id: int, item: int, segment: int = 0, home: str | None = None, **marks: bool) -> Task:
    return Task(task_id, item, segment, 0.5 if segment else None, home, 0.0, None, 0, **marks)


def block(server: str, *tasks: Task) -> Block:
    return Block(tasks[0].task_id, server, tasks[0].segment, 0.5, tasks[0].previous_width, False, tasks, 0.0)


def send(ledger: ClusterItemStore, server: str, *tasks: Task):
    ledger.sent(tasks)
    return ledger.sources_of(block(server, *tasks))


def two_items() -> ClusterItemStore:
    ledger = ClusterItemStore()
    ledger.add([7, 8], torch.arange(4.0).reshape(2, 2))
    return ledger


# ---- the router


def test_first_segments_inputs_travel_with_the_block():
    sources, rows = send(two_items(), "a", task(1, 8), task(2, 7))
    assert sources == (0, 1)
    assert [tensor[row].tolist() for tensor, row in rows] == [[2.0, 3.0], [0.0, 1.0]]


def test_later_segments_name_the_task_whose_output_they_continue():
    ledger = two_items()
    send(ledger, "a", task(1, 7), task(2, 8))
    ledger.done("a", [1, 2])
    assert send(ledger, "b", task(3, 7, 1, "a"), task(4, 8, 1, "a")) == ((1, 2), [])


def test_task_of_an_ended_item_travels_without_input():
    ledger = two_items()
    ledger.sent([task(1, 7), task(2, 8)])
    ledger.forget([7])
    sources, rows = ledger.sources_of(block("a", task(1, 7), task(2, 8)))
    assert sources == (None, 0)
    assert len(rows) == 1


def test_late_word_of_a_given_up_attempt_does_not_move_an_item():
    ledger = two_items()
    send(ledger, "a", task(1, 7))
    send(ledger, "b", task(2, 7))  # tried again elsewhere
    ledger.done("b", [2])
    ledger.done("a", [1])
    assert send(ledger, "c", task(3, 7, 1, "b"))[0] == (2,)


def test_output_that_is_not_where_the_dispatcher_believes_is_called_lost():
    ledger = two_items()
    send(ledger, "a", task(1, 7))
    ledger.done("a", [1])
    assert send(ledger, "b", task(2, 7, 1, "c"))[0] == (-1,)


def test_servers_forget_outputs_that_are_passed_and_items_that_ended():
    ledger = two_items()
    send(ledger, "a", task(1, 7))
    ledger.done("a", [1])
    assert ledger.is_needed_at("a")
    send(ledger, "b", task(2, 7, 1, "a"))
    ledger.done("b", [2])
    send(ledger, "b", task(3, 7, 2, "b"))
    assert not ledger.is_needed_at("a")
    assert ledger.take_forgotten("a") == Forget((1,), ())
    ledger.forget([7, 8])
    assert ledger.take_forgotten("a") == Forget((), (7,))
    assert ledger.take_forgotten("b") == Forget((), (7,))
    assert ledger.take_forgotten("b") == Forget()
    assert not len(ledger)


def first_pass_of_three(ledger: ClusterItemStore) -> None:
    """At a, b and c; the output that lies at a is kept."""
    send(ledger, "a", task(1, 7))
    ledger.done("a", [1])
    send(ledger, "b", task(2, 7, 1, "a", keep=True))
    ledger.done("b", [2])
    send(ledger, "c", task(3, 7, 2, "b"))
    assert ledger.take_forgotten("a") == Forget()
    ledger.done("c", [3])
    ledger.answered([3], torch.tensor([[3.0]]))


def test_a_second_pass_goes_on_from_an_output_that_was_kept():
    ledger = two_items()
    first_pass_of_three(ledger)
    assert send(ledger, "b", task(4, 7, 1, "a", again=True)) == ((1,), [])
    assert ledger.is_needed_at("a")
    ledger.done("b", [4])
    send(ledger, "c", task(5, 7, 2, "b", again=True))
    assert not ledger.is_needed_at("a")
    assert ledger.take_forgotten("a") == Forget((1,), ())
    assert ledger.results([ItemOutcome(7, Outcome.ANSWERED, (1.0,), ("a",), 0.0, 0.0)]).tolist() == [[3.0]]


def test_an_output_that_was_kept_for_nothing_is_forgotten():
    ledger = two_items()
    first_pass_of_three(ledger)
    sources, rows = send(ledger, "b", task(4, 7, again=True))
    assert (sources, len(rows)) == ((0,), 1)
    assert ledger.take_forgotten("a") == Forget((1,), ())


def test_what_a_first_pass_kept_is_forgotten_when_it_begins_again():
    ledger = two_items()
    send(ledger, "a", task(1, 7))
    ledger.done("a", [1])
    send(ledger, "b", task(2, 7, 1, "a", keep=True))
    send(ledger, "b", task(3, 7))  # b's activation was lost
    assert ledger.take_forgotten("a") == Forget((1,), ())


def test_answers_reach_their_items_and_late_ones_nobody():
    ledger = two_items()
    send(ledger, "a", task(1, 7), task(2, 8))
    ledger.forget([8])
    ledger.answered([2, 1], torch.tensor([[1.0], [2.0]]))
    assert ledger.results([ItemOutcome(7, Outcome.ANSWERED, (1.0,), ("a",), 0.0, 0.0)]).tolist() == [[2.0]]
    assert len(ledger) == 1


# ---- a server


def test_output_stays_until_the_item_is_forgotten():
    activations, first = ServerActivations(LAST), task(1, 7)
    activations.put_input(first, (torch.ones(1, 2), 0))
    wanted, rows = activations.inputs([first])
    assert (wanted, len(rows)) == ([first], 1)
    activations.store([first], torch.full((1, 3), 5.0))
    assert activations.inputs([first]) == ([], [])
    assert activations.rows([1, 99])[0] == (1,)
    assert activations.rows([1])[1].tolist() == [[5.0, 5.0, 5.0]]
    activations.forget([], [7])
    assert len(activations) == 0
    assert activations.rows([1]) == ((), None)


def test_last_segments_output_goes_to_the_router():
    activations, last = ServerActivations(LAST), task(3, 7, LAST, "a")
    activations.put_input(last, (torch.ones(1, 2), 0))
    activations.store([last], torch.zeros(1, 10))
    assert [tasks for tasks, _ in activations.answers] == [(3,)]
    assert len(activations) == 0


def test_block_that_comes_after_its_items_end_leaves_nothing():
    activations, late = ServerActivations(LAST), task(1, 7)
    activations.forget([], [7])
    activations.put_input(late, (torch.ones(1, 2), 0))
    assert activations.inputs([late]) == ([], [])
    activations.store([late], torch.ones(1, 3))
    assert len(activations) == 0
