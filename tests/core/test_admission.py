"""Beyond the peak, work that would miss its deadline is not taken; below it, everything is."""

from types import SimpleNamespace

from slim_scheduler.core.dispatch.admission import MOST_CHOICES, Admission
from slim_scheduler.core.types import Request, TaskConstraints
from tests.core.networks import SHAPE

PERIOD = 0.01  # the tasks of one item every 10 ms: 100 items per second


def request(deadline: float | None, now: float = 0.0) -> Request:
    return Request(0, (0,), now, deadline)


def answered_for(admission: Admission, seconds: float, waiting: int) -> float:
    """Servers that finish an item's tasks every period, with an arrival before each; returns the time after."""
    now = 0.0
    for i in range(round(seconds / PERIOD)):
        now = (i + 1) * PERIOD
        assert admission.refuse(request(None), waiting, waiting, waiting + 1, now) is None
        admission.worked(SHAPE.segments, now)
    return now


def test_what_would_be_late_is_refused_with_the_time_it_would_take():
    admission = Admission(SHAPE, 1000, None)
    now = answered_for(admission, 1.0, waiting=5)
    assert admission.refuse(request(now + 0.5), 5, 5, 10, now) is None  # 10 items take 0.1 s
    refusal = admission.refuse(request(now + 0.5), 5, 5, 100, now)  # 100 take 1 s
    assert refusal is not None
    reason, retry_after = refusal
    assert "1000 ms of work wait" in reason
    assert retry_after is not None
    assert 0.1 <= retry_after <= 1.0


def test_constraints_that_clients_choose_are_not_remembered_without_bound():
    admission = Admission(SHAPE, 1000, SimpleNamespace(top1=lambda widths: 0.5))
    for n in range(2 * MOST_CHOICES):
        admission.widths(0, TaskConstraints(None, accuracy_floor=n * 1e-9), ())
    assert len(admission._choices) <= MOST_CHOICES


def test_what_can_never_wait_is_not_to_come_again():
    admission = Admission(SHAPE, 10, None)
    large = Request(0, tuple(range(11)), 0.0)
    said = "11 items came at once and at most 10 may wait; send fewer in one request", None
    assert admission.refuse(large, 0, 0, 0, 0.0) == said
    assert admission.refuse_offer(large, 0, 0, 0, 0.0) == said
    assert admission.refuse(Request(0, tuple(range(10)), 0.0), 1, 0, 1, 0.0)[1] is not None


def test_half_of_the_time_to_a_deadline_may_be_filled():
    admission = Admission(SHAPE, 1000, None)
    answered_for(admission, 1.0, waiting=5)
    assert admission.too_late(1.0, 48) is None  # 0.48 s
    assert admission.too_late(1.0, 52) is not None


def test_work_without_a_deadline_is_taken_however_much_waits():
    admission = Admission(SHAPE, 1000, None)
    now = answered_for(admission, 1.0, waiting=5)
    assert admission.refuse(request(None), 900, 900, 999, now) is None


def test_the_rate_of_quiet_times_says_nothing_about_capacity():
    admission = Admission(SHAPE, 1000, None)
    now = answered_for(admission, 1.0, waiting=0)
    assert admission.refuse(request(now + 0.01), 50, 50, 900, now) is None


def test_servers_can_do_at_least_what_they_do():
    admission = Admission(SHAPE, 1000, None)
    now = answered_for(admission, 1.0, waiting=5)
    for _ in range(200):  # ten times as much, without a queue
        now += PERIOD / 10
        assert admission.refuse(request(None), 0, 0, 1, now) is None
        admission.worked(SHAPE.segments, now)
    assert admission.refuse(request(now + 0.5), 5, 5, 100, now) is None  # 100 items take 0.1 s, not 1 s


def test_nothing_is_refused_for_its_deadline_while_nothing_is_held_up():
    admission = Admission(SHAPE, 1000, None)
    now = answered_for(admission, 1.0, waiting=5)
    assert admission.refuse(request(now + 0.01), 50, 0, 900, now) is None


def test_nothing_is_refused_while_nothing_waits():
    admission = Admission(SHAPE, 1000, None)
    now = answered_for(admission, 1.0, waiting=5)
    assert admission.refuse(request(now + 0.01), 0, 0, 900, now) is None
