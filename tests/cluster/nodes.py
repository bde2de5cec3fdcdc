"""Three machines on one: Ray's own `Cluster`, or a network namespace per machine with veth links and a shaped rate.

Both give an address for the router and the command that runs a program where the router would run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Protocol

from slim_scheduler.engine.cluster.ray_connection import NICENESS

# The router's machine has room for all servers, the others for two: whichever is removed, its servers find a place.
SLOTS, FIRST_SLOTS = 2, 3
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
SYSTEM = {"health_check_period_ms": 1000, **NICENESS}  # Ray gives up a machine after five failed checks
RATE, DELAY = "433mbit", "1ms"  # Wi-Fi 5; the delay each way
SWITCH = "slim-switch"
CURRENT = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
BIN = Path(sys.executable).parent


class Nodes(Protocol):
    """The first machine is the router's. `add` brings one more into the cluster."""

    address: str
    router: list[str]  # what a command of the router's machine begins with

    def add(self) -> None: ...
    def close(self) -> None: ...


class LocalNodes:
    """Ray's `Cluster`: machines are daemons on this one, and share its network."""

    def __init__(self, machines: int) -> None:
        from ray.cluster_utils import Cluster

        head = {**NODE, "resources": {"slot": FIRST_SLOTS}, "include_dashboard": False, "_system_config": SYSTEM}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self.router: list[str] = []
        for _ in range(machines - 1):
            self.add()
        self._cluster.wait_for_nodes()

    def add(self) -> None:
        self._cluster.add_node(wait=False, resources={"slot": SLOTS}, **NODE)

    def close(self) -> None:
        self._cluster.shutdown()


class NamespaceNodes:
    """A namespace per machine, linked by a switch; `shaped` says what the kernel could do of the link's shape."""

    def __init__(self, machines: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="slim-ray-")
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.shaped: list[str] = []
        self.address = "10.77.0.1:6379"
        self._token = ["env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={uuid.uuid4().hex}"]
        self.router = [*self._token, "ip", "netns", "exec", "slim-0"]
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        try:
            for _ in range(machines):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self) -> None:
        i = len(self._daemons)
        name, address = f"slim-{i}", f"10.77.0.{i + 1}"
        ip("netns", "add", name)
        ip("link", "add", f"slim{i}", "type", "veth", "peer", "name", f"slim{i}s")
        ip("link", "set", f"slim{i}", "netns", name)
        ip("link", "set", f"slim{i}s", "netns", SWITCH)
        ip("-n", SWITCH, "link", "set", f"slim{i}s", "master", "bridge", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", f"slim{i}")
        for device in ("lo", f"slim{i}"):
            ip("-n", name, "link", "set", device, "up")
        self._shape(name, f"slim{i}")
        role = [f"--address={self.address}"]
        if i == 0:
            role = ["--head", "--port=6379", "--include-dashboard=false", f"--system-config={json.dumps(SYSTEM)}"]
        role.append(f"--resources={json.dumps({'slot': SLOTS if i else FIRST_SLOTS})}")
        ray = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", f"--node-ip-address={address}"]
        ray += [f"--num-cpus={NODE['num_cpus']}", f"--object-store-memory={NODE['object_store_memory']}"]
        with open(f"{self._folder}/{name}.log", "wb") as log:
            command = [*self._token, "ip", "netns", "exec", name, *ray, *role]
            daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._daemons.append(daemon)
        self._await_start(daemon, Path(self._folder) / f"{name}.log")

    def close(self) -> None:
        for i, daemon in enumerate(self._daemons):
            inside = subprocess.run(["ip", "netns", "pids", f"slim-{i}"], capture_output=True, text=True, check=False)
            for process in inside.stdout.split():
                os.kill(int(process), signal.SIGKILL)
            daemon.kill()
            daemon.wait(20)
            subprocess.run(["ip", "netns", "del", f"slim-{i}"], check=False)
        subprocess.run(["ip", "netns", "del", SWITCH], check=False)
        if CURRENT.is_file() and CURRENT.read_text().strip() == self.address:
            CURRENT.unlink()  # where `address = "auto"` looks first
        shutil.rmtree(self._folder)

    def _shape(self, name: str, device: str) -> None:
        """Rate and delay where the kernel has netem, the rate alone where it has only tbf."""
        add = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root"]
        for kind in (
            ["netem", "delay", DELAY, "rate", RATE],
            ["tbf", "rate", RATE, "burst", "256k", "latency", "50ms"],
        ):
            if subprocess.run([*add, *kind], capture_output=True, check=False).returncode == 0:
                self.shaped = kind
                return

    def _await_start(self, daemon: "subprocess.Popen[bytes]", log: Path) -> None:
        deadline = time.monotonic() + 90
        while b"Ray runtime started" not in log.read_bytes():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a Ray daemon did not start:\n{log.read_text()}")
            time.sleep(0.1)


def namespaces_work() -> bool:
    """Whether this machine lets us make network namespaces and links between them."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    probe = ["ip", "netns", "exec", "slim-probe", "ip", "link", "add", "slimp", "type", "veth", "peer", "name", "slimq"]
    try:
        made = subprocess.run(["ip", "netns", "add", "slim-probe"], capture_output=True, check=False).returncode == 0
        return made and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    finally:
        subprocess.run(["ip", "netns", "del", "slim-probe"], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
