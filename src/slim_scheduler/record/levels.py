"""How much of a run its record keeps: which events and commands belong to each level."""

from typing import Literal

from slim_scheduler.core import messages as m

Level = Literal["full", "blocks", "summary"]

# What the summary needs, from either side of a step. A server's report is taken where it was made: messages get lost.
_SUMMARY_EVENTS = (m.RequestArrived,)
_SUMMARY_COMMANDS = (m.Reply, m.BlockFinished, m.ServerReported, m.RouterFellBack, m.ServerChanged)
_BLOCKS_EVENTS = (
    *_SUMMARY_EVENTS,
    m.RequestCancelled,
    m.ServerJoined,
    m.ServerDraining,
    m.ServerLeft,
    m.RouterTooSlow,
    m.BatchFailed,
    m.InstanceReady,
    m.InstanceFailed,
    m.InstanceUnloaded,
)
_BLOCKS_COMMANDS = (
    *_SUMMARY_COMMANDS,
    m.StartBatch,
    m.BatchReported,
    m.TasksReturned,
    m.LoadInstance,
    m.UnloadInstance,
)
CARRIED = (m.BatchReported, m.TasksReturned, m.ServerReported)
_ALL_EVENTS = (
    *_BLOCKS_EVENTS,
    *CARRIED,
    *m.FRONT_EVENTS,
    m.TimerFired,
    m.BlockArrived,
    m.CancelTasks,
    m.BatchDone,
    m.RouteNow,
    m.DeviceSampled,
)
_ALL_COMMANDS = (
    *_BLOCKS_COMMANDS,
    m.SendBlock,
    m.RefusedAgain,
    m.OffersTaken,
    m.CancelTasks,
    m.RouteSoon,
    m.WakeAt,
)
KINDS_OF_LEVEL: dict[Level, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "full": (_ALL_EVENTS, _ALL_COMMANDS),
    "blocks": (_BLOCKS_EVENTS, _BLOCKS_COMMANDS),
    "summary": (_SUMMARY_EVENTS, _SUMMARY_COMMANDS),
}
