"""Margins of answers, and the fit of what they say of being right: a logistic curve per width of the last segment."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.confidence import Calibration, Floats, Logistic, log_ratio
from slim_scheduler.core.types import WidthTuple

LEAST_SCALE = 1e-3  # more margin is never less confidence, even where a few images say so


def margins_of(logits: Tensor) -> Tensor:
    """Difference of the two highest softmax values: (batch, classes) -> (batch,), in [0, 1]."""
    highest = torch.softmax(logits, dim=1).topk(2, dim=1).values  # (batch, 2)
    return highest[:, 0] - highest[:, 1]


def fit_calibration(
    right: Mapping[WidthTuple, npt.NDArray[np.bool_]],
    margins: Mapping[WidthTuple, npt.NDArray[np.float16]],
    split: str,
) -> Calibration:
    """The curves of the least cross-entropy; all tuples that end at a width share its curve."""
    by_width = {}
    for width in sorted({widths[-1] for widths in right}):
        tuples = [widths for widths in right if widths[-1] == width]
        ratios = np.concatenate([log_ratio(margins[widths]) for widths in tuples])
        by_width[width] = _fit(ratios, np.concatenate([right[widths] for widths in tuples]))
    return Calibration(by_width, split)


def _fit(ratios: Floats, right: npt.NDArray[np.bool_]) -> Logistic:
    from scipy.optimize import minimize

    signs = np.where(right, -1.0, 1.0)

    def cross_entropy(parameters: Floats) -> float:
        scale, offset, curve = parameters
        return float(np.logaddexp(0.0, signs * ((curve * ratios + scale) * ratios + offset)).mean())

    bounds = [(LEAST_SCALE, 1e3), (-1e3, 1e3), (0.0, 1e3)]
    fitted = minimize(cross_entropy, np.array([1.0, 0.0, 0.0]), method="L-BFGS-B", bounds=bounds)
    return Logistic(*(round(float(value), 6) for value in fitted.x))
