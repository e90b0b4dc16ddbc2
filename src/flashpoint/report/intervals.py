"""The mean of a few values, and how sure it is."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95


def mean_interval(values: ArrayLike) -> tuple[float, float | None]:
    """Mean, and half of its 95 % interval by Student's t; None for one value."""
    from scipy.stats import t

    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    half = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)
