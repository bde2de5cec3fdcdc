"""Requests that a front end has read wait there while it has no time, and come in at once while it has."""

import pytest

from slim_scheduler.core.dispatch.offers import AT_ONCE, BUSY, IN_HAND, PAUSE, Offers
from slim_scheduler.core.messages import (
    FrontTurned,
    OfferRepeated,
    OffersTaken,
    OfferWithdrawn,
    RefusedAgain,
    RequestOffered,
    RouteNow,
    RouteSoon,
    TimerFired,
    WakeAt,
)
from slim_scheduler.core.types import Outcome, Request
from tests.core.networks import dispatcher, done, only, replies, request, sent

HARD, EASY = 0.95, 0.3  # loads


def offered(first: int, end: int, at: float = 0.0, items: int = 2) -> list[Request]:
    return [Request(number, tuple(range(items * number, items * (number + 1))), at) for number in range(first, end)]


class Front:
    """A front end that offers, turns and answers; what it took, in order."""

    def __init__(self) -> None:
        self.offers = Offers()
        self.now = 0.0
        self.taken: list[int] = []
        self.answered = 0
        self.number = 0

    def offer(self, count: int) -> None:
        for one in offered(self.number, self.number + count, self.now):
            self.offers.add(one)
        self.number += count

    def turn(self, load: float, after_pause: bool = False) -> None:
        taken = self.offers.turn(load, after_pause, IN_HAND, self.now)
        self.taken += [request.request_id for request in taken]
        self.offers.check_invariants()

    def answer(self, count: int) -> None:
        done = self.taken[self.answered : self.answered + count]
        for request_id in done:
            self.offers.ended(request_id)
        self.answered += len(done)
        self.offers.check_invariants()


def test_those_that_wait_come_in_in_order_a_batch_at_a_time():
    front = Front()
    front.offer(100)
    for end in (AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE, 100):
        front.turn(EASY)
        assert front.taken == list(range(end))
    assert not front.offers.paused
    assert front.offers.wait(0.0) == 0.0


def test_a_front_end_without_time_holds_back_until_answers_are_out():
    front = Front()
    front.offer(200)
    for _ in range(4):
        front.turn(HARD)
        front.turn(HARD, after_pause=True)
    assert front.taken == list(range(IN_HAND))
    assert front.offers.paused
    front.now = 0.3
    assert front.offers.wait(front.now) == pytest.approx(0.3), "no rate is known, but how long the first has waited"
    assert front.offers.items == 2 * (200 - IN_HAND)
    front.answer(AT_ONCE - 1)
    front.turn(HARD)
    assert front.offers.paused, "a batch that ends may make room for a full one"
    front.turn(HARD, after_pause=True)
    assert front.taken == list(range(IN_HAND + AT_ONCE - 1)), "none did"
    front.turn(EASY)
    assert front.taken == list(range(IN_HAND + 2 * AT_ONCE - 1))


def steady(front: Front, seconds: float, batches: int) -> None:
    """A front end that is never idle and answers a batch in so many seconds; as much comes as is answered."""
    for _ in range(batches):
        front.now += seconds
        front.answer(AT_ONCE)
        front.offer(AT_ONCE)
        front.turn(HARD)


def test_how_long_an_answer_takes_follows_from_the_rate_of_late():
    front = Front()
    front.offer(5 * AT_ONCE)
    front.turn(HARD)
    front.turn(HARD)
    for seconds in (0.02, 0.05, 0.01):
        steady(front, seconds, 100)
        assert front.offers.wait(front.now) == pytest.approx(5 * seconds, rel=0.1), "those in hand are waited for too"


def test_a_front_end_with_time_says_nothing_of_what_it_could_do():
    front = Front()
    front.offer(5 * AT_ONCE)
    front.turn(HARD)
    front.turn(HARD)
    steady(front, 0.02, 100)
    for _ in range(20):
        front.answer(AT_ONCE)
        front.turn(EASY)
    for _ in range(3):
        front.now += 10.0  # hardly anybody comes
        front.offer(AT_ONCE)
        front.turn(EASY)
        front.answer(AT_ONCE)
    assert front.offers.wait(front.now) == 0.0
    front.offer(5 * AT_ONCE)
    assert front.offers.wait(front.now) == pytest.approx(5 * 0.02, rel=0.1), "what was measured while it was busy"


