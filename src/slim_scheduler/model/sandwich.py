"""One training step's gradients: the sandwich rule with in-place distillation (Yu and Huang 2019).

The widest network learns from the labels; the slimmest and random width tuples, each segment's width drawn on its
own, learn from the widest one's answers. Group norm knows no batch, so a batch split over workers gives the same
gradients as a whole one.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.presets import Recipe
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.model.workers import Workers

WidthTuples = list[tuple[float, ...]]


def width_tuples(arch: Architecture, recipe: Recipe, seed: int, step: int) -> WidthTuples:
    """The tuples of one step, widest first."""
    generator = np.random.default_rng((seed, step, 1))
    draws = generator.choice(arch.widths, size=(recipe.random_tuples, arch.segments))
    uniform = [(width,) * arch.segments for width in (arch.widths[-1], arch.widths[0])]
    return uniform + [tuple(float(width) for width in draw) for draw in draws]


def backward(
    model: SlimResNet, images: Tensor, labels: Tensor, tuples: WidthTuples, recipe: Recipe, workers: Workers
) -> float:
    """Adds the step's gradients to the parameters; returns the widest network's mean loss."""
    parameters = list(model.parameters())

    def part(batch: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
        return _gradients(model, parameters, *batch, tuples, recipe)

    parts = zip(torch.chunk(images, workers.count), torch.chunk(labels, workers.count), strict=True)
    results = workers.map(part, list(parts))
    shares = [len(chunk) / len(labels) for chunk in torch.chunk(labels, workers.count)]
    for p, *gradients in zip(parameters, *(gradients for _, gradients in results), strict=True):
        p.grad = torch.stack([g * share for g, share in zip(gradients, shares, strict=True)]).sum(dim=0)
    return sum(loss * share for (loss, _), share in zip(results, shares, strict=True))


def _gradients(
    model: SlimResNet,
    parameters: list[torch.nn.Parameter],
    images: Tensor,
    labels: Tensor,
    tuples: WidthTuples,
    recipe: Recipe,
) -> tuple[float, list[Tensor]]:
    """(widest network's loss, gradients of all tuples' losses) of one part of a batch."""
    teacher: Tensor | None = None
    first = 0.0
    totals: list[Tensor] = []
    for widths in tuples:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.bf16):
            logits = model(images, widths)
        logits = logits.float()
        if teacher is None:
            loss = functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
            teacher = logits.detach().softmax(dim=1)
            first = float(loss.detach())
        else:
            loss = functional.cross_entropy(logits, teacher)  # in-place distillation
        gradients = torch.autograd.grad(loss, parameters)
        totals = [a.add_(b) for a, b in zip(totals, gradients, strict=True)] if totals else list(gradients)
    return first, totals
