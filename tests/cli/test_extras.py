"""Every command runs in what `make demo` installs; where an extra is missing, one line says which."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from slim_scheduler.cli.extras import EXTRAS
from tests.cli.conftest import ROOT, Slim

SOURCE = ROOT / "src/slim_scheduler"
# What stands behind an extra that the lock leaves out, and the files that alone may import it.
OPTIONAL = {
    "ray": "engine/cluster/",
    "gymnasium": "training/environment.py",
    "onnx": ("model/", "engine/devices/"),
    "onnxruntime": ("model/", "engine/devices/"),
    "openvino": "engine/devices/openvino.py",
    "opentelemetry": "serve/tracing.py",
    "pynvml": "",
    "triton": "model/fused_norm_kernels.py",
}

WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
sys.argv = ["slim", *{arguments!r}]
from slim_scheduler.cli import main
main()
"""


def without(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(blocked=blocked, arguments=arguments)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=100)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> set[str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {normal(line.partition("==")[0]) for line in lines if "==" in line}


def imported() -> dict[str, set[str]]:
    """Top-level module -> the files of the package that import it."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(SOURCE)))
    return found


def test_what_make_demo_installs_has_everything_that_is_imported() -> None:
    providers = packages_distributions()
    for module, files in imported().items():
        if module in sys.stdlib_module_names or module == "slim_scheduler":
            continue
        if {normal(dist) for dist in providers.get(module, [module])} & locked():
            continue
        assert module in OPTIONAL, f"{module}, of {sorted(files)}, is not in requirements.lock"
        assert all(file.startswith(OPTIONAL[module]) for file in files)


def requirements_of(extra: str) -> set[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {normal(re.split(r"[><=]", requirement)[0]) for requirement in extras[extra]}


def test_the_serve_extra_is_in_the_lock() -> None:
    assert requirements_of("serve") <= locked()


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extras_modules_are_those_of_its_packages(extra: str) -> None:
    providers = {**packages_distributions(), "google": ["protobuf"]}
    found = {normal(dist) for module in EXTRAS[extra] for dist in providers[module.partition(".")[0]]}
    assert found == requirements_of(extra)


@pytest.mark.parametrize(
    ("blocked", "arguments", "said"),
    [
        ("starlette", ("serve", "--config", "examples/demo/cluster.toml"), "serve needs starlette"),
        ("grpc", ("load", "--url", "grpc://127.0.0.1:9", "--rate", "1"), "load needs grpc"),
    ],
)
def test_a_command_without_its_extra_says_which_in_one_line(
    blocked: str, arguments: tuple[str, ...], said: str
) -> None:
    done = without((blocked,), *arguments)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("slim: ")]
    assert lines == [f'slim: {said}, which is not installed; pip install "slim-scheduler[serve]"']
    assert "Traceback" not in done.stderr


def test_doctor_lists_what_each_command_lacks() -> None:
    done = without(("starlette", "uvloop", "ray"), "doctor")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "note slim serve lacks uvloop, starlette" in text
    assert "note slim bench cluster.address lacks ray" in text
    assert 'pip install "slim-scheduler[serve]"' in text
    assert "every other command has what it needs" in text


def test_doctor_says_when_nothing_is_lacking(slim: Slim) -> None:
    assert "every command has what it needs" in slim("doctor").out


def test_help_starts_without_any_heavy_package() -> None:
    done = without(("torch", "pyarrow", "matplotlib", "scipy", "starlette", "grpc", "ray", "numpy"), "--help")
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_a_relative_path_of_a_configuration_starts_from_its_folder(
    slim: Slim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("simulate", "--set", "workload.duration_s=0.5", "--set", "workload.warmup_s=0", "--out", tmp_path / "run")
    config = ROOT / "examples/demo/cluster.toml"
    monkeypatch.setattr("tests.cli.conftest.ROOT", tmp_path)  # where the command is started
    assert slim(*run, "--config", config).code == 0
    assert slim(*run, "--config", tmp_path / "run/config.toml").code == 0, "the configuration as used is one, too"
