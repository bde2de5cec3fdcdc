"""Derives the profiles of the paper's two cards from public data: nothing here was measured on such a card.

A segment's time is counted, not measured: kernels launched, multiply-adds and bytes moved, at a share of the card's
peaks that `calibrate.py` fits. docs/reference-cluster.md says where each constant comes from and how uncertain it is.

    python examples/reference/derive_profiles.py --model models/cifar100-lean
"""

import argparse
import json
from pathlib import Path

import msgspec

from slim_scheduler.core.errors import CheckpointError
from slim_scheduler.core.profile import Curve, Latency, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, Watts, Width
from slim_scheduler.model.architecture import FLOAT_BYTES, Architecture, has_shortcut, segment_convolutions
from slim_scheduler.setup.profiles import write_profile

EFFICIENCY = 0.0297  # fitted by calibrate.py: the share of both peaks that a small network reaches, on either card
LAUNCH: Seconds = 10e-6  # one kernel from eager PyTorch, launch and framework; does not depend on the card
WINOGRAD = 2.25  # cuDNN's fp32 3x3 convolution of stride 1, F(2x2, 3x3), needs so many times fewer multiplications
LOAD: Seconds = 5e-3  # allocations and the first, unoptimised call of an instance
HOST_TO_DEVICE = 6e9  # bytes/s over PCIe 3.0 x16 from pageable memory
BATCHES = (1, 2, 4, 8, 16, 32)
# Near-linear up to 92 % of the time busy and sharply up beyond it (the paper's figures 1-3).
KNEE = 0.92
SLOWDOWN = Curve((0.0, KNEE, 1.0), (1.0, 1.04, 1.20))
POWER_AT_KNEE = 0.82  # of board power

# Kernels per layer: convolution, group norm (moments, normalise), activation, the sum at a block's end; pooling and
# classifier. Passes over a layer's output beside the convolution's own write: norm 3, activation 2, sum 3.
KERNELS_CONVOLUTION, KERNELS_NORM, KERNELS_ACTIVATION, KERNELS_SUM, KERNELS_CLASSIFIER = 1, 2, 1, 1, 3
PASSES_NORM, PASSES_ACTIVATION, PASSES_SUM = 3, 2, 3


class Card(msgspec.Struct, frozen=True):
    """Public data of one graphics card (docs/reference-cluster.md)."""

    name: str
    title: str
    flops: float  # fp32 peak at boost clock
    bytes_per_s: float
    memory_bytes: Bytes
    board_power: Watts
    idle_power: Watts  # with a process that holds a CUDA context


CARDS = (
    Card("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", 13.4e12, 616e9, 11 << 30, 250.0, 55.0),
    Card("gtx-980-ti", "NVIDIA GeForce GTX 980 Ti", 6.06e12, 336e9, 6 << 30, 250.0, 60.0),
)


class Work(msgspec.Struct, frozen=True):
    """What one segment asks of a device: kernels and weight bytes per batch, multiply-adds and bytes per item.

    `macs` are those that run: fewer than the network's, see WINOGRAD.
    """

    kernels: int
    weight_bytes: Bytes
    macs: float
    moved_bytes: Bytes