def test_who_leaves_is_forgotten_wherever_it_is():
    front = Front()
    front.offer(AT_ONCE + 3)
    front.turn(EASY)
    for request_id in (*front.taken[:2], AT_ONCE, 999):
        front.offers.ended(request_id)
        front.offers.check_invariants()
    assert front.offers.items == 2 * (3 - 1)


# ---- with the dispatcher


def offer(made, request_id: int, now: float, **asked):
    return made.handle(RequestOffered(request(request_id, at=now, **asked).request), now)


def finish_all(made, commands, now: float):
    """Runs every block that was sent, and those that follow; all commands that come of it."""
    told, blocks = [], sent(commands)
    while blocks:
        more = made.handle(done(blocks.pop(0), now), now)
        told += more
        blocks += sent(more)
    return told


def test_an_offer_that_finds_the_queue_full_is_refused_once_and_those_that_came_in_count():
    made = dispatcher(credit=2, max_waiting_items=4)
    assert [replies(offer(made, number, 0.0)) for number in range(4)] == [[]] * 4
    (refused,) = replies(offer(made, 4, 0.0))
    assert refused.outcome is Outcome.REJECTED
    assert refused.reason == "the queue is full: 1 items came and the limit is 4"
    assert made.handle(FrontTurned(EASY), 0.1)[:2] == [OffersTaken((0, 1, 2, 3)), RouteSoon()]
    assert replies(offer(made, 5, 0.1)), "they wait here"
    assert len(sent(made.handle(RouteNow(), 0.1))[0].tasks) == 2
    assert not replies(offer(made, 6, 0.1)), "two went on to a server"
    made.handle(OfferWithdrawn(6), 0.2)
    assert [bool(replies(offer(made, number, 0.2))) for number in (7, 8, 9)] == [False, False, True]
    made.check_invariants()
    assert made.counts["requests"] == {
        "received": 7, "answered": 0, "rejected": 3, "expired": 0, "cancelled": 0, "failed": 0, "in_flight": 4,
    }  # fmt: skip


def test_an_offer_that_would_be_late_behind_those_that_wait_is_refused():
    made = dispatcher()
    offer(made, 0, 0.0)
    (late,) = replies(offer(made, 1, 1.1, deadline=3.0))
    assert "an answer takes 1100 ms at this load and the deadline is in 1900 ms" in late.reason
    (gone,) = replies(offer(made, 5, 1.1, deadline=1.0999))
    assert gone.reason == "the deadline passed before the request could be taken; allow more time"
    assert not replies(offer(made, 2, 1.1, deadline=9.0))
    assert not replies(offer(made, 3, 1.1))
    (never,) = replies(offer(made, 4, 1.1, deadline=9.0, accuracy_floor=0.9))
    assert "accuracy_floor needs a model with measured accuracy" in never.reason
    assert never.retry_after is None


class Measured:
    def top1(self, widths):
        return sum(widths) / len(widths)


def test_offers_with_an_accuracy_floor_that_can_be_met_obey_the_limits():
    made = dispatcher(credit=2, max_waiting_items=4, accuracy=Measured())
    (gone,) = replies(offer(made, 0, 1.0, deadline=1.0, accuracy_floor=0.9))
    assert gone.reason == "the deadline passed before the request could be taken; allow more time"
    assert [replies(offer(made, number, 1.0, accuracy_floor=0.9)) for number in range(1, 5)] == [[]] * 4
    (full,) = replies(offer(made, 5, 1.0, accuracy_floor=0.9))
    assert full.reason == "the queue is full: 1 items came and the limit is 4"
    made = dispatcher(accuracy=Measured())
    offer(made, 0, 0.0)
    (late,) = replies(offer(made, 1, 1.1, deadline=3.0, accuracy_floor=0.9))
    assert "an answer takes 1100 ms at this load and the deadline is in 1900 ms" in late.reason


