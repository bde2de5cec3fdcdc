"""Every source of images gives the same kind of arrays, and damaged files are errors that name the file."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slim_scheduler.core.errors import DataError
from slim_scheduler.model import cifar
from slim_scheduler.model.data import channel_statistics, digits, held_out, load_data, read_image
from slim_scheduler.model.images import Images


def write_cifar(folder, train=20, test=10):
    generator = np.random.default_rng(0)
    for name, count in (("train.bin", train), ("test.bin", test)):
        records = generator.integers(0, 100, (count, cifar.RECORD_BYTES), dtype=np.uint8)
        records.tofile(folder / name)
    return folder


def write_classes(folder, classes=("cat", "dog"), images=6, size=(20, 12)):
    generator = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(images):
            pixels = generator.integers(0, 60, (size[1], size[0], 3), dtype=np.uint8) + np.uint8(120 * label % 256)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_digits_have_a_fixed_stratified_held_out_third():
    data = digits()
    assert data.train.pixels.shape[1:] == (1, 8, 8)
    assert (len(data.train), len(data.test)) == (1198, 599)
    assert np.bincount(data.test.labels).min() >= 58
    again = digits()
    assert np.array_equal(data.test.pixels, again.test.pixels)


def test_held_out_images_are_a_share_of_each_class_and_none_is_lost():
    data = digits()
    kept, away = held_out(data.train, 0.2, seed=1)
    assert len(kept) + len(away) == len(data.train)
    shares = np.bincount(away.labels) / np.bincount(data.train.labels)
    assert np.allclose(shares, 0.2, atol=0.01)


def test_channel_statistics_are_those_of_the_pixels():
    data = digits()
    (mean,), (std,) = channel_statistics(data.train)
    assert mean == pytest.approx((data.train.pixels / 255).mean(), abs=1e-4)
    assert std == pytest.approx((data.train.pixels / 255).std(), abs=1e-4)


def test_the_official_layout_is_read_plane_by_plane(tmp_path):
    data = load_data(write_cifar(tmp_path))
    raw = np.fromfile(tmp_path / "train.bin", dtype=np.uint8).reshape(20, -1)
    assert data.train.labels.tolist() == raw[:, 1].tolist()
    assert np.array_equal(data.train.pixels[3, 1].ravel(), raw[3, 2 + 1024 : 2 + 2048])
    assert len(data.classes) == 100


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "no whole number of 3074-byte records"),
        (lambda p: os.truncate(p, 1 << 40), "no whole number"),
        (lambda p: p.write_bytes(b""), "has 0 bytes"),
        (lambda p: p.write_bytes(b"\x00\xff" + bytes(3072)), "label 255, CIFAR-100 has 0..99"),
        (lambda p: p.unlink(), "train.bin is missing"),
    ],
)
def test_a_damaged_cifar_file_is_named(tmp_path, damage, words):
    write_cifar(tmp_path)
    damage(tmp_path / "train.bin")
    with pytest.raises(DataError, match=words) as caught:
        load_data(tmp_path)
    assert "train.bin" in str(caught.value)


def test_an_archive_that_is_not_the_official_one_is_refused(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-100-binary/train.bin"), io.BytesIO())
    with pytest.raises(DataError, match="official archive 168513733"):
        load_data(path)
    os.truncate(path, cifar.ARCHIVE_BYTES)
    with pytest.raises(DataError, match=r"has SHA-256 .* the official archive 58a81ae192c23a4b"):
        load_data(path)


def test_class_folders_of_any_size_come_in_the_networks_size(tmp_path):
    data = load_data(write_classes(tmp_path / "pets"), (3, 16, 16))
    assert data.classes == ("cat", "dog")
    assert data.item_shape == (3, 16, 16)
    assert len(data.train) + len(data.test) == 12
    grey = load_data(tmp_path / "pets", (1, 8, 8))
    assert grey.item_shape == (1, 8, 8)


def as_sets(images):
    return {image.tobytes() for image in images.pixels}


def test_pictures_that_are_added_leave_the_others_where_they_are(tmp_path):
    folder = write_classes(tmp_path / "pets", images=40)
    before = load_data(folder)
    kept, away = held_out(before.train, 0.2, seed=3)
    for added in ("cat", "dog"):
        for i in range(25):
            pixels = np.random.default_rng(100 + i).integers(0, 256, (12, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / added / f"{'0' if i % 2 else 'z'}new{i}.png")
    after = load_data(folder)
    assert len(after.train) + len(after.test) == 130
    assert as_sets(before.train) <= as_sets(after.train)
    assert as_sets(before.test) <= as_sets(after.test)
    kept_after, away_after = held_out(after.train, 0.2, seed=3)
    assert as_sets(kept) <= as_sets(kept_after)
    assert as_sets(away) <= as_sets(away_after)


def test_a_named_share_is_about_right_and_another_seed_draws_others():
    names = tuple(f"{label}/{i}.png" for label in range(4) for i in range(1000))
    images = Images(np.zeros((4000, 1, 1, 1), np.uint8), np.repeat(np.arange(4), 1000), names)
    kept, away = held_out(images, 0.2, seed=0)
    assert len(kept) + len(away) == 4000
    assert np.bincount(away.labels) == pytest.approx(200, abs=50)  # four standard deviations
    assert set(away.names) != set(held_out(images, 0.2, seed=1)[1].names)
    again = held_out(kept, 0.2, seed=1)[1]
    assert len(again) == pytest.approx(0.2 * len(kept), abs=100), "what is drawn from the rest is a share of it"


@pytest.mark.parametrize(("images", "test"), [(1, 0), (2, 1), (3, None)])
def test_a_class_of_two_pictures_has_one_to_train_on_and_one_to_test(tmp_path, images, test):
    names = [f"class {i}" for i in range(8)]
    data = load_data(write_classes(tmp_path / "pets", classes=names, images=images), (1, 8, 8))
    trained, tested = (np.bincount(part.labels, minlength=8) for part in (data.train, data.test))
    assert (trained >= 1).all()
    assert (tested == test).all() if test is not None else (tested >= 1).all()


@pytest.mark.parametrize("suffix", ["png", "pgm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_grey_of_16_bits_keeps_its_shades(tmp_path, suffix, channels):
    shades = np.array([[0, 255, 257, 20_000], [128, 129, 65_534, 65_535]], np.uint16)
    path = tmp_path / f"grey.{suffix}"
    Image.fromarray(shades).save(path)
    read = read_image(path, (channels, 2, 4))
    assert read.shape == (channels, 2, 4)
    for plane in read:
        assert plane.tolist() == [[0, 1, 1, 78], [0, 1, 255, 255]]


def test_class_folders_of_16_bit_grey_are_grey(tmp_path):
    for name, shade in (("dark", 9_000), ("light", 60_000)):
        (tmp_path / name).mkdir()
        for i in range(4):
            Image.fromarray(np.full((5, 5), shade + i, np.uint16)).save(tmp_path / name / f"{i}.png")
    data = load_data(tmp_path)
    assert data.item_shape == (1, 5, 5)
    assert [sorted(set(data.train.pixels[data.train.labels == label].ravel())) for label in (0, 1)] == [[35], [233]]


def test_train_and_test_folders_are_kept_apart(tmp_path):
    write_classes(tmp_path / "pets" / "train", images=4)
    write_classes(tmp_path / "pets" / "test", images=2)
    data = load_data(tmp_path / "pets")
    assert (len(data.train), len(data.test)) == (8, 4)


def test_a_truncated_image_is_an_error_that_names_it(tmp_path):
    folder = write_classes(tmp_path / "pets")
    path = folder / "dog" / "3.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"dog/3\.png cannot be read"):
        load_data(folder)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("ppm", b"P6\n8"),
        ("ppm", b"P6\n8 8\n"),
        ("ppm", b"P6\n99999999999 9\n255\n"),
        ("pgm", b"P5\n8 8\n-1\n"),
        ("bmp", b"BM" + bytes(12) + b"\x28"),
        ("png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00"),
    ],
)
def test_a_damaged_header_is_an_error_that_names_the_file(tmp_path, suffix, content):
    folder = write_classes(tmp_path / "pets")
    (folder / "dog" / f"x.{suffix}").write_bytes(content)
    for options in ({}, {"size": (8, 8)}, {"item_shape": (3, 8, 8)}):
        with pytest.raises(DataError, match=rf"dog/x\.{suffix} cannot be read \(.+\); replace it") as caught:
            load_data(folder, **options)
        assert "\n" not in str(caught.value)


def test_digits_are_enlarged_to_a_network_of_larger_images():
    small, large = load_data("digits"), load_data("digits", (1, 32, 32))
    assert large.item_shape == (1, 32, 32)
    assert np.array_equal(large.test.labels, small.test.labels)
    shrunk = large.test.pixels.reshape(-1, 8, 4, 8, 4).mean((2, 4))
    assert np.abs(shrunk - small.test.pixels[:, 0]).mean() < 20


def test_other_bad_sources_are_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match="does not exist; give `digits`"):
        load_data(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(DataError, match="is a file; give `digits`"):
        load_data(tmp_path / "picture.png")
    (tmp_path / "one" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="1 class folders; at least 2"):
        load_data(tmp_path / "one")
    with pytest.raises(DataError, match="images of 1x8x8, the network takes 3x32x32"):
        load_data("digits", (3, 32, 32))


def test_real_cifar_100_has_its_known_sizes():
    folder = os.environ.get("SLIM_CIFAR100")
    if not folder:
        pytest.skip("set SLIM_CIFAR100 to a folder in the official cifar-100-binary layout to run this")
    data = load_data(Path(folder), (3, 32, 32))
    assert len(data.train) == 50_000
    assert len(data.test) in (5_000, 10_000)
    assert np.bincount(data.test.labels).tolist() == [len(data.test) // 100] * 100
    assert channel_statistics(data.train)[0] == pytest.approx((0.5071, 0.4865, 0.4409), abs=1e-3)
