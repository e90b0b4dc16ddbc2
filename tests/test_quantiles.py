"""Quantiles against SciPy's, which are computed in another way."""

import pytest
from scipy import stats

from flashpoint.quantiles import clopper_pearson, student_t_isf, variance_ratio_isf


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 15, 255, 5_000, 9_999, 10_000, 10**6, 10**14])
def test_quantiles_of_students_t_are_those_of_scipy(degrees: int) -> None:
    for probability in (0.5, 0.4, 0.025, 1e-3 / 2, 1e-3 / 12 / 2, 1e-3 / 128 / 2, 1e-9):
        expected = stats.t.isf(probability, degrees)
        assert student_t_isf(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("degrees", [1, 2, 5, 47, 1_000, 10_000])
@pytest.mark.parametrize("below", [1, 3, 80, 10_000])
def test_quantiles_of_a_ratio_of_variances_are_those_of_scipy(degrees: int, below: int) -> None:
    for probability in (0.4, 1e-3, 1e-3 / 6, 1e-3 / 128):
        expected = stats.f.isf(probability, degrees, below)
        assert variance_ratio_isf(probability, degrees, below) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("of", [1, 2, 4, 12, 83, 1000])
def test_the_interval_of_a_rate_is_the_exact_one_of_scipy(of: int) -> None:
    for count in {0, 1, of // 3, of - 1, of}:
        exact = stats.binomtest(count, of).proportion_ci(0.95, "exact")
        assert clopper_pearson(count, of) == pytest.approx((exact.low, exact.high), rel=1e-9, abs=1e-14)