def test_an_offer_that_waits_ends_at_its_deadline_though_nobody_may_come_in():
    made = dispatcher(credit=IN_HAND)
    for number in range(IN_HAND):
        offer(made, number, 0.0)
    for _ in range(2):
        made.handle(FrontTurned(BUSY), 0.0)
    made.handle(RouteNow(), 0.0)  # all are at the server, which never answers
    for number, deadline in enumerate((0.2, 0.4, 0.2, None), IN_HAND):
        offer(made, number, 0.0, deadline=deadline)
    assert made.handle(FrontTurned(BUSY), 0.0) == [OffersTaken((), PAUSE)]
    assert made.handle(FrontTurned(HARD), 0.199) == [OffersTaken((), 0.199 + PAUSE)]
    ended = made.handle(FrontTurned(BUSY, after_pause=True), 0.2)
    assert [(r.request_id, r.outcome, r.reason, r.retry_after) for r in replies(ended)] == [
        (IN_HAND, Outcome.EXPIRED, "the deadline passed", None),
        (IN_HAND + 2, Outcome.EXPIRED, "the deadline passed", None),
    ]
    assert only(ended, OffersTaken) == [OffersTaken((), 0.2 + PAUSE)]
    ended = made.handle(FrontTurned(BUSY, after_pause=True), 0.5)
    assert [reply.request_id for reply in replies(ended)] == [IN_HAND + 1]
    assert made._admission.offers.items == 1, "who has no deadline waits on"
    made.check_invariants()
    assert made.counts["requests"]["expired"] == 3


def test_the_like_of_a_refused_offer_is_refused_and_would_be_if_it_were_offered_while_nothing_happens():
    made, other = dispatcher(), dispatcher()
    for machine in (made, other):
        offer(machine, 0, 0.0)
        assert replies(offer(machine, 1, 1.1, deadline=3.0))
    for number, now in enumerate((1.1, 1.2, 2.0, 5.0, 60.0), 2):
        assert made.handle(OfferRepeated(1), now) == [RefusedAgain()]
        assert replies(offer(other, number, now, deadline=now + 1.9))
    assert made.counts == other.counts
    made.check_invariants()


@pytest.mark.parametrize("event", [FrontTurned(EASY), OfferWithdrawn(0), RouteNow(), TimerFired()])
def test_after_anything_else_the_like_of_a_refused_offer_has_to_be_offered(event):
    made = dispatcher()
    offer(made, 0, 0.0)
    offer(made, 1, 1.1, deadline=3.0)
    assert made.handle(OfferRepeated(0), 1.1) == [], "it was not refused"
    made.handle(event, 1.1)
    before = made.counts
    assert made.handle(OfferRepeated(1), 1.1) == []
    assert made.counts == before


def test_a_busy_front_end_is_told_when_to_turn_again_and_that_answers_made_room():
    made = dispatcher(credit=IN_HAND)
    for number in range(IN_HAND + 8):
        offer(made, number, 0.0)
    running = []
    for _ in range(2):
        (taken,) = only(made.handle(FrontTurned(BUSY), 0.0), OffersTaken)
        assert (len(taken.requests), taken.turn_at) == (AT_ONCE, 0.0)
        running += made.handle(RouteNow(), 0.0)
    assert only(made.handle(FrontTurned(BUSY), 0.0), OffersTaken) == [OffersTaken((), PAUSE)]
    told = finish_all(made, running, 1.0)
    assert len(replies(told)) == IN_HAND
    assert only(told, OffersTaken) == [OffersTaken((), 1.0)], "once, when there is room for a batch"
    last = tuple(range(IN_HAND, IN_HAND + 8))
    assert only(made.handle(FrontTurned(BUSY), 1.0), OffersTaken) == [OffersTaken(last)]
    made.check_invariants()


def test_nothing_about_offers_asks_for_routing():
    made = dispatcher()
    made.handle(request(0), 0.0)  # waits for those that come with it
    assert only(offer(made, 1, 0.0), WakeAt) == []
    assert made.fifo_length == 1
