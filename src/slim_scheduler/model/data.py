"""Labelled images as arrays: handwritten digits, CIFAR-100 and class folders, each with a train and a test part.

Pixels are uint8, (items, channels, height, width). Readers check sizes before they take memory. `held_out` takes
validation images away from the training part; the test part is for the final accuracy alone.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.errors import DataError, first_line
from slim_scheduler.model import cifar
from slim_scheduler.model.images import ImageData, Images

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

DIGITS_SHAPE = (1, 8, 8)
DIGITS_SPLIT_SEED = 20260101  # fixed: the held-out third never changes
DIGITS_TEST_SHARE = 1 / 3
FOLDER_TEST_SHARE = 1 / 5
FOLDER_TEST_SEED = -1  # no seed of a training run: its held-out images are drawn from the rest by their names, too
MOST_PIXELS = 512 * 512  # of one image: all of them are kept in memory
GREY_16 = {"I", "I;16", "I;16B", "I;16L", "I;16N"}  # Pillow's, of the image files that are read
GREY_MODES = {"1", "L", "LA", *GREY_16}
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by channels
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm")


def load_data(
    data: str | Path, item_shape: tuple[int, ...] | None = None, size: tuple[int, int] | None = None
) -> ImageData:
    """`digits`, a folder in the official cifar-100-binary layout, its official archive, or class folders of images.

    Class folders are resized to `item_shape` (channels, height, width), or to `size` (height, width); without either
    they keep the size that all of them have, with one channel where none has colours. Digits are enlarged to a square
    `item_shape` of one channel. Other data must have the shape that is asked for. Raises DataError, one line, for what
    is missing, truncated or of another shape.
    """
    path = Path(data)
    if str(data) == "digits":
        channels, height, width = item_shape or DIGITS_SHAPE
        loaded = digits(height if channels == 1 and height == width else None)
    elif path.name.endswith(".tar.gz"):
        loaded = cifar.from_archive(path)
    elif not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise DataError(f"data {path} {what}; give `digits`, a cifar-100-binary folder, or class folders of images")
    elif (path / "train.bin").exists() or (path / "test.bin").exists():
        loaded = cifar.from_folder(path)
    else:
        channels, height, width = item_shape or _shape_of_folder(path, size)
        loaded = class_folders(path, (channels, height, width))
    wanted = item_shape or (loaded.item_shape[0], *(size or loaded.item_shape[1:]))
    if loaded.item_shape != tuple(wanted):
        raise DataError(
            f"data {loaded.name} has images of {_by(loaded.item_shape)}, the network takes {_by(wanted)}; "
            "give the data that the network was made for, such as workload.data or --data"
        )
    return loaded


def digits(size: int | None = None) -> ImageData:
    """scikit-learn's handwritten digits, 1x8x8, values 0..16 as 0..240; a fixed stratified third is the test part.

    `size`: enlarged to that many pixels in height and width, bilinear.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = (raw.images[:, None] * 15).astype(np.uint8)  # (1797, 1, 8, 8)
    if size is not None and size != DIGITS_SHAPE[1]:
        from PIL import Image

        images = [Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR) for image in pixels[:, 0]]
        pixels = np.stack([np.asarray(image, np.uint8) for image in images])[:, None]
    everything = Images(pixels, raw.target.astype(np.int64))
    train, test = held_out(everything, DIGITS_TEST_SHARE, DIGITS_SPLIT_SEED)
    names = tuple(str(digit) for digit in range(10))
    return ImageData("digits", names, train, test, "UCI optical recognition of handwritten digits (CC BY 4.0)")


def class_folders(folder: Path, item_shape: tuple[int, int, int]) -> ImageData:
    """One folder of images per class, under `folder` or under its `train` and `test`; its name is the class's.

    Without `train` and `test`, about a fifth of each class is the test part, of two images on at least one.
    """
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = _class_names(folder / "train")
        train, test = (_read_classes(folder / part, classes, item_shape) for part in ("train", "test"))
    else:
        classes = _class_names(folder)
        everything = _read_classes(folder, classes, item_shape)
        train, test = held_out(everything, FOLDER_TEST_SHARE, FOLDER_TEST_SEED, least=1)
    return ImageData(folder.name, classes, train, test, f"class folders {folder.name}")


