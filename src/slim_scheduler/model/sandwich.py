"""One training step's gradients: the sandwich rule with in-place distillation (Yu and Huang 2019).

The widest network learns from the labels; the slimmest and random width tuples, each segment's width drawn on its
own, learn from the widest one's answers. Where there is a teacher, all of them learn from its answers to the same
augmented images as well (Hinton et al. 2015; decoupled as in Zhao et al. 2022). Group norm knows no batch, so a batch
split over workers gives the same gradients as a whole one.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.presets import Recipe
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.model.workers import Workers

WidthTuples = list[tuple[float, ...]]
Ask = Callable[[Tensor], Tensor]  # normalised images -> a teacher's logits


def width_tuples(arch: Architecture, recipe: Recipe, seed: int, step: int) -> WidthTuples:
    """The tuples of one step, widest first."""
    generator = np.random.default_rng((seed, step, 1))
    draws = generator.choice(arch.widths, size=(recipe.random_tuples, arch.segments))
    uniform = [(width,) * arch.segments for width in (arch.widths[-1], arch.widths[0])]
    return uniform + [tuple(float(width) for width in draw) for draw in draws]


def backward(
    model: SlimResNet,
    images: Tensor,
    labels: Tensor,
    tuples: WidthTuples,
    recipe: Recipe,
    workers: Workers,
    ask: Ask | None = None,
) -> float:
    """Adds the step's gradients to the parameters; returns the widest network's mean loss on the labels."""
    parameters = list(model.parameters())

    def part(batch: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
        return _gradients(model, parameters, *batch, tuples, recipe, ask)

    parts = zip(torch.chunk(images, workers.count), torch.chunk(labels, workers.count), strict=True)
    results = workers.map(part, list(parts))
    shares = [len(chunk) / len(labels) for chunk in torch.chunk(labels, workers.count)]
    for p, *gradients in zip(parameters, *(gradients for _, gradients in results), strict=True):
        if len(gradients) == 1:
            p.grad = gradients[0]
        else:
            p.grad = torch.stack([g * share for g, share in zip(gradients, shares, strict=True)]).sum(dim=0)
    return sum(loss * share for (loss, _), share in zip(results, shares, strict=True))


def _gradients(
    model: SlimResNet,
    parameters: list[torch.nn.Parameter],
    images: Tensor,
    labels: Tensor,
    tuples: WidthTuples,
    recipe: Recipe,
    ask: Ask | None,
) -> tuple[float, list[Tensor]]:
    """(widest network's loss on the labels, gradients of all tuples' losses) of one part of a batch."""
    taught = ask(images) if ask else None
    widest: Tensor | None = None
    first = 0.0
    totals: list[Tensor] = []
    for widths in tuples:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.bf16):
            logits = model(images, widths)
        logits = logits.float()
        if widest is None:
            loss = functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
            widest = logits.detach().softmax(dim=1)
            first = float(loss.detach())
        else:
            loss = functional.cross_entropy(logits, widest)  # in-place distillation
        if taught is not None:
            loss = torch.lerp(loss, distillation(logits, taught, labels, recipe), recipe.teacher_weight)
        gradients = torch.autograd.grad(loss, parameters)
        totals = [a.add_(b) for a, b in zip(totals, gradients, strict=True)] if totals else list(gradients)
    return first, totals


def distillation(logits: Tensor, taught: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Mean over (batch, classes) of the divergence from the teacher's answers, times the squared temperature.

    Plain (Hinton et al. 2015, section 2), or with `teacher_non_target` the sum of the divergence between label and
    rest and of that among the other classes alone (DKD, Zhao et al. 2022, eq. 7).
    """
    temperature = recipe.teacher_temperature
    ours, theirs = (logits / temperature).log_softmax(dim=1), (taught / temperature).log_softmax(dim=1)
    if recipe.teacher_non_target is None:
        return temperature**2 * functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    is_label = functional.one_hot(labels, logits.shape[1]).bool()

    def label_and_rest(log_p: Tensor) -> Tensor:
        rest = log_p.masked_fill(is_label, -torch.inf).logsumexp(dim=1)
        return torch.stack((log_p[is_label], rest), dim=1)  # (batch, 2)

    def others(log_p: Tensor) -> Tensor:
        return log_p[~is_label].view(len(labels), -1).log_softmax(dim=1)  # (batch, classes - 1)

    target = functional.kl_div(label_and_rest(ours), label_and_rest(theirs), reduction="batchmean", log_target=True)
    non_target = functional.kl_div(others(ours), others(theirs), reduction="batchmean", log_target=True)
    return temperature**2 * (target + recipe.teacher_non_target * non_target)
