from hypothesis import given
from hypothesis import strategies as st

from slim_scheduler.core.queues import STALE_HEADS, KeyedQueue
from tests.core.networks import task


def ids(entries):
    return [entry[2].task_id for entry in entries]


def test_the_oldest_entry_names_the_key_and_others_of_that_key_come_with_it():
    queue = KeyedQueue()
    for task_id, key in ((1, "x"), (2, "y"), (3, "x")):
        queue.push(key, 0.0, task(task_id))
    assert queue.head() == "x"
    assert ids(queue.take("x", 8)) == [1, 3]
    assert queue.head() == "y"


def test_a_batch_that_goes_back_keeps_its_place():
    queue = KeyedQueue()
    for task_id in (1, 2, 3):
        queue.push("x", 0.0, task(task_id))
    taken = queue.take("x", 2)
    queue.push("x", 0.0, task(4))
    queue.put_back("x", taken)
    assert ids(queue.take("x", 8)) == [1, 2, 3, 4]


def test_a_batch_that_is_taken_and_put_back_over_and_over_is_announced_once():
    queue = KeyedQueue()
    for task_id in range(1, 9):
        queue.push("x", 0.0, task(task_id))
    for _ in range(100):
        queue.put_back("x", queue.take("x", 4))
        assert queue.head() == "x"
    assert len(queue._heads) == 1
    queue.check_invariants()


def test_a_lower_priority_waits_but_comes_before_what_entered_much_later():
    queue = KeyedQueue()
    queue.push("x", 0.0 + 1.0, task(1))  # one level lower: ages by a second
    queue.push("x", 0.5, task(2))
    queue.push("x", 1.5, task(3))
    assert ids(queue.take("x", 8)) == [2, 1, 3]


def test_a_removed_task_is_never_taken_and_an_emptied_key_is_forgotten():
    queue = KeyedQueue()
    queue.push("x", 0.0, task(1))
    queue.push("y", 1.0, task(2))
    queue.remove("x", 1)
    assert queue.head() == "y"
    assert len(queue) == 1
    queue.remove("y", 2)
    assert queue.head() is None


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(0, 10), st.booleans()), max_size=60), st.integers(1, 5))
def test_each_key_comes_out_in_rank_order_without_the_removed(pushes, limit):
    queue = KeyedQueue()
    for task_id, (key, rank, _) in enumerate(pushes):
        queue.push(key, rank, task(task_id))
    for task_id, (key, _, removed) in enumerate(pushes):
        if removed:
            queue.remove(key, task_id)
        queue.check_invariants()
    out = {"x": [], "y": [], "z": []}
    while (key := queue.head()) is not None:
        out[key] += queue.take(key, limit)
        queue.check_invariants()
    for key, entries in out.items():
        expected = [(r, i) for i, (k, r, removed) in enumerate(pushes) if k == key and not removed]
        assert [(e[0], e[2].task_id) for e in entries] == sorted(expected)


def test_heads_do_not_pile_up_where_only_lanes_are_looked_at():
    queue = KeyedQueue()
    queue.push("stays", 0.0, task(1))
    for n in range(2, 2000):
        queue.push("x", float(n), task(n))
        assert {key for key, _, _ in queue.lanes()} == {"stays", "x"}
        queue.take("x", 1)
        assert len(queue._heads) <= STALE_HEADS + 4
    queue.push("x", 0.5, task(2000))
    assert queue.head() == "stays"
    queue.take("stays", 1)
    assert queue.head() == "x"
