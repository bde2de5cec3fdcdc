"""The README's commands are ones that exist, and its curl line and its Python run as they stand."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from slim_scheduler.model.checkpoint import load, save
from slim_scheduler.serve.access import Access
from slim_scheduler.serve.server import Ports, running
from slim_scheduler.setup.config import load_config
from tests.cli.conftest import ROOT, Slim

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def test_every_slim_command_of_the_readme_has_the_options_it_is_given(slim: Slim) -> None:
    lines = [line for kind, block in BLOCKS if not kind for line in block.splitlines() if line.startswith("slim ")]
    assert len(lines) >= 5
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        assert slim(*arguments, "--help").code == 0, line


def test_the_table_of_the_day_is_that_of_its_stored_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/demo"))
    import day_table

    assert day_table.MARKED.search(README)
    assert day_table.page(README) == README, "the table is stale; `python examples/demo/day_table.py` makes it again"
    stored = json.loads((day_table.STORED / "day.json").read_text())
    runs = {(run["mode"], run["router"], run["seed"]) for run in stored["runs"]}
    assert runs == set(product(day_table.MODES, day_table.ROUTERS, range(3)))
    assert all(run["metrics"]["generator_lag_s.p99"] <= 0.005 for run in stored["runs"] if run["mode"] == "live")
    stored["runs"][0]["metrics"]["latency_s.p99"] += 1
    (tmp_path / "day.json").write_text(json.dumps(stored))
    assert day_table.page(README, tmp_path) != README


def test_the_makefile_has_the_readmes_targets() -> None:
    targets = re.findall(r"^make (\w+)", "\n".join(block for _, block in BLOCKS), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test", "serve"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_readmes_python_runs() -> None:
    (program,) = [block for kind, block in BLOCKS if kind == "python"]
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0 1 2 3]")


@pytest.mark.parametrize(
    ("page", "lines", "use"),
    [
        ("own-network", 20, "from slim_scheduler.model.checkpoint import load, save; save(MyResNet(), out); load(out)"),
        ("own-router", 15, "from slim_scheduler.core.types import Decision; assert not Shortest.chooses_full"),
    ],
)
def test_the_class_that_a_page_shows_works_as_it_stands(tmp_path: Path, page: str, lines: int, use: str) -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)[0]
    assert len(program.splitlines()) < lines
    (tmp_path / "mine.py").write_text(program)
    command = [sys.executable, "-c", f"from mine import *; out = {str(tmp_path / 'model')!r}; {use}"]
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_slimmable_network_that_a_page_shows_is_saved_and_runs_at_all_widths(tmp_path: Path, monkeypatch) -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-network.md").read_text(), re.DOTALL)[1]
    (tmp_path / "two_widths.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    from two_widths import TwoWidths

    network = TwoWidths().eval()
    save(network, tmp_path / "model")
    loaded = load(tmp_path / "model")
    images = torch.randn(5, *network.item_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for widths in product(network.widths, repeat=3):
            x, previous = images, None
            for segment, width in enumerate(widths):
                part = loaded.slice(segment, width, "cpu")
                x, previous = part.run(x, previous), width
            torch.testing.assert_close(x, network(images, widths))


OURS = """

def test_the_one_for_this_project_decides_too():
    from shortest import Shortest

    router = Shortest("shortest:0.5", lambda head, rng: head.widths[0])
    decision = router.decide(view(server("a", 5), server("b", 2, utilization=0.5)), default_rng(0))
    assert (router.name, decision.server, decision.width, decision.group) == ("shortest:0.5", "b", 0.5, 8)
"""


def test_the_test_that_the_router_page_shows_passes(tmp_path: Path) -> None:
    router, ours, test = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-router.md").read_text(), re.DOTALL)
    (tmp_path / "my_router.py").write_text(router)
    (tmp_path / "shortest.py").write_text(ours)
    (tmp_path / "test_my_router.py").write_text(test + OURS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


async def test_the_readmes_curl_line_is_answered_with_the_class(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = [block for _, block in BLOCKS if block.startswith("curl")]
    body = shlex.split(line)[-1]
    config = load_config(ROOT / "examples/demo/cluster.toml")
    async with running(config, Access(), Ports(0)) as ports:
        url = f"http://127.0.0.1:{ports.http}/v2/models/digits/infer"
        curl = await asyncio.create_subprocess_exec("curl", "-s", url, "-d", body, stdout=subprocess.PIPE)
        answer, _ = await curl.communicate()
    (label,) = json.loads(answer)["outputs"][0]["data"]
    assert label.endswith(":3:3"), "value, index and class of a handwritten three"
