"""Training batches: shuffled, resized to the size of the moment, augmented, normalised, on the training device.

The batch of a step depends on the seed and the step alone, which makes resuming exact.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor
from torch.nn import functional

from slim_scheduler.model import augmentation
from slim_scheduler.model.images import Images
from slim_scheduler.model.presets import Recipe


class Batches:
    """All training images as uint8 on `device`, and once more at each smaller size while it is in use."""

    def __init__(
        self,
        images: Images,
        recipe: Recipe,
        statistics: tuple[tuple[float, ...], tuple[float, ...]],
        full_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.recipe, self.seed, self.device = recipe, seed, device
        self.per_epoch = len(images) // recipe.batch
        self._sizes = recipe.sizes or ((0.0, full_size),)
        self._full = torch.from_numpy(images.pixels).to(device)
        self._labels = torch.from_numpy(images.labels).to(device)
        self._mean, self._std = (torch.tensor(s, device=device).view(1, -1, 1, 1) for s in statistics)
        self._resized = (self._full.shape[2], self._full)
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def size_at(self, share: float) -> int:
        """Image height in pixels at a share of the run."""
        return [size for start, size in self._sizes if share >= start][-1]

    def batch(self, step: int, share: float) -> tuple[Tensor, Tensor]:
        """(images (batch, channels, height, width) float32, labels (batch,)) of one step."""
        epoch, place = divmod(step, self.per_epoch)
        if self._order[0] != epoch:
            order = np.random.default_rng((self.seed, epoch, 0)).permutation(len(self._labels))
            self._order = (epoch, order)
        rows = torch.from_numpy(self._order[1][place * self.recipe.batch : (place + 1) * self.recipe.batch])
        rows = rows.to(self.device)
        generator = torch.Generator().manual_seed(int(np.random.default_rng((self.seed, step, 2)).integers(2**62)))
        pixels = self._at_size(self.size_at(share))[rows]
        return self._augment((pixels / 255.0 - self._mean) / self._std, generator), self._labels[rows]

    def normalize(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """Pixels as the network takes them, (items, channels, height, width) float32."""
        return (torch.from_numpy(pixels).to(self.device) / 255.0 - self._mean) / self._std

    def _at_size(self, size: int) -> Tensor:
        if self._resized[0] != size:
            parts = [_resize(part, size) for part in torch.split(self._full, 1000)]
            self._resized = (size, torch.cat(parts))
        return self._resized[1]

    def _augment(self, images: Tensor, generator: Generator) -> Tensor:
        recipe, size = self.recipe, images.shape[2]
        if recipe.affine_degrees:
            images = augmentation.random_affine(images, recipe.affine_degrees, 0.1, 0.1, generator)
        if recipe.trivial_augment:
            images = augmentation.trivial_augment(images, generator)
        images = augmentation.random_crop(images, round(recipe.crop * size), generator)
        if recipe.flip:
            images = augmentation.random_flip(images, generator)
        images = augmentation.cutout(images, round(recipe.cutout * size), generator)
        return images.contiguous(memory_format=torch.channels_last)


def _resize(pixels: Tensor, size: int) -> Tensor:
    """uint8 images at another height, the width in proportion."""
    if pixels.shape[2] == size:
        return pixels
    width = max(1, round(pixels.shape[3] * size / pixels.shape[2]))
    smaller = functional.interpolate(
        pixels.float(), (size, width), mode="bilinear", antialias=True, align_corners=False
    )
    return smaller.round().clamp(0, 255).byte()
