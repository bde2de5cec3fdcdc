"""Muon for the convolutions, Nesterov momentum for everything else, in one object whose state is plain tensors.

Muon (Jordan et al. 2024) replaces a weight matrix's momentum by its nearest orthogonal matrix. With standardised
weights only a filter's direction counts, so matrices are kept at a fixed norm and the learning rate is the angle of a
step.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from slim_scheduler.model.workers import Workers

# Quintic Newton-Schulz iteration that drives singular values to about 1 (Jordan et al. 2024)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 4


class MuonSgd:
    """Updates `matrices` by Muon and `others` by SGD with Nesterov momentum and weight decay.

    Without Muon (`muon_lr` None) all go by SGD. Learning rates are those at factor 1; `step` takes the schedule's
    factor.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[str, nn.Parameter]],
        others: Iterable[tuple[str, nn.Parameter]],
        *,
        muon_lr: float | None,
        sgd_lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        self.muon_lr, self.sgd_lr = muon_lr, sgd_lr
        self.momentum, self.weight_decay = momentum, weight_decay
        largest_first = sorted(matrices, key=lambda named: -named[1].numel())  # so that workers end together
        self._matrices = dict(largest_first) if muon_lr is not None else {}
        self._others = dict(others) if muon_lr is not None else {**dict(largest_first), **dict(others)}
        everything = {**self._matrices, **self._others}
        self.state: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in everything.items()}
        with torch.no_grad():
            for p in self._matrices.values():
                _fix_norm(p)

    @torch.no_grad()
    def step(self, factor: float, workers: Workers) -> None:
        """One update from the gradients, which are cleared."""
        for name, p in self._others.items():
            gradient = _gradient(p)
            if p.dim() > 1:
                gradient = gradient.add(p, alpha=self.weight_decay)
            p.sub_(self._nesterov(name, gradient), alpha=self.sgd_lr * factor)
        workers.map(partial(self._turn, factor), self._matrices.items())

    @torch.no_grad()
    def _turn(self, factor: float, named: tuple[str, nn.Parameter]) -> None:
        """Muon's update of one matrix."""
        name, p = named
        assert self.muon_lr is not None
        update = orthogonalize(self._nesterov(name, _gradient(p)).flatten(1)).view_as(p)
        p.sub_(update, alpha=self.muon_lr * factor)
        _fix_norm(p)

    def _nesterov(self, name: str, gradient: Tensor) -> Tensor:
        velocity = self.state[name].mul_(self.momentum).add_(gradient)
        return gradient.add(velocity, alpha=self.momentum)


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly, by Newton-Schulz in bfloat16. (rows, columns), any shape."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrix.bfloat16() / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if tall else x
    return x.to(matrix.dtype)


def _gradient(p: nn.Parameter) -> Tensor:
    """Takes the gradient away from the parameter; zeros where a step used none of it."""
    gradient, p.grad = p.grad, None
    return torch.zeros_like(p) if gradient is None else gradient


def _fix_norm(p: Tensor) -> None:
    p.mul_(len(p) ** 0.5 / (p.norm() + 1e-7))
