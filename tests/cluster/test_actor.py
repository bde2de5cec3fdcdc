"""The actor of one server: what it knows of those that share its device. Nothing here starts Ray."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.live import NETWORK, SHAPE, config_of, made_up_profile

pytest.importorskip("ray")

from slim_scheduler.engine.cluster.actor import ServerActor, servers_on_device


def on_gpu(share: float | None) -> dict[str, Any]:
    return {"device": "cuda:0", **({} if share is None else {"resources": {"GPU": share}})}


@pytest.mark.parametrize(
    ("servers", "sharing"),
    [
        ([{}], [1]),
        ([{}, {"device": "onnxruntime:CPU"}, {"device": "openvino:CPU"}], [3, 3, 3]),
        ([{}, on_gpu(None)], [1, 1]),
        ([on_gpu(None), on_gpu(None)], [1, 1]),
        ([on_gpu(0.5)], [1]),
        ([on_gpu(0.5)] * 3, [2, 2, 2]),
        ([on_gpu(0.3), on_gpu(0.7), on_gpu(1.0)], [2, 2, 1]),
        ([on_gpu(0.2)] * 6, [5] * 6),
    ],
)
def test_servers_that_may_share_a_device_are_counted(servers: list[dict[str, Any]], sharing: list[int]) -> None:
    config = config_of(servers)
    assert [servers_on_device(config, server.name) for server in config.servers] == sharing


@pytest.mark.parametrize(("servers", "source"), [(1, "counter"), (2, "estimated")])
def test_servers_that_may_share_a_cpu_do_not_each_report_all_of_its_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int, source: str
) -> None:
    (tmp_path / "max_energy_range_uj").write_text("1000000\n")
    (tmp_path / "energy_uj").write_text("0\n")
    monkeypatch.setattr("slim_scheduler.engine.probe.RAPL", tmp_path)
    config = config_of([{}] * servers)
    actor = ServerActor(config, "a", SHAPE, {"a": made_up_profile()}, False)
    sampled = actor._warm_server(NETWORK, lambda name, job: None, 1).sample(0.0)
    assert sampled is not None
    assert sampled.energy_source == source
