"""The router's end of one server: its actor, its lives, and the calls in between.

It starts a new life when one has ended; within a life, `Conversation` has the word. That a server is out of service,
and what becomes of its work, is the dispatcher's decision.
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
from slim_scheduler.engine.cluster.actor import Birth, Place
from slim_scheduler.engine.cluster.clock import OffsetEstimate
from slim_scheduler.engine.cluster.conversation import Conversation, LifeOverError
from slim_scheduler.engine.cluster.wire import Forget, Parcel, Told, encode
from slim_scheduler.setup.config import ServerConfig

CLOCK_EXCHANGES = 8  # before a life begins, so that its first report has the right time
BEGIN_LIMIT: Seconds = 60.0  # for loading torch and the network, and warming up
REVIVE_PAUSE: Seconds = 0.2

Hear = Callable[["RemoteServer", Told], None]


class RemoteServer:
    """`spawn` creates the actor, `model` is a reference to the network, `forgotten` says what the server may forget.

    `hung_limit` ends a life that is silent. `hear` is set before the first life: what the server tells goes there, in
    order.
    """

    hear: Hear

    def __init__(
        self,
        knobs: ServerConfig,
        spawn: Callable[[], Any],
        model: Any,
        clock: MonotonicClock,
        forgotten: Callable[[ServerName], Forget],
        log: bool,
        hung_limit: Seconds,
    ) -> None:
        self.name = knobs.name
        self.credit = knobs.credit
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
        self._talk: Conversation | None = None

    # ---- lives

    async def begin(self, peers: Callable[[], Mapping[ServerName, Any]]) -> None:
        """Starts the next life. Waits until Ray has found a place for the actor. Raises RayError."""
        self._offset.clear()
        for _ in range(CLOCK_EXCHANGES):
            sent = self._clock.now()
            there = await self.actor.clock.remote()
            self._offset.add(sent, there, there, self._clock.now())
        self.incarnation += 1
        birth = Birth(self.incarnation, self._offset.offset, self._log)
        self.place = await asyncio.wait_for(self.actor.begin.remote(birth, self._model, dict(peers())), BEGIN_LIMIT)
        forgotten = partial(self._forgotten, self.name)
        self._talk = Conversation(self.actor, self._clock, self._offset, forgotten, self._heard, self._hung_limit)

    async def revive(self, peers: Callable[[], Mapping[ServerName, Any]]) -> bool:
        """Begins a new life, however long it takes. True if it is in another actor, which the peers must meet."""
        moved = False
        while True:
            try:
                await self.begin(peers)
                return moved
            except ActorDiedError:
                self.actor, moved = self._spawn(), True
            except TimeoutError:
                self.kill()
                self.actor, moved = self._spawn(), True
            except RayError:
                await asyncio.sleep(REVIVE_PAUSE)  # Ray is starting it again

    def kill(self) -> None:
        """Ends the actor for good, whatever it is doing."""
        import ray

        ray.kill(self.actor, no_restart=True)

    # ---- messages

    def deliver(self, parcel: Parcel, items: npt.NDArray[np.float32] | None) -> None:
        assert self._talk is not None, "a server that never lived has joined no fleet"
        self._talk.deliver(parcel, items)

    def cancel(self, message: CancelTasks) -> None:
        self.actor.cancel.remote(encode(message))

    def meet(self, name: ServerName, actor: Any) -> None:
        self.actor.meet.remote(name, actor)

    async def listen(self) -> None:
        """Hears what the server tells until its life is over. Raises RayError or LifeOverError."""
        assert self._talk is not None, "listen follows begin"
        try:
            await self._talk.until_over()
        except TimeoutError as error:
            self.kill()
            raise LifeOverError(str(error)) from None

    def _heard(self, told: Told) -> None:
        self.memory_used = told.memory_used
        self.hear(self, told)
