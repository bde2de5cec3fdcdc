"""Networks of a user's own, as the documents say to write them."""

import torch
from torch import Tensor, nn

from slim_scheduler.model.plain import PlainNetwork, PlainSlice


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1)
        self.beside = nn.Conv2d(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.second(nn.functional.relu(self.norm(self.first(x)))) + self.beside(x))


class PlainResNet(PlainNetwork):
    def __init__(self, classes: int = 10, channels: int = 8) -> None:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, classes))
        parts = [Block(1, channels, 1), nn.Sequential(Block(channels, 2 * channels, 2), head)]
        super().__init__(parts, (1, 8, 8), classes)


class WrongSize(PlainNetwork):
    def __init__(self) -> None:
        super().__init__([nn.Flatten()], (1, 8, 8), 10)


class WrongSlices(PlainResNet):
    """Tells another shape after segment 0 than its slices give."""

    def activation_shape(self, segment: int, width: float) -> tuple[int, ...]:
        return (1, 2, 3) if segment == 0 else super().activation_shape(segment, width)


class NotWritten(PlainSlice):
    def run(self, x: Tensor, previous_width: float | None) -> Tensor:
        raise RuntimeError("not written yet")


class Raises(PlainResNet):
    def slice(self, segment: int, width: float, device: str) -> PlainSlice:
        return NotWritten(self.parts[segment], segment, torch.device(device))


class NotLowered(PlainSlice):
    """Lowers one weight too few."""

    def lower(self, dtype: torch.dtype) -> None:
        self._module.first.to(dtype)


class HalfLowered(PlainResNet):
    def slice(self, segment: int, width: float, device: str) -> PlainSlice:
        made = PlainSlice if segment else NotLowered
        return made(self.parts[segment], segment, torch.device(device))


class Forgetful(PlainSlice):
    def has_variant(self, previous_width: float | None) -> bool:
        return False


class ForgetsVariants(PlainResNet):
    def slice(self, segment: int, width: float, device: str) -> PlainSlice:
        return Forgetful(self.parts[segment], segment, torch.device(device))


class WithoutMoves(PlainResNet):
    def slice(self, segment: int, width: float, device: str) -> PlainSlice:
        made = super().slice(segment, width, device)
        return Untouchable(made) if segment else made


class Untouchable:
    """A slice that cannot leave its device."""

    def __init__(self, whole: PlainSlice) -> None:
        self.segment, self.width = whole.segment, whole.width
        self.weight_bytes, self.variant_bytes = whole.weight_bytes, whole.variant_bytes
        self.has_variant, self.build_variant, self.run = whole.has_variant, whole.build_variant, whole.run


class NoCosts(PlainResNet):
    def macs(self, segment: int, previous_width: float | None, width: float) -> int:
        return {}[segment]


class Tensors(PlainResNet):
    def architecture(self) -> dict[str, object]:
        return {"classes": torch.tensor(10)}


class Descending(PlainResNet):
    def __init__(self, classes: int = 10, channels: int = 8) -> None:
        super().__init__(classes, channels)
        self.widths = (1.0, 0.5)


class Unstored(nn.Module):
    pass
