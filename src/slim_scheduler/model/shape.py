"""A network's `ModelShape`, measured on its own slices: what manifest, schedulers and simulator know of it."""

import math

from slim_scheduler.core.shape import ModelShape
from slim_scheduler.model.architecture import FLOAT_BYTES
from slim_scheduler.model.protocol import SlimmableModel


def shape_of(model: SlimmableModel) -> ModelShape:
    """Bytes and multiply-adds of every segment, previous width and width. Makes each slice once, on the host."""
    weights, variants, macs = [], [], []
    for segment in range(model.segments):
        slices = [model.slice(segment, width, "cpu") for width in model.widths]
        before = model.widths if segment else (None,)
        weights.append(tuple(s.weight_bytes for s in slices))
        variants.append(tuple(tuple(s.build_variant(previous) for s in slices) for previous in before))
        macs.append(tuple(tuple(model.macs(segment, previous, w) for w in model.widths) for previous in before))
    return ModelShape(
        name=model.name,
        segments=model.segments,
        widths=tuple(model.widths),
        classes=model.classes,
        item_shape=tuple(model.item_shape),
        input_bytes=FLOAT_BYTES * math.prod(model.item_shape),
        activation_bytes=tuple(
            tuple(FLOAT_BYTES * math.prod(model.activation_shape(s, w)) for w in model.widths)
            for s in range(model.segments)
        ),
        weight_bytes=tuple(weights),
        variant_bytes=tuple(variants),
        workspace_bytes=tuple(tuple(model.workspace_bytes(s, w) for w in model.widths) for s in range(model.segments)),
        macs=tuple(macs),
    )