def segment_work(arch: Architecture, segment: int, previous_width: Width | None, width: Width) -> Work:
    """Counts a segment's work layer by layer, as `model/slim_resnet.py` runs it."""
    kernels = moved = weights = 0
    macs = 0.0
    for conv in segment_convolutions(arch, segment, previous_width, width):
        out = FLOAT_BYTES * conv.out_channels * conv.pixels
        kernels += KERNELS_CONVOLUTION
        moved += FLOAT_BYTES * conv.in_channels * conv.pixels * conv.stride**2 + out
        weights += FLOAT_BYTES * conv.parameters
        macs += conv.macs / (WINOGRAD if conv.kernel == 3 and conv.stride == 1 else 1)
        if conv.normalized:
            kernels += KERNELS_NORM
            moved += PASSES_NORM * out
        if conv.name.endswith(("stem", "conv1")):
            kernels += KERNELS_ACTIVATION
            moved += PASSES_ACTIVATION * out
        elif conv.name.endswith("conv2"):
            kernels += KERNELS_SUM + KERNELS_ACTIVATION
            moved += (PASSES_SUM + PASSES_ACTIVATION) * out
    if segment == arch.segments - 1:
        features = arch.segment_channels(segment, width) * arch.pooled
        kernels += KERNELS_CLASSIFIER
        weights += FLOAT_BYTES * features * arch.classes
        macs += features * arch.classes
    assert segment == 0 or has_shortcut(arch, segment), "every later segment adapts its input's width"
    return Work(kernels, weights, macs, moved)


def batch_seconds(card: Card, work: Work, batch: int, efficiency: float) -> Seconds:
    """Launches, then arithmetic and traffic at a share of the peaks: eager mode overlaps nothing."""
    arithmetic = 2 * work.macs * batch / card.flops
    traffic = (work.weight_bytes + work.moved_bytes * batch) / card.bytes_per_s
    return work.kernels * LAUNCH + (arithmetic + traffic) / efficiency


def derive(card: Card, shape: ModelShape, arch: Architecture, efficiency: float = EFFICIENCY) -> Profile:
    """The profile of a card for one network."""
    rows = [
        Latency(
            segment,
            previous,
            width,
            tuple(
                round(batch_seconds(card, segment_work(arch, segment, previous, width), batch, efficiency), 9)
                for batch in BATCHES
            ),
        )
        for segment in range(shape.segments)
        for previous in (shape.widths if segment else (None,))
        for width in shape.widths
    ]
    return Profile(
        device=card.title,
        model=shape.name,
        source="derived from public data, not measured (docs/reference-cluster.md)",
        batches=BATCHES,
        latency_rows=tuple(rows),
        load_s=LOAD,
        load_bytes_per_s=HOST_TO_DEVICE,
        memory_bytes=card.memory_bytes,
        power=Curve((0.0, KNEE, 1.0), (card.idle_power, POWER_AT_KNEE * card.board_power, card.board_power)),
        power_source="estimated",
        slowdown=SLOWDOWN,
        sharing=(1.0, 1.0),
        notes=f"efficiency of peak {efficiency:g}, launch {LAUNCH * 1e6:g} us, "
        f"fp32 peak {card.flops / 1e12:g} TFLOP/s, memory {card.bytes_per_s / 1e9:g} GB/s",
    )


def read_network(folder: Path) -> tuple[ModelShape, Architecture]:
    """A model's shape and architecture from its manifest. Raises CheckpointError."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        return msgspec.convert(manifest["shape"], ModelShape), msgspec.convert(manifest["architecture"], Architecture)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; train a network with `slim fit`") from None
    except (ValueError, KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} is not a model's manifest: {error}") from None


def speed_ratio(fast: Profile, slow: Profile) -> float:
    """How fast the slow card is, relative to the other, on full batches of all segments and widths."""
    return sum(r.seconds[-1] for r in fast.latency_rows) / sum(r.seconds[-1] for r in slow.latency_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/cifar100-lean"), help="the network's folder")
    parser.add_argument("--out", type=Path, default=Path("profiles"), help="where the two files go")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of the peaks that is reached")
    asked = parser.parse_args()
    shape, arch = read_network(asked.model)
    profiles = [derive(card, shape, arch, asked.efficiency) for card in CARDS]
    for card, profile in zip(CARDS, profiles, strict=True):
        write_profile(profile, asked.out / f"{card.name}.json")
        print(f"{asked.out / card.name}.json: {card.title} running {shape.name}")
    print(f"speed of {CARDS[1].name} relative to {CARDS[0].name}: {speed_ratio(*profiles):.3f}")


if __name__ == "__main__":
    main()
