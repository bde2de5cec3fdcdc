"""Training's convolution of small images is the library's convolution, with its gradients."""

import pytest
import torch
from torch.nn import functional

from slim_scheduler.model.layers import convolve
from slim_scheduler.model.small_convolution import LARGEST, convolve_small, is_small

SHAPES = [  # in, out, height, width, kernel, stride
    (5, 7, 4, 4, 3, 1),
    (5, 7, 4, 3, 3, 1),
    (4, 6, 8, 8, 3, 2),
    (4, 6, 7, 5, 3, 2),
    (4, 6, 7, 5, 1, 2),
    (3, 2, 1, 1, 3, 1),
]


def results(function, x, weight, stride):
    """Output and both gradients, for a loss that weighs every output differently."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight, stride)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad((y * weights).sum(), (x, weight))


def by_library(x, weight, stride):
    return functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)


@pytest.mark.parametrize(("inputs", "outputs", "height", "width", "kernel", "stride"), SHAPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_it_equals_the_library_in_double_precision(inputs, outputs, height, width, kernel, stride, layout):
    torch.manual_seed(0)
    x = torch.randn(3, inputs, height, width, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(outputs, inputs, kernel, kernel, dtype=torch.float64)
    ours, theirs = results(convolve_small, x, weight, stride), results(by_library, x, weight, stride)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_training_in_bfloat16_takes_it_for_small_images_only():
    small, large = torch.randn(2, 8, LARGEST, LARGEST), torch.randn(2, 8, LARGEST + 1, LARGEST + 1)
    weight = torch.randn(8, 8, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_small(small, weight, 1)
        assert not is_small(large, weight, 1)
        assert is_small(large, weight, 2)
        ours, theirs = results(convolve, small, weight, 1), results(by_library, small, weight, 1)
        with torch.no_grad():
            assert not is_small(small, weight, 1)
    assert not is_small(small, weight, 1)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() < 0.02 * b.norm()
