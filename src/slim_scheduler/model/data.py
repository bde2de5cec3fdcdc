"""Labelled images as arrays: handwritten digits, CIFAR-100 and class folders, each with a train and a test part.

Pixels are uint8, (items, channels, height, width). Readers check sizes before they take memory. `held_out` takes
validation images away from the training part; the test part is for the final accuracy alone.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.errors import DataError

DIGITS_SPLIT_SEED = 20260101  # fixed: the held-out third never changes
DIGITS_TEST_SHARE = 1 / 3
FOLDER_TEST_SHARE = 1 / 5
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm")


@dataclass(frozen=True, slots=True)
class Images:
    """Images of one split: pixels uint8 (items, channels, height, width), labels int64 (items,)."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64]) -> "Images":
        return Images(np.ascontiguousarray(self.pixels[rows]), self.labels[rows])


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


def load_data(data: str | Path, item_shape: tuple[int, int, int] | None = None) -> ImageData:
    """`digits`, a folder in the official cifar-100-binary layout, its official archive, or class folders of images.

    Class folders are resized to `item_shape` (channels, height, width), 3x32x32 by default; other data must have
    that shape. Raises DataError, one line, for what is missing, truncated or of another shape.
    """
    from slim_scheduler.model import cifar

    path = Path(data)
    if str(data) == "digits":
        loaded = digits()
    elif path.name.endswith(".tar.gz"):
        loaded = cifar.from_archive(path)
    elif not path.is_dir():
        raise DataError(
            f"data {path} does not exist; give `digits`, a cifar-100-binary folder, or class folders of images"
        )
    elif (path / "train.bin").exists() or (path / "test.bin").exists():
        loaded = cifar.from_folder(path)
    else:
        loaded = class_folders(path, item_shape or (3, 32, 32))
    if item_shape is not None and loaded.item_shape != tuple(item_shape):
        raise DataError(
            f"data {loaded.name} has images of {_by(loaded.item_shape)}, the network takes {_by(item_shape)}; "
            "choose the preset that belongs to the data"
        )
    return loaded


def digits() -> ImageData:
    """scikit-learn's handwritten digits, 1x8x8, values 0..16 as 0..240; a fixed stratified third is the test part."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = (raw.images[:, None] * 15).astype(np.uint8)  # (1797, 1, 8, 8)
    everything = Images(pixels, raw.target.astype(np.int64))
    train, test = held_out(everything, DIGITS_TEST_SHARE, DIGITS_SPLIT_SEED)
    names = tuple(str(digit) for digit in range(10))
    return ImageData("digits", names, train, test, "UCI optical recognition of handwritten digits (CC BY 4.0)")


def class_folders(folder: Path, item_shape: tuple[int, int, int]) -> ImageData:
    """One folder of images per class, under `folder` or under its `train` and `test`.

    Without `train` and `test`, a stratified fifth is the test part.
    """
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = _class_names(folder / "train")
        train, test = (_read_classes(folder / part, classes, item_shape) for part in ("train", "test"))
    else:
        classes = _class_names(folder)
        train, test = held_out(_read_classes(folder, classes, item_shape), FOLDER_TEST_SHARE, DIGITS_SPLIT_SEED)
    return ImageData(folder.name, classes, train, test, f"class folders {folder.name}")


def held_out(images: Images, share: float, seed: int) -> tuple[Images, Images]:
    """(kept, held out): a stratified share of each class, rounded, the same for the same seed."""
    generator = np.random.default_rng(seed)
    away = np.zeros(len(images), dtype=bool)
    for label in np.unique(images.labels):
        rows = generator.permutation(np.flatnonzero(images.labels == label))
        away[rows[: round(share * len(rows))]] = True
    return images.take(np.flatnonzero(~away)), images.take(np.flatnonzero(away))


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, standard deviation) per channel of pixels scaled to [0, 1]."""
    counts = [np.bincount(images.pixels[:, c].ravel(), minlength=256) for c in range(images.pixels.shape[1])]
    values = np.arange(256) / 255.0
    means = [float(n @ values / n.sum()) for n in counts]
    spreads = [float(np.sqrt(n @ (values - m) ** 2 / n.sum())) for n, m in zip(counts, means, strict=True)]
    return tuple(round(m, 5) for m in means), tuple(round(max(s, 1e-3), 5) for s in spreads)


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")))
    if len(names) < 2:
        raise DataError(f"data {folder} has {len(names)} class folders; at least 2 are needed, each with its images")
    return names


def _read_classes(folder: Path, classes: tuple[str, ...], item_shape: tuple[int, int, int]) -> Images:
    pixels, labels = [], []
    for label, name in enumerate(classes):
        here = folder / name
        files = sorted(p for p in here.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES) if here.is_dir() else []
        if not files:
            raise DataError(f"data {here} has no images ({', '.join(IMAGE_SUFFIXES)}); every class needs some")
        pixels += [_read_image(path, item_shape) for path in files]
        labels += [label] * len(files)
    return Images(np.stack(pixels), np.array(labels, dtype=np.int64))


def _read_image(path: Path, item_shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """One image as (channels, height, width). A truncated file is an error, never a grey rest."""
    from PIL import Image, UnidentifiedImageError

    channels, height, width = item_shape
    try:
        with Image.open(path) as image:
            resized = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"image {path} cannot be read ({error}); replace it or take it out") from None
    array = np.asarray(resized, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
