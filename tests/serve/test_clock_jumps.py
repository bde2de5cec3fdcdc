"""Guarantee 13: the system clock that the whole server reads jumps by an hour, and nothing changes.

libfaketime stands between every module of the server's process and the clock, Python or not, so that whatever read
wall time would see the jump. Monotonic time goes on: no administrator can set that.
"""

import importlib.util
import re
import time
from pathlib import Path

import numpy as np
import pytest

from slim_scheduler.client.client import Constraints, SlimClient
from tests.serve.conftest import ROOT, serving
from tests.serve.wire import call, metrics

SOURCE = ROOT / "src/slim_scheduler"
SHOWN = {
    "serve/http/reply.py": "_date(int(time.time()))",
    "serve/service.py": "last_inference",
    "serve/live.py": '"time"',
    "serve/tracing.py": "time_ns",
}  # told, decides nothing


def faketime() -> Path:
    found = importlib.util.find_spec("libfaketime")
    libraries = list(Path(found.origin).parent.rglob("libfaketime.so.1")) if found and found.origin else []
    if not libraries:
        pytest.skip("pip install libfaketime to run this")
    return libraries[0]


def test_the_system_clock_jumps_by_an_hour_under_load_and_nothing_changes(tmp_path, images):
    offset = tmp_path / "offset"
    offset.write_text("+0")
    environment = {
        "LD_PRELOAD": str(faketime()),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with serving(tmp_path, **environment) as server, SlimClient(server.url) as client:
        expected = client.infer(images, Constraints(width=0.5)).logits
        for jump in (0, 3600, -3600, 0):
            offset.write_text(f"{jump:+d}")
            for _ in range(20):
                prediction = client.infer(images, Constraints(width=0.5, deadline_ms=20_000))
                assert np.allclose(prediction.logits, expected, atol=1e-3)
                assert 0 <= prediction.queue_ms < 600_000
            (stats,) = call(server.http, "GET", "/v2/models/digits/stats")[2]["model_stats"]
            seen = stats["last_inference"] / 1e3 - time.time()
            assert abs(seen - jump) < 600, "the server's own clock really jumped"
            found = metrics(server.http)
            assert {v for name, v in found.items() if name.startswith("slim_server_up{")} == {1.0}
            assert sum(v for name, v in found.items() if name.startswith("slim_server_outages")) == 0
        refused = [
            v for name, v in found.items() if re.match(r'slim_requests_total.*"(expired|failed|rejected)"', name)
        ]
        assert sum(refused) == 0
        assert server.stop() == 0


def test_nothing_but_a_date_that_is_told_reads_wall_time():
    wall_time = re.compile(
        r"\btime\.time(_ns)?\(|datetime\.(now|utcnow|today)|time\.(localtime|gmtime)|from time import"
    )
    found = {}
    for path in SOURCE.rglob("*.py"):
        for line in path.read_text().splitlines():
            if wall_time.search(line):
                found.setdefault(str(path.relative_to(SOURCE)), []).append(line)
    assert set(found) == set(SHOWN)
    assert all(SHOWN[file] in line for file, lines in found.items() for line in lines)
