"""Intervals of a few values, against numbers that are worked out by hand."""

import math

import pytest

from flashpoint.lab.analysis.intervals import ratio_interval, slope_interval


@pytest.mark.slow
def test_a_slope_through_the_origin_weighs_points_by_the_square_of_x() -> None:
    """(1·1 + 2·1) / (1² + 2²) = 0.6; its error √((0.4² + 0.2²) / 1 / 5) = 0.2, times Student's t of one, 12.7062."""
    slope, half = slope_interval([1, 2], [1, 1])
    assert slope == pytest.approx(0.6)
    assert half == pytest.approx(0.2 * 12.7062, rel=1e-5)
    assert slope_interval([4], [2]) == (0.5, None)


def test_a_mean_ratio_is_the_same_from_both_sides() -> None:
    """ln 1 and ln 4: mean ln 2, error ln 2, times Student's t of one, 12.7062."""
    mean, ends = ratio_interval([1, 4])
    assert mean == pytest.approx(2)
    assert ends == pytest.approx((2 ** (1 - 12.7062), 2 ** (1 + 12.7062)), rel=1e-4)
    inverse, inverse_ends = ratio_interval([1, 1 / 4])
    assert ends is not None
    assert inverse == pytest.approx(1 / mean)
    assert inverse_ends == pytest.approx((1 / ends[1], 1 / ends[0]))
    mean, alone = ratio_interval([3])
    assert (alone, math.isclose(mean, 3)) == (None, True)
