"""Convolutions of small images as one matrix product, for training on a CPU.

Where an image has few pixels and many channels, the convolution library's kernels leave most of a core unused: the
gradient of 512 x 512 x 3 x 3 weights over 128 images of 3 x 3 pixels took 69 ms, the same product of the unrolled
images 7 ms (one core with bfloat16 tiles).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LARGEST = 4  # pixels in height that go out; above, unrolling costs more than it saves


def is_small(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether `convolve_small` is the faster way to train with this convolution: in bfloat16, on a CPU."""
    in_bfloat16 = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return in_bfloat16 and torch.is_grad_enabled() and x.shape[2] <= LARGEST * stride


def convolve_small(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Convolution with 'same' padding. (batch, in, height, width), (out, in, kernel, kernel), kernel 1 or 3."""
    result: Tensor = _SmallConvolution.apply(x, weight, stride)  # type: ignore[no-untyped-call]
    return result


class _SmallConvolution(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        matrix = weight.permute(0, 2, 3, 1).flatten(1)  # (out, kernel x kernel x in)
        ctx.save_for_backward(x, matrix)
        ctx.kernel, ctx.stride = weight.shape[-1], stride
        height, width = (-(-pixels // stride) for pixels in x.shape[2:])
        product = _unrolled(x, ctx.kernel, stride) @ matrix.T
        return product.view(len(x), height, width, len(matrix)).permute(0, 3, 1, 2)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, matrix = ctx.saved_tensors
        kernel, stride = ctx.kernel, ctx.stride
        rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)  # (batch x height x width, out)
        of_weight = (rows.T @ _unrolled(x, kernel, stride)).view(len(matrix), kernel, kernel, x.shape[1])
        of_x = _rolled(rows @ matrix, x, kernel, stride, gradient.shape[2:])
        return of_x, of_weight.permute(0, 3, 1, 2), None


def _unrolled(x: Tensor, kernel: int, stride: int) -> Tensor:
    """The pixels under each place of the kernel: (batch x height x width, kernel x kernel x in)."""
    edge = kernel // 2
    padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, edge, edge, edge, edge))
    windows = padded.unfold(1, kernel, stride).unfold(2, kernel, stride)  # (batch, height, width, in, kernel, kernel)
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)


def _rolled(columns: Tensor, like: Tensor, kernel: int, stride: int, size: torch.Size) -> Tensor:
    """The transpose of `_unrolled`: every pixel gets the sum of its places."""
    batch, channels, height, width = like.shape
    edge = kernel // 2
    down, across = size
    places = columns.view(batch, down, across, kernel, kernel, channels)
    total = columns.new_zeros(batch, height + 2 * edge, width + 2 * edge, channels)
    for i in range(kernel):
        for j in range(kernel):
            total[:, i : i + stride * down : stride, j : j + stride * across : stride] += places[:, :, :, i, j]
    return total[:, edge : edge + height, edge : edge + width].permute(0, 3, 1, 2)
