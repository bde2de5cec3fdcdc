"""Labelled images as values: one split, and a data set with its source."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Images:
    """Images of one split: pixels uint8 (items, channels, height, width), labels int64 (items,).

    `names` are `class/file` of each, of images that are files; empty for others.
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64]) -> "Images":
        names = tuple(self.names[row] for row in rows) if self.names else ()
        return Images(np.ascontiguousarray(self.pixels[rows]), self.labels[rows], names)


@dataclass(frozen=True, slots=True)
class ImageData:
    """A data set with class names, its source and what its licence says."""

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images
    source: str

    @property
    def item_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.pixels.shape[1:]
        return channels, height, width
