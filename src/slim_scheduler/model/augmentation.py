"""Random changes of training images, as tensor operations on whole batches, on any device.

All chance comes from the generator handed in (on the CPU, so that a seed means the same on every device).
"""

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional


def random_crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    """Shifts each image by up to `padding` pixels, reflecting at the border. (batch, channels, height, width)."""
    if padding == 0:
        return images
    batch, _, height, width = images.shape
    padded = functional.pad(images, (padding,) * 4, mode="reflect")
    shifts = torch.randint(0, 2 * padding + 1, (2, batch), generator=generator).to(images.device)
    rows = shifts[0, :, None] + torch.arange(height, device=images.device)  # (batch, height)
    columns = shifts[1, :, None] + torch.arange(width, device=images.device)
    items = torch.arange(batch, device=images.device)[:, None, None]
    picked = padded.permute(0, 2, 3, 1)[items, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)  # channels last in memory


def random_flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirrors each image left to right with probability one half."""
    flip = torch.rand(len(images), generator=generator).to(images.device) < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def cutout(images: Tensor, side: int, generator: Generator) -> Tensor:
    """Sets a square of up to `side` pixels around a random point of each image to 0 (DeVries and Taylor 2017)."""
    if side == 0:
        return images
    batch, _, height, width = images.shape
    centres = torch.rand(2, batch, generator=generator).to(images.device)

    def outside(centre: Tensor, size: int) -> Tensor:
        positions = torch.arange(size, device=images.device)
        return (positions - (centre * size)[:, None]).abs() > side / 2  # (batch, size)

    keep = outside(centres[0], height)[:, :, None] | outside(centres[1], width)[:, None, :]
    return images * keep[:, None]


def random_affine(images: Tensor, degrees: float, shear: float, scale: float, generator: Generator) -> Tensor:
    """Rotates, shears and scales each image within these bounds (degrees; ratios), reflecting at the border."""
    draws = torch.rand(4, len(images), generator=generator).to(images.device) * 2 - 1
    angle, zoom = draws[0] * math.radians(degrees), 1 + draws[1] * scale
    cos, sin, zero = torch.cos(angle) * zoom, torch.sin(angle) * zoom, torch.zeros_like(angle)
    rows = torch.stack((cos, draws[2] * shear - sin, zero, draws[3] * shear + sin, cos, zero), dim=1)
    grid: Tensor = functional.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    moved: Tensor = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return moved


def random_colour(images: Tensor, strength: float, generator: Generator) -> Tensor:
    """Changes brightness, contrast and saturation of each normalised image by up to `strength` (a ratio)."""
    draws = (torch.rand(3, len(images), generator=generator).to(images.device) * 2 - 1) * strength
    brightness, contrast, saturation = draws[:, :, None, None, None]
    grey = images.mean(dim=1, keepdim=True)
    images = grey + (images - grey) * (1 + saturation)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    tinted: Tensor = mean + (images - mean) * (1 + contrast) + brightness
    return tinted


def trivial_augment(images: Tensor, generator: Generator) -> Tensor:
    """One random change per image, of random strength: nothing, geometry or colour (after TrivialAugment, 2021)."""
    choice = torch.randint(0, 3, (len(images),), generator=generator).to(images.device)[:, None, None, None]
    bent = random_affine(images, degrees=30.0, shear=0.3, scale=0.2, generator=generator)
    tinted = random_colour(images, strength=0.7, generator=generator)
    return torch.where(choice == 1, bent, torch.where(choice == 2, tinted, images))
