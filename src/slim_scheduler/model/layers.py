"""Slimmable layers: a narrow layer is the first channels of the wide one, and shares its weights.

Convolutions are weight-standardised over the fan-in that really runs, so that a filter has unit norm at every width;
group norm has a fixed number of channels per group, so that a narrow net's groups are a prefix of the wide one's.
Each layer only hands out its weights for given channels (`sliced`): training uses them at once, a deployed slice keeps
them, and both therefore compute the same.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from slim_scheduler.model.small_convolution import convolve_small, is_small

STANDARDIZE_EPS = 1e-4  # against a filter that is constant; far below any trained filter's sum of squares
NORM_EPS = 1e-5


class SlimConv2d(nn.Module):
    """A convolution without bias, 'same' padding, that runs with the first channels of its input and output."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel, kernel))
        nn.init.kaiming_normal_(self.weight)

    def sliced(self, in_channels: int, out_channels: int) -> Tensor:
        """Standardised weight for these channels, (out, in, kernel, kernel)."""
        weight = standardize(self.weight[:out_channels, :in_channels])
        return weight.contiguous(memory_format=torch.channels_last)  # the layout decides the kernel, thus the last bit


class SlimGroupNorm(nn.Module):
    """Scale and shift of a group norm; the number of groups follows from the channels that run."""

    def __init__(self, channels: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), scale))
        self.bias = nn.Parameter(torch.zeros(channels))

    def sliced(self, channels: int) -> tuple[Tensor, Tensor]:
        return self.weight[:channels], self.bias[:channels]


class SlimLinear(nn.Module):
    """The classifier: the first `in_features` of each kind of pooled feature, and all classes."""

    def __init__(self, pooled: int, in_features: int, classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(classes, pooled, in_features))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.normal_(self.weight, std=(pooled * in_features) ** -0.5)

    def sliced(self, in_features: int) -> tuple[Tensor, Tensor]:
        """Scaled weight (classes, pooled x in_features) and bias (classes,)."""
        return self.weight[:, :, :in_features].flatten(1) * self.scale, self.bias * self.scale


def standardize(weight: Tensor) -> Tensor:
    """Every filter with mean 0 and norm 1 over its sliced fan-in (Qiao et al. 2019), (out, in, kernel, kernel)."""
    centred = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    return centred * torch.rsqrt(centred.square().sum(dim=(1, 2, 3), keepdim=True) + STANDARDIZE_EPS)


def convolve(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if is_small(x, weight, stride) and not torch.onnx.is_in_onnx_export():
        return convolve_small(x, weight, stride)
    return functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, channels_per_group: int) -> Tensor:
    # not functional's, whose check of the batch size cannot be traced
    channels = int(x.shape[1]) if torch.onnx.is_in_onnx_export() else x.shape[1]  # an attribute of ONNX's operator
    return torch.group_norm(x, channels // channels_per_group, weight, bias, NORM_EPS)


def activate(x: Tensor) -> Tensor:
    """SiLU; in place where no gradient needs its input, which saves a third of a block's memory."""
    return functional.silu(x, inplace=not torch.is_grad_enabled())
