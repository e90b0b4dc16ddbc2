"""The mean of a few values, the slope through a few points, and how sure they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flashpoint.quantiles import CONFIDENCE, student_t_isf


def mean_interval(values: ArrayLike) -> tuple[float, float | None]:
    """Return the mean, and half of its 95 % interval by Student's t; None for one value."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), _half(values.std(ddof=1) / np.sqrt(len(values)), len(values))


def ratio_interval(ratios: ArrayLike) -> tuple[float, tuple[float, float] | None]:
    """Return the geometric mean of positive ratios and its 95 % interval, by Student's t of their logarithms; None for
    one ratio. It is the same whichever of the two values is the divisor."""
    middle, half = mean_interval(np.log(np.asarray(ratios, np.float64)))
    ends = None if half is None else (float(np.exp(middle - half)), float(np.exp(middle + half)))
    return float(np.exp(middle)), ends


def slope_interval(x: ArrayLike, y: ArrayLike) -> tuple[float, float | None]:
    """Return the slope of y over x through the origin, by least squares, and half of its 95 % interval.

    The errors of y are taken to be as large at every x: where x is small, y / x says little. None for one point.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    square = float((x * x).sum())
    slope = float((x * y).sum()) / square
    if len(x) < 2:
        return slope, None
    return slope, _half(np.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 1) / square), len(x))


def _half(error: float, count: int) -> float:
    """Return half of the 95 % interval of an estimate from so many values, by Student's t."""
    return student_t_isf((1 - CONFIDENCE) / 2, count - 1) * error
