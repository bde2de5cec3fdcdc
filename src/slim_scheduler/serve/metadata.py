"""What the protocol says about one model: its name, tensors, layout and labels.

Built from a `ModelShape`; the codec checks requests against it, metadata and configuration are its two published
forms. It holds no weights and knows no engine.
"""

from typing import Any, Literal

import msgspec

from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Width

INPUT = "image"
OUTPUT = "logits"
VERSION = "1"
PLATFORM = "slim_scheduler"
DATATYPES = ("FP32", "UINT8")  # normalised by the client with mean and std, or raw pixels

Layout = Literal["NCHW", "NHWC"]


class ModelCard(msgspec.Struct, frozen=True):
    """One served model. `item_shape` is in the layout that clients use, `(channels, height, width)` or NHWC's."""

    name: str
    item_shape: tuple[int, ...]
    layout: Layout
    classes: int
    segments: int
    widths: tuple[Width, ...]
    labels: tuple[str, ...] = ()
    max_items: int = 4096
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def item_elements(self) -> int:
        elements = 1
        for side in self.item_shape:
            elements *= side
        return elements

    def layout_hint(self, item_shape: tuple[int, ...]) -> str:
        """What to do about an item that comes in the other order of axes; empty where that is not the matter."""
        if len(item_shape) != 3 or len(self.item_shape) != 3:
            return ""
        if self.layout == "NCHW" and (item_shape[2], *item_shape[:2]) == self.item_shape:
            return " (channels first); start the server with --layout NHWC, or transpose the image"
        if self.layout == "NHWC" and (*item_shape[1:], item_shape[0]) == self.item_shape:
            return " (channels last); start the server with --layout NCHW, or transpose the image"
        return ""

    def metadata(self) -> dict[str, Any]:
        """The model metadata object of the protocol."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": PLATFORM,
            "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *self.item_shape]}],
            "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, self.classes]}],
        }

    def parameters(self) -> dict[str, Any]:
        """What the protocol's metadata has no place for, and a client needs to prepare an image and read an answer."""
        return {
            "classes": list(self.labels),
            "datatypes": list(DATATYPES),
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def config(self) -> dict[str, Any]:
        """The model configuration extension's object."""
        output: dict[str, Any] = {"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [self.classes]}
        if self.labels:
            output["label_filename"] = "labels.txt"
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "max_batch_size": self.max_items,
            "input": [
                {
                    "name": INPUT,
                    "data_type": "TYPE_FP32",
                    "format": f"FORMAT_{self.layout}" if len(self.item_shape) == 3 else "FORMAT_NONE",
                    "dims": list(self.item_shape),
                }
            ],
            "output": [output],
            "version_policy": {"latest": {"num_versions": 1}},
            "parameters": {
                "widths": {"string_value": ",".join(f"{width:g}" for width in self.widths)},
                "segments": {"string_value": str(self.segments)},
                "also_accepts": {"string_value": DATATYPES[1]},
                "classes": {"string_value": ",".join(self.labels)},
                "mean": {"string_value": ",".join(f"{value:g}" for value in self.mean)},
                "std": {"string_value": ",".join(f"{value:g}" for value in self.std)},
            },
        }


def card_of(
    shape: ModelShape, labels: tuple[str, ...] = (), layout: Layout = "NCHW", max_items: int = 4096
) -> ModelCard:
    """The card of a network. A network whose items are not images keeps its own item shape."""
    item = shape.item_shape
    if layout == "NHWC" and len(item) == 3:
        item = (item[1], item[2], item[0])
    return ModelCard(shape.name, item, layout, shape.classes, shape.segments, shape.widths, labels, max_items)
