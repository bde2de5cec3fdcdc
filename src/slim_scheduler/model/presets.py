"""Named pairs of a network and the recipe that trains it, as values that a checkpoint's manifest can carry."""

from difflib import get_close_matches
from typing import Literal

import msgspec

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.architecture import Architecture


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a network is trained. Lengths are in epochs, shares in [0, 1], learning rates for factor 1 of the cosine.

    `muon_lr` None trains everything by SGD. `sizes` are (share of the run from which, image height in pixels);
    `crop` is the largest shift and `cutout` the side of the square, both as a share of the image. `held_out` is the
    share of training images kept for validation and for the router's accuracy table.

    With a teacher, its part of every width tuple's loss is `teacher_weight`, at `teacher_temperature` (Hinton et al.
    2015). `teacher_non_target` decouples it: the weight of the classes that are not the label's beside 1 for the
    label's (DKD, Zhao et al. 2022); None leaves the plain divergence.
    """

    epochs: int = 100
    batch: int = 256
    muon_lr: float | None = None
    sgd_lr: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.02
    label_smoothing: float = 0.1
    random_tuples: int = 1
    teacher_weight: float = 0.7
    teacher_temperature: float = 4.0
    teacher_non_target: float | None = None
    sizes: tuple[tuple[float, int], ...] = ()
    crop: float = 0.125
    flip: bool = True
    cutout: float = 0.0
    trivial_augment: bool = False
    affine_degrees: float = 0.0
    ema_decay: float = 0.0
    bf16: bool = True
    held_out: float = 0.1
    weights_dtype: Literal["float32", "float16"] = "float32"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A network and its recipe under one name."""

    name: str
    architecture: Architecture
    recipe: Recipe


LEAN = Architecture(blocks=(1, 1, 1, 1), stem_channels=32, stem_scales=False, pooling="mean+max", logit_scale=0.3)
# About the paper's multiply-adds, spent late, where a channel costs little: depth and channels of the narrow end.
LATE = msgspec.structs.replace(LEAN, channels=(64, 128, 320, 640), blocks=(1, 1, 2, 2))

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="digits",
            architecture=Architecture(
                item_shape=(1, 8, 8),
                classes=10,
                channels=(16, 32, 48, 64),
                blocks=(1, 1, 1, 1),
                strides=(1, 1, 2, 2),
                stem_channels=16,
                channels_per_group=4,
                logit_scale=0.5,
            ),
            recipe=Recipe(
                epochs=80,
                batch=64,
                sgd_lr=0.1,
                random_tuples=2,
                crop=0.125,
                flip=False,
                affine_degrees=10.0,
                bf16=False,
                held_out=0.2,
            ),
        ),
        # The demo's: the same digits enlarged to 32x32, and a network of 4 to 24 channels. It is small so that width
        # shows in what it gets right, and its images are large so that width shows in what it costs.
        Preset(
            name="digits-small",
            architecture=Architecture(
                item_shape=(1, 32, 32),
                classes=10,
                channels=(4, 8, 16, 24),
                blocks=(1, 1, 1, 1),
                strides=(1, 2, 2, 2),
                stem_channels=4,
                channels_per_group=1,
                logit_scale=0.5,
            ),
            recipe=Recipe(
                epochs=60,
                batch=64,
                sgd_lr=0.1,
                random_tuples=2,
                flip=False,
                affine_degrees=10.0,
                bf16=False,
                held_out=0.2,
            ),
        ),
        # About the paper's size: minutes on a data-centre GPU. `models/cifar100` had a teacher.
        Preset(
            name="cifar100",
            architecture=LATE,
            recipe=Recipe(
                epochs=120,
                batch=1024,
                muon_lr=0.06,
                sgd_lr=0.2,
                random_tuples=2,
                teacher_weight=0.8,
                cutout=0.25,
                trivial_augment=True,
                ema_decay=0.999,
                held_out=0.05,
                weights_dtype="float16",
            ),
        ),
        # One block per segment and growing images: what a few CPU cores can train.
        Preset(
            name="cifar100-lean",
            architecture=LEAN,
            recipe=Recipe(
                epochs=60,
                batch=256,
                muon_lr=0.06,
                sgd_lr=0.2,
                sizes=((0.0, 16), (0.15, 24), (0.6, 32)),
                cutout=0.25,
                held_out=0.05,
                weights_dtype="float16",
            ),
        ),
    )
}


def preset_named(name: str) -> Preset:
    """Raises InputError that names the nearest preset."""
    if name in PRESETS:
        return PRESETS[name]
    nearest = get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise InputError(f"preset {name} does not exist; nearest: {nearest}; available: {', '.join(PRESETS)}")
