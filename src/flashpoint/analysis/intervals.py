"""The mean of a few values, the rate of a few outcomes, and how sure they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95


def mean_interval(values: ArrayLike) -> tuple[float, float | None]:
    """Return the mean, and half of its 95 % interval by Student's t; None for one value."""
    from scipy.stats import t

    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    half = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def clopper_pearson(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval, from 0 to 1, of the rate at which ``count`` of ``of`` happened (exact binomial)."""
    from scipy.stats import binomtest

    interval = binomtest(count, of).proportion_ci(CONFIDENCE, "exact")
    return float(interval.low), float(interval.high)
