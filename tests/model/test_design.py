"""A data set gets a network of its classes and sizes, and a recipe that suits how many pictures there are."""

import numpy as np
import pytest
from PIL import Image

from slim_scheduler.core.errors import DataError, InputError
from slim_scheduler.core.router.plan.program import MOST_TUPLES
from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.data import load_data
from slim_scheduler.model.design import LEAST_UPDATES, MOST_SEGMENTS, preset_for
from slim_scheduler.model.images import ImageData, Images
from slim_scheduler.model.presets import PRESETS
from tests.model.test_data import write_classes


def pictures(count: int = 90, shape: tuple[int, int, int] = (3, 16, 16), classes: int = 3) -> ImageData:
    def part(items: int) -> Images:
        return Images(np.zeros((items, *shape), np.uint8), np.arange(items) % classes)

    return ImageData("pictures", tuple("abcdefghij"[:classes]), part(count), part(count // 5), "made up")


@pytest.mark.parametrize(("height", "name"), [(8, "digits"), (16, "digits"), (24, "cifar100-lean")])
def test_the_preset_follows_the_size_of_the_pictures(height, name):
    preset = preset_for(pictures(shape=(1, height, height)))
    assert preset.name == name
    assert preset.architecture.item_shape == (1, height, height)
    assert preset.architecture.classes == 3


def test_a_preset_on_its_own_data_is_as_it_was():
    assert preset_for(load_data("digits"), "digits") == PRESETS["digits"]


def test_few_pictures_get_smaller_batches_and_enough_updates():
    recipe = preset_for(pictures(20)).recipe
    assert recipe.batch <= 8
    assert recipe.epochs * (16 // recipe.batch) >= LEAST_UPDATES


def test_growing_images_grow_to_the_size_of_the_data():
    assert [size for _, size in preset_for(pictures(shape=(3, 64, 64))).recipe.sizes] == [32, 48, 64]


def test_channels_double_and_blocks_repeat_from_one_number():
    arch = preset_for(pictures(), channels=(12,), segments=3, blocks=(2,)).architecture
    assert (arch.channels, arch.blocks, arch.strides) == ((12, 24, 48), (2, 2, 2), (1, 2, 2))
    assert arch.channels_per_group == 3
    arch = preset_for(pictures(), channels=(8, 32), blocks=(1, 3)).architecture
    assert (arch.channels, arch.blocks) == ((8, 32), (1, 3))
    assert preset_for(pictures(), segments=1).architecture.channels == (16,)


@pytest.mark.parametrize(
    ("given", "count"), [({"segments": 1_000_000}, 1_000_000), ({"segments": -1}, -1), ({"channels": (4,) * 9}, 9)]
)
def test_more_segments_than_can_be_planned_are_refused(given, count):
    said = rf"segments is {count}; it must be from 1 to 8: more have too many width tuples"
    with pytest.raises(InputError, match=said):
        preset_for(pictures(), **given)
    assert preset_for(pictures(), segments=8).architecture.segments == 8


def test_eight_segments_have_as_many_width_tuples_as_a_plan_may_have():
    assert len(Architecture().widths) ** MOST_SEGMENTS == MOST_TUPLES


def test_class_folders_keep_the_size_and_the_colours_they_have(tmp_path):
    assert load_data(write_classes(tmp_path / "even", size=(9, 14))).item_shape == (3, 14, 9)
    write_classes(tmp_path / "odd", classes=("cat",), size=(9, 14))
    write_classes(tmp_path / "odd", classes=("dog",), size=(10, 10))
    with pytest.raises(DataError, match=r"images of 2 sizes .* give --size, such as --size 32 or --size 24x32"):
        load_data(tmp_path / "odd")
    assert load_data(tmp_path / "odd", size=(12, 8)).item_shape == (3, 12, 8)
    for path in tmp_path.glob("even/*/*.png"):
        Image.open(path).convert("L").save(path)
    assert load_data(tmp_path / "even").item_shape == (1, 14, 9)


def test_pictures_that_would_fill_the_memory_need_a_size(tmp_path):
    data = write_classes(tmp_path / "large", images=2, size=(500, 600))
    with pytest.raises(DataError, match="600x500, at most 262,144 pixels are taken; give --size"):
        load_data(data)
