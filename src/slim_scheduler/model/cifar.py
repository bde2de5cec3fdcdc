"""CIFAR-100 in its official binary layout: the folder with train.bin and test.bin, or the official archive.

A record is 1 byte coarse label, 1 byte fine label, 3,072 bytes of pixels (red, green, blue planes, row-major).
"""

import hashlib
import tarfile
from pathlib import Path

import numpy as np

from slim_scheduler.core.errors import DataError
from slim_scheduler.model.images import ImageData, Images

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
# Size and SHA-256 as in tensorflow/datasets, tensorflow_datasets/url_checksums/cifar100.txt
ARCHIVE_BYTES = 168_513_733
ARCHIVE_SHA256 = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
ARCHIVE_FOLDER = "cifar-100-binary"
RECORD_BYTES = 2 + 3 * 32 * 32
MOST_RECORDS = 60_000  # the whole data set; anything longer is not CIFAR-100
CLASSES = 100
SOURCE = "CIFAR-100 (Krizhevsky 2009), cs.toronto.edu/~kriz/cifar.html; no licence is stated, so not redistributed here"


def from_folder(folder: Path) -> ImageData:
    """Reads train.bin, test.bin and, where present, fine_label_names.txt."""
    parts: list[Images] = []
    for name in ("train.bin", "test.bin"):
        path = folder / name
        if not path.is_file():
            raise DataError(f"data {path} is missing; {folder} must hold train.bin and test.bin as in {URL}")
        check_size(path, path.stat().st_size)
        parts.append(decode(path.read_bytes(), str(path)))
    names = folder / "fine_label_names.txt"
    train, test = parts
    return data_set(train, test, names.read_text() if names.is_file() else "")


def from_archive(archive: Path) -> ImageData:
    """Reads the official archive, after its SHA-256 has been checked; nothing is unpacked to disk."""
    check_archive(archive)
    members = {}
    with tarfile.open(archive) as tar:
        for name in ("train.bin", "test.bin", "fine_label_names.txt"):
            stream = tar.extractfile(f"{ARCHIVE_FOLDER}/{name}")
            assert stream is not None  # the hash says which members there are
            members[name] = stream.read()
    train, test = (decode(members[name], f"{archive}:{name}") for name in ("train.bin", "test.bin"))
    return data_set(train, test, members["fine_label_names.txt"].decode())


def check_archive(archive: Path) -> None:
    """Raises DataError unless the file is the official archive, by size and SHA-256."""
    if not archive.is_file():
        raise DataError(f"data {archive} does not exist; download it from {URL}")
    size = archive.stat().st_size
    if size != ARCHIVE_BYTES:
        raise DataError(
            f"data {archive} has {size} bytes, the official archive {ARCHIVE_BYTES}; download it again from {URL}"
        )
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != ARCHIVE_SHA256:
        raise DataError(
            f"data {archive} has SHA-256 {found}, the official archive {ARCHIVE_SHA256}; download it from {URL}"
        )


def check_size(path: Path, size: int) -> None:
    """Raises DataError for a file that cannot be whole records of CIFAR-100."""
    if size == 0 or size % RECORD_BYTES or size > MOST_RECORDS * RECORD_BYTES:
        raise DataError(
            f"data {path} has {size} bytes, no whole number of {RECORD_BYTES}-byte records up to {MOST_RECORDS}; "
            f"it is truncated or another file: fetch it again from {URL}"
        )


def decode(raw: bytes, origin: str) -> Images:
    """Records -> images. Raises DataError for a label outside 0..99."""
    records = np.frombuffer(raw, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 1].astype(np.int64)
    if labels.max() >= CLASSES:
        raise DataError(
            f"data {origin} has label {labels.max()}, CIFAR-100 has 0..{CLASSES - 1}; fetch it again from {URL}"
        )
    return Images(np.ascontiguousarray(records[:, 2:]).reshape(-1, 3, 32, 32), labels)


def data_set(train: Images, test: Images, names: str) -> ImageData:
    classes = tuple(names.split()) or tuple(str(label) for label in range(CLASSES))
    return ImageData("cifar100", classes, train, test, SOURCE)
