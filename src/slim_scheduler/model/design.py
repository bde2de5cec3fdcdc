"""Which network and recipe a data set gets: a preset fitted to it, or channels, segments and blocks of one's own.

Number of classes and item shape always come from the data.
"""

import math
from collections.abc import Sequence

import msgspec

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.images import ImageData
from slim_scheduler.model.presets import PRESETS, Preset, Recipe, preset_named

SMALL_PICTURE = 16  # pixels of height up to which the digits' network and recipe fit
LEAST_UPDATES = 600  # what a recipe needs on little data; the digits' preset makes 1,200
MOST_CHANNELS_PER_GROUP = 16
SEGMENTS, CHANNELS = 4, 16  # of a network whose user says nothing of them
MOST_SEGMENTS = 8  # at 4 widths each, 65,536 width tuples: as many as a plan may have (router/plan/program.py)


def preset_for(
    data: ImageData,
    preset: str | None = None,
    channels: Sequence[int] = (),
    segments: int | None = None,
    blocks: Sequence[int] = (),
) -> Preset:
    """The named preset, or a network of `channels`, `segments` and `blocks`, for a data set. Raises InputError.

    Without either, pictures up to 16 pixels high get the preset `digits`, larger ones `cifar100-lean`.
    """
    own = bool(channels or segments or blocks)
    if preset is not None and own:
        raise InputError(
            f"preset {preset} is a whole network; leave out --channels, --segments and --blocks, or --preset"
        )
    small = data.item_shape[1] <= SMALL_PICTURE
    base = preset_named(preset) if preset is not None else PRESETS["digits" if small else "cifar100-lean"]
    if own:
        base = Preset(name="own", architecture=_designed(channels, segments, blocks), recipe=base.recipe)
    architecture = msgspec.structs.replace(base.architecture, item_shape=data.item_shape, classes=len(data.classes))
    fitted = _fitted(base.recipe, base.architecture.item_shape[1], data)
    return Preset(name=base.name, architecture=architecture, recipe=fitted)


def _designed(channels: Sequence[int], segments: int | None, blocks: Sequence[int]) -> Architecture:
    """Channels and blocks have one number per segment, or one: channels that double from it, blocks in every segment.

    The first segment keeps the picture's size, every further one halves it.
    """
    given = max(len(channels), len(blocks))
    count = segments or (given if given > 1 else SEGMENTS)
    if not 1 <= count <= MOST_SEGMENTS:
        raise InputError(f"segments is {count}; it must be from 1 to {MOST_SEGMENTS}: more have too many width tuples")
    first = channels[0] if channels else CHANNELS
    wide = tuple(channels) if len(channels) > 1 else tuple(first * 2**i for i in range(count))
    deep = tuple(blocks) if len(blocks) > 1 else (blocks[0] if blocks else 1,) * count
    for name, numbers in (("channels", wide), ("blocks", deep)):
        if len(numbers) != count:
            raise InputError(
                f"{name} has {len(numbers)} numbers, there are {count} segments; give one each, or only one"
            )
    widths = Architecture().widths
    slimmest = [c * width for c in wide for width in widths]
    if min(wide) < 1 or any(c != int(c) for c in slimmest):
        raise InputError(f"channels {', '.join(map(str, wide))} must be multiples of 4: they run at {widths} of them")
    common = math.gcd(*(int(c) for c in slimmest))
    return Architecture(
        channels=wide,
        blocks=deep,
        strides=(1, *(2,) * (count - 1)),
        stem_channels=wide[0],
        channels_per_group=max(d for d in range(1, MOST_CHANNELS_PER_GROUP + 1) if common % d == 0),
        logit_scale=0.5,
    )


def _fitted(recipe: Recipe, height: int, data: ImageData) -> Recipe:
    """A recipe for another picture height and for few pictures: no larger batch than there are, and enough updates."""
    training = len(data.train) - round(recipe.held_out * len(data.train))
    batch = min(recipe.batch, max(1, training // 2))
    epochs = max(recipe.epochs, math.ceil(LEAST_UPDATES / (training // batch))) if training else recipe.epochs
    scale = data.item_shape[1] / height
    sizes = tuple((share, max(1, round(size * scale))) for share, size in recipe.sizes)
    return msgspec.structs.replace(recipe, batch=batch, epochs=epochs, sizes=sizes)
