"""Group norm, an addition and SiLU as one kernel each way, for training on a GPU.

torch's own group norm computes in float32 under autocast and turns channels-last activations round and back, which
moves several times the bytes that a convolution does. One program here reads one group of one image, keeps it in
registers, and writes what the next convolution reads.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # comes with torch's CUDA builds for Linux
LARGEST_GROUP = 1 << 14  # values of one group of one image, which one program keeps in registers
VALUES_PER_WARP = 1 << 11


def is_fused(x: Tensor, channels_per_group: int) -> bool:
    """Whether `norm_activate_fused` is the faster way to train with this activation: on a GPU, groups not too large."""
    if not (x.is_cuda and torch.is_grad_enabled() and HAS_TRITON):
        return False
    power_of_two = channels_per_group & (channels_per_group - 1) == 0
    return power_of_two and _power_of_two(x.shape[2] * x.shape[3]) * channels_per_group <= LARGEST_GROUP


def norm_activate_fused(
    x: Tensor, scale: Tensor, shift: Tensor, channels_per_group: int, eps: float, beside: Tensor | None = None
) -> Tensor:
    """SiLU(group norm of x + beside), like x (batch, channels, height, width); scale and shift are (channels,)."""
    result: Tensor = _NormActivate.apply(x, scale, shift, channels_per_group, eps, beside)  # type: ignore[no-untyped-call]
    return result


class _NormActivate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, group: int, eps: float, beside: Tensor | None
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if beside is not None:
            beside = beside.to(x.dtype).contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(x)
        groups = x.shape[1] // group
        mean, rstd = (torch.empty(len(x), groups, device=x.device) for _ in range(2))
        pointers = (x, x if beside is None else beside, scale, shift, out, mean, rstd)
        _launch(_kernels()[0], x, group, pointers, eps, beside)
        ctx.save_for_backward(x, scale, shift, mean, rstd, beside)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, mean, rstd, beside = ctx.saved_tensors
        gradient = gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
        of_x = torch.empty_like(x)
        of_beside = None if beside is None else torch.empty_like(x)
        of_scale, of_shift = (torch.empty(len(x), x.shape[1], device=x.device) for _ in range(2))
        pointers = (
            x, x if beside is None else beside, scale, shift, mean, rstd, gradient,
            of_x, of_x if of_beside is None else of_beside, of_scale, of_shift,
        )  # fmt: skip
        _launch(_kernels()[1], x, ctx.group, pointers, None, beside)
        return of_x, of_scale.sum(dim=0), of_shift.sum(dim=0), None, None, of_beside


def _launch(
    kernel: Any, x: Tensor, group: int, pointers: tuple[Tensor, ...], eps: float | None, beside: Tensor | None
) -> None:
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    rows = _power_of_two(pixels)
    numbers = (pixels, channels) if eps is None else (eps, pixels, channels)
    shape = {"tile_rows": rows, "tile_columns": group, "with_beside": beside is not None}
    warps = min(8, max(1, rows * group // VALUES_PER_WARP))
    kernel[(len(x), channels // group)](*pointers, *numbers, **shape, num_warps=warps)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _kernels() -> tuple[Any, Any]:
    """(forward, backward)."""
    from slim_scheduler.model.fused_norm_kernels import backward, forward

    return forward, backward
