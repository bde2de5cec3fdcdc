"""Group norm, addition and SiLU in one kernel: what torch computes in steps, and only where it can run."""

import pytest
import torch
from torch.nn import functional

from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.fused_norm import is_fused, norm_activate_fused
from slim_scheduler.model.layers import NORM_EPS
from slim_scheduler.model.slim_resnet import SlimResNet

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_cpu_takes_the_steps_of_torch():
    x = torch.randn(2, 32, 8, 8)
    assert not is_fused(x, 16)


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@gpu
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("channels", "side", "group"), [(64, 32, 16), (48, 16, 16), (32, 5, 8), (640, 4, 16)])
def test_values_and_gradients_are_those_of_float64(channels, side, group, dtype, most, beside):
    torch.manual_seed(0)
    x, other = (torch.randn(6, channels, side, side, device="cuda", dtype=dtype) for _ in range(2))
    scale, shift = (torch.randn(channels, device="cuda") for _ in range(2))
    given = [t.requires_grad_() for t in (x, scale, shift, *([other] if beside else []))]
    assert is_fused(x, group)
    ours = norm_activate_fused(x, scale, shift, group, NORM_EPS, other if beside else None)
    exact = functional.group_norm(x.double(), channels // group, scale.double(), shift.double(), NORM_EPS)
    exact = functional.silu(exact + other.double() if beside else exact)
    weight = torch.randn_like(exact)
    assert relative(ours.detach(), exact.detach()) < most
    found = torch.autograd.grad((ours.double() * weight).sum(), given)
    wanted = torch.autograd.grad((exact * weight).sum(), given)
    for name, a, b in zip(("x", "scale", "shift", "beside"), found, wanted, strict=False):
        assert relative(a, b.double()) < most, name


@gpu
def test_a_network_that_trains_computes_what_it_does_when_it_answers():
    network = SlimResNet(Architecture(channels=(64, 128), blocks=(1, 2), strides=(1, 2), classes=10)).cuda()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    training = network(x, (0.25, 1.0))
    with torch.no_grad():
        answering = network(x, (0.25, 1.0))
    torch.testing.assert_close(training.detach(), answering, rtol=1e-2, atol=1e-2)
