"""A server on a cluster is killed: clients see the connection break, nothing stays, it starts again without a hand."""

import signal

import numpy as np
import pytest

from slim_scheduler.client.client import SlimClient
from tests.cluster.test_ledger_runs import assert_gone
from tests.serve.conftest import serving

pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")

pytestmark = [pytest.mark.accept, pytest.mark.timeout(240)]
ON_A_CLUSTER = ("--set", "cluster.address=local")


def test_killed_server_breaks_connections_leaves_nothing_and_starts_again(tmp_path):
    image = np.zeros((1, 1, 8, 8), np.float32)
    with serving(tmp_path, *ON_A_CLUSTER) as running:
        client = SlimClient(running.url)
        assert client.infer(image).logits.shape == (1, 10)
        family = [p.pid for p in psutil.Process(running.process.pid).children(recursive=True) if matters(p)]
        assert len(family) > 2
        assert running.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(ConnectionError):
            client.infer(image)
    assert_gone(family, within=20.0)
    with serving(tmp_path, *ON_A_CLUSTER) as running:
        assert SlimClient(running.url).infer(image).logits.shape == (1, 10)
        assert running.stop() == 0


def matters(process: "psutil.Process") -> bool:
    """Servers and Ray's daemons. Its small agents, which hold nothing, look for their parent only now and then."""
    return any(name in " ".join(process.cmdline()) for name in ("ServerActor", "/raylet", "/gcs_server"))
