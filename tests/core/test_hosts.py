"""Hosts deliver events and perform commands; when something waits, starts or is routed is the machines' decision."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "slim_scheduler"
HOSTS = (
    "sim/host.py",
    "sim/server.py",
    "engine/host.py",
    "engine/local/fleet.py",
    "engine/local/server.py",
    "engine/cluster/fleet.py",
    "engine/cluster/session.py",
)
# What only a machine decides about: the paper's knobs, the order of re-entry, windows, holds, segments left.
DECISIONS = {
    "reentry",
    "batch_window",
    "tile",
    "ripe",
    "due",
    "credit_tasks",
    "max_concurrent_batches",
    "available",
    "limit",
}
WORDS = ("pause", "resume", "patien", "hold_back", "oldest_first", "worth_", "undecided")


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_has_no_condition_on_what_the_machines_decide(host: str) -> None:
    tree = ast.parse((SOURCE / host).read_text())
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in DECISIONS, f"{host}:{node.lineno} reads {name}"
        assert not any(word in name.lower() for word in WORDS), f"{host}:{node.lineno} has {name}"


@pytest.mark.parametrize("host", HOSTS)
def test_a_hosts_events_carry_no_advice(host: str) -> None:
    """An event is what happened; none is built from a comparison that the host made."""
    events = {"BatchDone", "RequestArrived", "RouteNow", "TimerFired", "BlockArrived"}
    for node in ast.walk(ast.parse((SOURCE / host).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in events:
            parts = [
                part for argument in (*node.args, *[k.value for k in node.keywords]) for part in ast.walk(argument)
            ]
            assert not any(isinstance(part, ast.Compare | ast.BoolOp | ast.IfExp) for part in parts), ast.unparse(node)
