"""Whether a network's class keeps to `protocol.py`, tried before it is saved: the class may be anybody's."""

import torch

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.model.protocol import SLICE_METHODS, SlimmableModel
from slim_scheduler.model.shape import shape_of


def checked_shape(model: SlimmableModel) -> ModelShape:
    """The sizes that a network's class tells. Raises InputError where it does not tell them."""
    try:
        if list(model.widths) != sorted(set(model.widths)):
            raise InputError(f"network {model.name}: its class gives widths {model.widths}; let them ascend")
        return shape_of(model)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"network {type(model).__name__} does not tell its sizes: {type(error).__name__}: {error} "
            "(slim_scheduler.model.protocol says what it has to)"
        ) from error


def check_runs(model: SlimmableModel) -> None:
    """One item through the narrowest and the widest slices.

    Raises InputError for a method that is missing or fails, and for a shape that was not told.
    """
    for width in dict.fromkeys((model.widths[0], model.widths[-1])):
        x, previous = torch.zeros(1, *model.item_shape), None
        for segment in range(model.segments):
            where = f"network {model.name}: segment {segment} at width {width:g}"
            try:
                part = model.slice(segment, width, "cpu")
                lacking = [method for method in SLICE_METHODS if not hasattr(part, method)]
                if lacking:
                    raise AttributeError(f"its slice has no {', '.join(lacking)}")
                part.build_variant(previous)
                if previous is not None and not part.has_variant(previous):
                    raise ValueError(f"has_variant({previous:g}) is False after build_variant({previous:g})")
                part.to_host()
                part.to_device()
                with torch.inference_mode():
                    x = part.run(x, previous)
            except Exception as error:
                raise InputError(f"{where} does not run: {type(error).__name__}: {error}") from error
            last = segment == model.segments - 1
            told = (model.classes,) if last else tuple(model.activation_shape(segment, width))
            if tuple(x.shape[1:]) != told:
                source = "classes" if last else "activation_shape"
                raise InputError(
                    f"{where} gives {tuple(x.shape[1:])} an item, `{source}` says {told}; make both the same"
                )
            previous = width
