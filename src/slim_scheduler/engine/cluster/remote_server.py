"""The router's end of one server: its actor, its lives, and the calls in between.

It asks the actor what happened, all the time, and hands the answers on; it starts a new life when one has ended. That a
server is out of service, and what becomes of its work, is the dispatcher's decision.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.exceptions import ActorDiedError, RayError

from slim_scheduler.config import ServerConfig
from slim_scheduler.core.messages import CancelTasks
from slim_scheduler.core.types import Bytes, Seconds, ServerName
from slim_scheduler.engine.clock import MonotonicClock
from slim_scheduler.engine.cluster.actor import Birth, Place
from slim_scheduler.engine.cluster.clock import OffsetEstimate
from slim_scheduler.engine.cluster.wire import Ask, Forget, Parcel, Told, cut, decode_told, encode

QUESTIONS = 2  # open at a time: while one answer travels, the next can already be given
CLOCK_EXCHANGES = 8  # before a life begins, so that its first report has the right time
BEGIN_LIMIT: Seconds = 60.0  # for loading torch and the network, and warming up
REVIVE_PAUSE: Seconds = 0.2

Hear = Callable[["RemoteServer", Told, list[npt.NDArray[np.float32]]], None]


class LifeOverError(Exception):
    """The actor runs but the life it had is over, or it has not answered for too long."""


class RemoteServer:
    """`spawn` creates the actor, `model` is a reference to the network, `forgotten` says what the server may forget.

    `hung_limit` ends a life that is silent.
    """

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

    # ---- lives

    async def begin(self, peers: Mapping[ServerName, Any]) -> None:
        """Starts the next life. Waits until Ray has found a place for the actor. Raises RayError."""
        self._offset.clear()
        for _ in range(CLOCK_EXCHANGES):
            sent = self._clock.now()
            there = await self.actor.clock.remote()
            self._offset.add(sent, there, there, self._clock.now())
        self.incarnation += 1
        birth = Birth(self.incarnation, self._offset.offset, self._log)
        self.place = await asyncio.wait_for(self.actor.begin.remote(birth, self._model, dict(peers)), BEGIN_LIMIT)

    async def revive(self, peers: Mapping[ServerName, Any]) -> bool:
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
        self.actor.deliver.remote(encode(parcel), *([] if items is None else cut(items)))

    def cancel(self, message: CancelTasks) -> None:
        self.actor.cancel.remote(encode(message))

    def meet(self, name: ServerName, actor: Any) -> None:
        self.actor.meet.remote(name, actor)

    async def listen(self, hear: Hear) -> None:
        """Hands on what the server tells, in order, until its life is over. Raises RayError or LifeOverError."""
        asked: dict[asyncio.Task[Any], Seconds] = {}
        early: dict[int, tuple[Told, list[npt.NDArray[np.float32]]]] = {}
        number = 0
        try:
            while True:
                while len(asked) < QUESTIONS:
                    asked[self._ask()] = self._clock.now()
                done, _ = await asyncio.wait(asked, timeout=self._hung_limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self.kill()
                    raise LifeOverError(f"no answer for {self._hung_limit:g} s")
                for answer in done:
                    told, answers = self._read(answer, asked.pop(answer))
                    early[told.number] = told, answers
                while number in early:
                    hear(self, *early.pop(number))
                    number += 1
        finally:
            for answer in asked:
                answer.cancel()

    def _ask(self) -> "asyncio.Task[Any]":
        ask = Ask(self._offset.offset, self._forgotten(self.name))
        return asyncio.ensure_future(_answer(self.actor.tell.remote(encode(ask))))

    def _read(self, answer: "asyncio.Task[Any]", sent: Seconds) -> tuple[Told, list[npt.NDArray[np.float32]]]:
        reply = answer.result()
        if reply is None:
            raise LifeOverError("its process started again")
        told = decode_told(reply[0])
        self._offset.add(sent, told.asked_at, told.told_at, self._clock.now())
        self.memory_used = told.memory_used
        return told, reply[1]


async def _answer(reference: Any) -> Any:
    return await reference
