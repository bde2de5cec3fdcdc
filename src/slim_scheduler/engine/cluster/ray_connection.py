"""This process's connection to Ray: opened for a run, closed after it, and what is placed through it.

A cluster that was here before stays; one that was started for this run ends with it, also when the process is killed.
Actors belong to the connection and never outlive it.
"""

import logging
import os
import signal
import threading
from typing import Any

import ray

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.setup.config import Config, ServerConfig

# Ray's workers give way to everything else on their machine (niceness 15); a server that must answer cannot.
NICENESS = {"worker_niceness": 0}
# A call to an actor whose process is gone fails at once. Ray would first wait a second for the reason of its death.
WAIT_FOR_REASON_OF_DEATH = ("RAY_timeout_ms_task_wait_for_death_info", "0")
LOCAL_OBJECT_STORE = 256 << 20  # bytes, of a cluster on this machine alone: a few hundred blocks' worth


class RayConnection:
    """One engine's share in this process's connection: the first opens it, the last closes it.

    Where the program itself connected to Ray before, that connection is used and stays.
    """

    _sharers = 0

    def __init__(self, config: Config) -> None:
        self._address = config.cluster.address
        self._servers = config.servers
        self._shares = False

    def open(self) -> None:
        """Raises ConfigError when the cluster cannot be reached."""
        if ray.is_initialized():
            if RayConnection._sharers:
                self._share()
            return
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a call to a dead server is answered by its death
        os.environ.setdefault(*WAIT_FOR_REASON_OF_DEATH)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address == "local":
            options |= {"include_dashboard": False, "object_store_memory": LOCAL_OBJECT_STORE}
            options |= {"_system_config": NICENESS}
            # This machine plays every machine that the servers ask for.
            options |= {"resources": {name: 1e6 for server in self._servers for name in server.resources}}
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(self._address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"cluster.address is {self._address!r}, but no Ray cluster answers there "
                f"({str(error).splitlines()[0]}); start one with `ray start --head`, or set it to local"
            ) from None
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)  # Ray's own leaves at once: nothing drained, nothing written
        self._share()

    def close(self) -> None:
        if self._shares:
            self._shares = False
            RayConnection._sharers -= 1
            if not RayConnection._sharers:
                ray.shutdown()

    def _share(self) -> None:
        self._shares = True
        RayConnection._sharers += 1

    def put(self, value: Any) -> Any:
        """A reference that every actor can be started with, again and again."""
        return ray.put(value)

    def place(self, kind: type, knobs: ServerConfig, arguments: tuple[Any, ...]) -> Any:
        """Creates a server's actor where its resources are; without any, on the machine with the fewest."""
        options = {
            "num_cpus": 0,
            **self.needs(knobs),
            "max_restarts": -1,
            "enable_task_events": False,  # Ray would keep every call's history for its dashboard
            "max_task_retries": 0,  # running something again is the dispatcher's decision
            "scheduling_strategy": "SPREAD",
        }
        return ray.remote(kind).options(**options).remote(*arguments)

    def needs(self, knobs: ServerConfig) -> dict[str, Any]:
        """What a server asks its machine for."""
        named = {name: amount for name, amount in knobs.resources.items() if name != "GPU"}
        return {"num_gpus": gpu_share(knobs), "resources": named}

    def has(self) -> dict[str, float]:
        """What the machines of the cluster offer in all."""
        offered: dict[str, float] = ray.cluster_resources()
        return {name: amount for name, amount in offered.items() if not name.startswith("node:")}


def gpu_share(server: ServerConfig) -> float:
    """How many GPUs a server asks for; a fraction shares one."""
    return server.resources.get("GPU", float(server.device.startswith("cuda")))
