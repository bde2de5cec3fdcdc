"""How sure an answer is: its margin, and the chance of being right that the margin stands for.

The margin of an answer is the difference of its two highest softmax values, in [0, 1]. A calibration turns it into a
confidence; it is fitted by `model/calibration.py` and travels in the accuracy files.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.core.types import Width, WidthTuple

Floats = npt.NDArray[np.float64]
CLOSEST_TO_ONE = 1.0 - 2.0**-12  # between the last two float16 margins: a log ratio stays finite
BINS = 15  # of the expected calibration error, as Guo et al. 2017 have it


class Logistic(msgspec.Struct, frozen=True):
    """confidence = 1 / (1 + exp(-(curve * z^2 + scale * z + offset))), where z = log((1 + margin) / (1 - margin)).

    z is the difference of the two highest logits where they share all probability, `1 / scale` a temperature on it;
    the offset is for the classes that z leaves out (Platt 1999; Guo et al. 2017). The curve is for networks whose
    large margins say more than a temperature allows, as a taught one's. `scale` is above 0 and `curve` at least 0, so
    more margin is more confidence.
    """

    scale: float
    offset: float
    curve: float = 0.0

    def confidence(self, margins: npt.ArrayLike) -> Floats:
        """Chances of being right, in [0, 1], of margins of any shape."""
        z = log_ratio(margins)
        return np.asarray(1.0 / (1.0 + np.exp(-((self.curve * z + self.scale) * z + self.offset))))

    def confidence_of(self, margin: float) -> float:
        """`confidence` of one margin, at a tenth of the cost."""
        m = min(margin, CLOSEST_TO_ONE)
        z = math.log1p(m) - math.log1p(-m)
        return 1.0 / (1.0 + math.exp(-((self.curve * z + self.scale) * z + self.offset)))

    def margin(self, confidence: float) -> float:
        """The least margin that has a confidence; 0 where every margin has it, above 1 where none has."""
        if confidence <= float(self.confidence(0.0)):
            return 0.0
        if confidence > float(self.confidence(1.0)):
            return float("inf")
        above = np.log(confidence / (1.0 - confidence)) - self.offset  # what z has to bring, above 0 here
        z = 2.0 * above / (self.scale + np.sqrt(self.scale**2 + 4.0 * self.curve * above))
        return float(np.tanh(z / 2))


class Calibration(msgspec.Struct, frozen=True):
    """A network's calibration by the width of the last segment. `split` is that of the images it was fitted on."""

    by_width: dict[Width, Logistic]
    split: str

    def confidence(self, width: Width, margin: float) -> float:
        return self.by_width[width].confidence_of(margin)

    def margin(self, width: Width, confidence: float) -> float:
        return self.by_width[width].margin(confidence)


def log_ratio(margins: npt.ArrayLike) -> Floats:
    """log((1 + margin) / (1 - margin)) of margins in [0, 1]."""
    m = np.minimum(np.asarray(margins, dtype=np.float64), CLOSEST_TO_ONE)
    return np.asarray(np.log1p(m) - np.log1p(-m))


def calibration_error(confidence: Floats, right: npt.NDArray[np.bool_]) -> float:
    """Expected calibration error in [0, 1]: the mean distance of confidence and share of right answers over bins of
    equal width, each weighted by its answers (Guo et al. 2017, eq. 3)."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidence - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(right))


def calibration_errors(
    calibration: Calibration,
    right: Mapping[WidthTuple, npt.NDArray[np.bool_]],
    margins: Mapping[WidthTuple, npt.NDArray[np.float16]],
) -> dict[WidthTuple, float]:
    """The error of every width tuple."""
    return {
        widths: calibration_error(calibration.by_width[widths[-1]].confidence(margins[widths]), right[widths])
        for widths in right
    }