def _shape_of_folder(folder: Path, size: tuple[int, int] | None) -> tuple[int, int, int]:
    """(channels, height, width) of class folders' images, from their headers. Raises DataError where sizes differ."""
    modes: set[str] = set()
    sizes: dict[tuple[int, int], Path] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES):
        with _opened(path) as image:
            modes.add(image.mode)
            sizes.setdefault((image.height, image.width), path)
    if size is None and len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise DataError(
            f"data {folder} has images of {len(sizes)} sizes ({_by(one)} {first.name}, {_by(other)} {second.name}); "
            "give --size, such as --size 32 or --size 24x32 (height, width)"
        )
    height, width = size or next(iter(sizes), (1, 1))  # a folder without images is refused by its reader
    if height * width > MOST_PIXELS:
        raise DataError(
            f"data {folder} has images of {_by((height, width))}, at most {MOST_PIXELS:,} pixels are taken; give --size"
        )
    return 1 if modes <= GREY_MODES else 3, height, width


def held_out(images: Images, share: float, seed: int, least: int = 0) -> tuple[Images, Images]:
    """(kept, held out): a share of each class, rounded, the same for the same seed.

    An image with a name is held out by its name's hash, so it stays where it is when others are added; the share is
    then about right. At least one such image of a class is kept, and `least` are held out where it has more: where the
    hashes of a small class give fewer, these few may change sides.
    """
    away = np.zeros(len(images), dtype=bool)
    if images.names:
        places = np.array([_place(name, seed) for name in images.names])  # in [0, 1)
        for label in np.unique(images.labels):
            rows = np.flatnonzero(images.labels == label)
            rows = rows[np.argsort(places[rows])]
            count = int(np.count_nonzero(places[rows] < share))
            away[rows[: min(max(count, least), len(rows) - 1)]] = True
    else:
        generator = np.random.default_rng(seed)
        for label in np.unique(images.labels):
            rows = generator.permutation(np.flatnonzero(images.labels == label))
            away[rows[: round(share * len(rows))]] = True
    return images.take(np.flatnonzero(~away)), images.take(np.flatnonzero(away))


def _place(name: str, seed: int) -> float:
    """Where in [0, 1) an image lies, as if drawn."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode(errors="surrogateescape")).digest()[:6]) / 2**48


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
    pixels, labels, names = [], [], []
    for label, name in enumerate(classes):
        here = folder / name
        files = sorted(p for p in here.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES) if here.is_dir() else []
        if not files:
            raise DataError(f"data {here} has no images ({', '.join(IMAGE_SUFFIXES)}); every class needs some")
        pixels += [read_image(path, item_shape) for path in files]
        labels += [label] * len(files)
        names += [f"{name}/{path.name}" for path in files]
    return Images(np.stack(pixels), np.array(labels, dtype=np.int64), tuple(names))


def read_image(path: Path, item_shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """One image as (channels, height, width). A truncated file is an error, never a grey rest."""
    from PIL import Image

    channels, height, width = item_shape
    with _opened(path) as image:
        shown = _in_8_bits(image) if image.mode in GREY_16 else image
        resized = shown.convert(MODES[channels]).resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(resized, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


@contextmanager
def _opened(path: Path) -> Iterator["PILImage"]:
    """An image file. Raises DataError for whatever Pillow raises while it reads a damaged one."""
    from PIL import Image

    damaged = (OSError, SyntaxError, ValueError, EOFError, OverflowError, struct.error, zlib.error)
    try:
        with Image.open(path) as image:
            yield image
    except (*damaged, Image.DecompressionBombError) as error:
        raise DataError(f"image {path} cannot be read ({first_line(error)}); replace it or take it out") from None


def _in_8_bits(image: "PILImage") -> "PILImage":
    """A grey image of 16 bits, whose values above 255 `convert` would make white. Pillow gives some in mode `I`."""
    from PIL import Image

    values = np.asarray(image).astype(np.int64).clip(0, 65535)  # (height, width)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
