"""The router's end of one server: its actor, its sessions, and the calls in between.

It starts a new session when one has ended; within a session, `Channel` carries the messages. That a server is out of
service, and what becomes of its work, is the dispatcher's decision.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.exceptions import ActorDiedError, RayError

from slim_scheduler.core.messages import CancelTasks
from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.actor import Place, SessionStart
from slim_scheduler.engine.cluster.channel import Channel, SessionEndedError
from slim_scheduler.engine.cluster.clock import OffsetEstimate
from slim_scheduler.engine.cluster.wire import BlockMessage, Forget, PollReply, encode
from slim_scheduler.setup.config import ServerConfig

CLOCK_EXCHANGES = 8  # before a session begins, so that its first report has the right time
BEGIN_LIMIT: Seconds = 60.0  # for loading torch and the network, and warming up
RESTART_PAUSE: Seconds = 0.2

OnReply = Callable[["RemoteServer", PollReply], None]


class RemoteServer:
    """`spawn` creates the actor, `model` is a reference to the network, `forgotten` says what the server may forget.

    `hung_limit` ends a session that is silent. `on_reply` is set before the first session: what the server reports goes
    there, in order.
    """

    on_reply: OnReply

    def __init__(
        self,
        knobs: ServerConfig,
        credit: int,
        spawn: Callable[[], Any],
        model: Any,
        clock: MonotonicClock,
        forgotten: Callable[[ServerName], Forget],
        log: bool,
        hung_limit: Seconds,
    ) -> None:
        self.name = knobs.name
        self.credit = credit
        self.incarnation = -1
        self.memory_used: Bytes = 0
        self.place = Place("", 0)
        self.actor = spawn()
        self._spawn = spawn
        self._model = model
        self._clock = clock
        self._forgotten = forgotten
        self._log = log
        self._hung_limit = hung_limit
        self._offset = OffsetEstimate()
        self._channel: Channel | None = None

    # ---- sessions

    @property
    def placed(self) -> bool:
        """Whether Ray has found a place for the first actor."""
        return self.incarnation > 0

    async def start_session(
        self, peers: Callable[[], Mapping[ServerName, Any]], limit: Seconds | None = BEGIN_LIMIT
    ) -> None:
        """Starts the next session. Waits until Ray has found a place for the actor, then for `limit` until it is warm.
        Raises RayError and TimeoutError."""
        self._offset.clear()
        for _ in range(CLOCK_EXCHANGES):
            sent = self._clock.now()
            there = await self.actor.clock.remote()
            self._offset.add(sent, there, there, self._clock.now())
        self.incarnation += 1
        start = SessionStart(self.incarnation, self._offset.offset, self._log)
        self.place = await asyncio.wait_for(self.actor.begin.remote(start, self._model, dict(peers())), limit)
        forgotten = partial(self._forgotten, self.name)
        self._channel = Channel(self.actor, self._clock, self._offset, forgotten, self._heard, self._hung_limit)

    async def restart(self, peers: Callable[[], Mapping[ServerName, Any]]) -> bool:
        """Begins a new session, however long it takes. True if it is another actor, which the peers must learn of."""
        moved = False
        while True:
            try:
                await self.start_session(peers)
                return moved
            except ActorDiedError:
                self.actor, moved = self._spawn(), True
            except TimeoutError:
                self.kill()
                self.actor, moved = self._spawn(), True
            except RayError:
                await asyncio.sleep(RESTART_PAUSE)  # Ray is starting it again

    def kill(self) -> None:
        """Ends the actor for good, whatever it is doing."""
        import ray

        ray.kill(self.actor, no_restart=True)

    # ---- messages

    def deliver(self, message: BlockMessage, items: npt.NDArray[np.float32] | None) -> None:
        assert self._channel is not None, "a server that never lived has joined no fleet"
        self._channel.deliver(message, items)

    def cancel(self, message: CancelTasks) -> None:
        self.actor.cancel.remote(encode(message))

    def add_peer(self, name: ServerName, actor: Any) -> None:
        self.actor.add_peer.remote(name, actor)

    async def listen(self) -> None:
        """Hears what the server tells until its session is over. Raises RayError or SessionEndedError."""
        assert self._channel is not None, "listen follows begin"
        try:
            await self._channel.until_over()
        except TimeoutError as error:
            self.kill()
            raise SessionEndedError(str(error)) from None

    def _heard(self, reply: PollReply) -> None:
        self.memory_used = reply.memory_used
        self.on_reply(self, reply)
