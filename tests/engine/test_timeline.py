"""Timelines of items: what is kept for attempts that never run."""

from slim_scheduler.core.messages import RequestCancelled, RouteNow, TasksReturned
from slim_scheduler.engine.host import NoRecorder
from slim_scheduler.engine.timeline import Timelines
from tests.core.networks import dispatcher, done, request, sent


class Followed:
    """A dispatcher whose steps timelines see."""

    def __init__(self):
        self.dispatcher = dispatcher(credit=64)
        self.timelines = Timelines(NoRecorder())

    def tell(self, event, now):
        commands = self.dispatcher.handle(event, now)
        self.timelines.step("dispatcher", now, event, commands)
        return commands

    def asks(self, number, now):
        asked = request(number, at=now)
        self.timelines.follow(asked.request.items)
        self.tell(asked, now)
        (block,) = sent(self.tell(RouteNow(), now))
        return asked.request.items, block


def test_attempts_that_never_run_are_forgotten_although_others_are_followed():
    made = Followed()
    items, block = made.asks(1, 0.0)
    for number in range(2, 50):
        now = number * 0.01
        others, another = made.asks(number, now)
        made.tell(RequestCancelled(number - 1), now)
        assert made.timelines.take(items) == ()
        made.tell(TasksReturned("a", 0, tuple(t.task_id for t in block.tasks), "cancelled"), now)
        items, block = others, another
        assert len(made.timelines._sent) == len(made.timelines._newest) == 1


def test_a_late_report_of_an_attempt_that_was_given_up_is_no_visit():
    made = Followed()
    items, block = made.asks(1, 0.0)
    (again,) = sent(made.tell(TasksReturned("a", 0, (block.tasks[0].task_id,), "lost on the way"), 0.1))
    assert again.tasks[0].item == items[0]
    made.tell(done(block, 0.2), 0.2)
    (second,) = sent(made.tell(done(again, 0.3), 0.3))
    assert second.segment == 1
    (visit,) = made.timelines.take(items)
    assert (visit.segment, visit.item) == (0, items[0])
