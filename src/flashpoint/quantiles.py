"""Quantiles of Student's t and of F, and the exact interval of a rate, from the incomplete beta function.

SciPy has both. It is no dependency of this layer: it takes 100 MB and a second to import.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

CONFIDENCE = 0.95
_NEARLY_NORMAL = 10_000
"""Degrees of freedom from which on an expansion about the normal distribution has twelve digits."""
_TINY = 1e-300


@lru_cache(maxsize=4096)
def student_t_isf(probability: float, degrees: int) -> float:
    """Return the value that Student's t exceeds with this probability, above 0 and up to a half; ten digits."""
    normal = -NormalDist().inv_cdf(probability)
    if degrees >= _NEARLY_NORMAL:
        return normal + sum(_expansion(normal, degrees))
    if probability == 0.5:
        return 0.0
    # The logarithm of the tail is concave in that of t: Newton's method converges from either side.
    t = normal
    for _ in range(100):
        tail = regularized_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
        density = math.exp(
            math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - (degrees + 1) / 2 * math.log1p(t * t / degrees)
        ) / math.sqrt(degrees * math.pi)
        step = math.log(tail / probability) * tail / (t * density)
        t *= math.exp(step)
        if abs(step) < 1e-13:
            break
    return t


def _expansion(z: float, degrees: int) -> tuple[float, ...]:
    """Return the first terms of Cornish and Fisher for Student's t, in powers of 1 / ``degrees``."""
    return (
        (z**3 + z) / (4 * degrees),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3),
    )


@lru_cache(maxsize=4096)
def variance_ratio_isf(probability: float, degrees: int, below: int) -> float:
    """Return the value that F exceeds with this probability, above 0 and below 1; nine digits.

    F is the ratio of two estimates of one variance, of ``degrees`` and of ``below`` degrees of freedom, 1 or more each.
    """
    share = _beta_quantile(probability, below / 2, degrees / 2)
    return below * (1 - share) / (degrees * share)


def clopper_pearson(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval, from 0 to 1, of the rate at which ``count`` of ``of`` happened (exact binomial)."""
    return _low(count, total), 1 - _low(total - count, total)


def _low(count: int, total: int) -> float:
    """Return the rate under which so many, or more, happen with a probability of 2.5 %."""
    return _beta_quantile((1 - CONFIDENCE) / 2, count, total - count + 1) if count else 0.0


def _beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the x at which I_x(a, b) is this probability.

    The logarithm of I is concave in the logit of x: Newton's method converges from either side, and a step to where I
    is too small for a number is halved.
    """
    low, logit, high = -math.inf, math.log(a / b), math.inf
    for _ in range(100):
        x, rest = 1 / (1 + math.exp(-logit)), 1 / (1 + math.exp(logit))
        below = _regularized_beta(a, b, x, rest)
        low, high = (logit, high) if below < probability else (low, logit)
        step = math.log(below / probability) * below / _front(a, b, x, rest) if below > 0 else (low - high) / 2
        logit -= step
        if abs(step) < 1e-8:  # whose square is the next
            break
    return 1 / (1 + math.exp(-logit))


def regularized_beta(a: float, b: float, x: float) -> float:
    """Return the incomplete beta function I_x(a, b)."""
    return _regularized_beta(a, b, x, 1 - x) if 0 < x < 1 else float(x >= 1)


def _regularized_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return I_x(a, b) by its continued fraction (Lentz), where ``rest`` is 1 − x."""
    if x > (a + 1) / (a + b + 2):  # where it converges slowly, that of the other tail converges fast
        return 1 - _regularized_beta(b, a, rest, x)
    numerator, denominator = 1.0, 1 / _away_from_0(1 - (a + b) * x / (a + 1))
    fraction = denominator
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / _away_from_0(1 + term * denominator)
            numerator = _away_from_0(1 + term / numerator)
            fraction *= numerator * denominator
        if abs(numerator * denominator - 1) < 1e-15:
            break
    return _front(a, b, x, rest) * fraction / a


def _front(a: float, b: float, x: float, rest: float) -> float:
    """Return the derivative of I_x(a, b) by the logit of x."""
    of_both = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log(rest) - of_both)


def _away_from_0(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
