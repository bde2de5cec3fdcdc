"""The simulated post between dispatcher and servers: what each message weighs, when it arrives, whether it does.

It knows the network and the message faults, and leaves to the host what an arrived message does.
"""

from collections.abc import Callable
from typing import Any

from numpy.random import Generator

from slim_scheduler.core.messages import BatchReported, CancelTasks, ServerLeft, ServerReported, TasksReturned
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Block, Bytes, Seconds, ServerName
from slim_scheduler.setup.config import Config
from slim_scheduler.sim.agenda import MESSAGE, Agenda
from slim_scheduler.sim.faults import MessageFaults
from slim_scheduler.sim.network import SimulatedNetwork

# Sizes of what carries no tensor: a header of the transport and a few fields, and per task an id, item and times.
CONTROL_BYTES: Bytes = 200
TASK_BYTES: Bytes = 40
TELEMETRY_BYTES: Bytes = 600
LOGIT_BYTES: Bytes = 4  # fp32

ToDispatcher = BatchReported | TasksReturned | ServerReported | ServerLeft


class Mail:
    """Puts the arrival of every message on the agenda: none, one or two of it."""

    def __init__(self, config: Config, shape: ModelShape, agenda: Agenda, rng: Generator) -> None:
        names = [server.name for server in config.servers]
        self._network = SimulatedNetwork(config.network, names)
        self._moves_cost = config.network.activations
        self._report_age = config.telemetry.age_s
        self._shape = shape
        self._agenda = agenda
        self._faults = {name: MessageFaults(stream) for name, stream in zip(names, rng.spawn(len(names)), strict=True)}
        self._any_fault = False

    def block(self, block: Block, deliver: Callable[[Block], None]) -> None:
        """To its server; with the inputs (segment 0), or with the activations that have to move."""
        now = self._agenda.now
        count = len(block.tasks)
        size = CONTROL_BYTES + count * TASK_BYTES
        if block.segment == 0:
            size += count * self._shape.input_bytes
        arrival = self._network.to_server(block.server, size, now)
        if self._moves_cost and block.segment:
            arrival = max(arrival, self._activations(block, now))
        self._post(block.server, arrival, deliver, block)

    def _activations(self, block: Block, now: Seconds) -> Seconds:
        """Arrival of the last activation that has to come from another server."""
        assert block.previous_width is not None
        each = self._shape.activation(block.segment - 1, block.previous_width)
        moved: dict[ServerName, Bytes] = {}
        for task in block.tasks:
            if task.home is not None and task.home != block.server:
                moved[task.home] = moved.get(task.home, 0) + each
        return max([self._network.between(home, block.server, size, now) for home, size in moved.items()], default=now)

    def cancellation(self, command: CancelTasks, deliver: Callable[[CancelTasks], None]) -> None:
        size = CONTROL_BYTES + len(command.tasks) * TASK_BYTES
        self._post(command.server, self._network.to_server(command.server, size, self._agenda.now), deliver, command)

    def to_dispatcher(self, server: ServerName, message: ToDispatcher, deliver: Callable[[Any], None]) -> None:
        """Results with their logits, tasks given back, telemetry, which arrives at its age, or a connection's end."""
        late = 0.0
        if isinstance(message, BatchReported):
            each = TASK_BYTES
            if message.segment == self._shape.segments - 1:
                each += self._shape.classes * LOGIT_BYTES
            size = CONTROL_BYTES + len(message.tasks) * each
        elif isinstance(message, ServerReported):
            size, late = TELEMETRY_BYTES, self._report_age
        elif isinstance(message, ServerLeft):
            at = self._network.from_server(server, 0, self._agenda.now)
            return self._agenda.at(at, MESSAGE, deliver, message)  # the transport's own word is not lost
        else:
            size = CONTROL_BYTES + len(message.tasks) * TASK_BYTES
        self._post(server, self._network.from_server(server, size, self._agenda.now) + late, deliver, message)

    def _post(self, server: ServerName, arrival: Seconds, deliver: Callable[[Any], None], message: Any) -> None:
        if not self._any_fault:
            self._agenda.at(arrival, MESSAGE, deliver, message)
            return
        for at in self._faults[server].deliveries(arrival):
            self._agenda.at(at, MESSAGE, deliver, message)

    # ---- faults

    def befall(self, server: ServerName, shares: dict[str, float]) -> None:
        """By kind of fault, the share of a server's messages that it befalls from now on."""
        self._faults[server].shares = shares
        self._any_fault = any(faults.shares for faults in self._faults.values())
