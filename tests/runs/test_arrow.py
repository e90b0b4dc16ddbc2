"""Metrics and chains as rows of tables: what goes in comes out."""

import math

import numpy as np
import pytest

from flashpoint.runs.arrow import digits_of, metrics_of, metrics_table, to_few_bits, to_few_digits
from flashpoint.runs.metrics import Columns


def decimals(count: int) -> np.ndarray:
    """Random six-digit decimals of any size, as Python's parser reads them."""
    random = np.random.default_rng(0)
    digits, exponents = random.integers(-999_999, 1_000_000, count), random.integers(-300, 300, count)
    return np.array([float(f"{digit}e{exponent}") for digit, exponent in zip(digits, exponents, strict=True)])


@pytest.mark.parametrize(
    "values",
    [
        decimals(20_000),
        np.array([float(f"{digits}e-3") for digits in range(100_000, 1_000_000, 7)]),
        np.array([float(f"{digits}e{exponent}") for exponent in range(-30, 30) for digits in (1, 100_001, 999_999)]),
        np.array([0.0, -0.0, math.nan, math.inf, -math.inf]),
    ],
    ids=["any size", "one size", "ends of a decade", "special"],
)
def test_six_digits_survive_in_half_the_bits(values: np.ndarray) -> None:
    stored = to_few_bits(values)
    assert not np.any(stored[np.isfinite(stored)].view(np.uint64) & np.uint64(0xFFFF_FFFF))
    read = to_few_digits(stored)
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(np.signbit(read), np.signbit(values))


def test_rounding_to_six_digits_is_that_of_python() -> None:
    values = np.random.default_rng(1).standard_normal(20_000) * 10.0 ** np.arange(20_000).clip(0, 20)
    assert to_few_digits(values).tolist() == [float(f"{value:.6g}") for value in values]


def test_a_value_with_more_digits_is_kept_with_all() -> None:
    few: Columns = {"loss": (np.array([0, 5]), np.array([0.123456, 1e-9]))}
    more: Columns = {**few, "lr": (np.array([0]), np.array([1 / 3]))}
    assert (digits_of(few), digits_of(more)) == (6, 17)
    for columns in (few, more):
        table = metrics_table("run", columns, digits_of(columns))
        assert {name: values.tolist() for name, (_, values) in metrics_of(table, digits_of(columns)).items()} == {
            name: values.tolist() for name, (_, values) in columns.items()
        }


def test_metrics_of_heads_keep_their_layout() -> None:
    norms = np.arange(24.0).reshape(2, 3, 4)
    norms[1, 2, 3] = math.nan
    columns: Columns = {
        "loss": (np.array([0, 1, 2]), np.array([3.0, math.inf, 1.0])),
        "norm": (np.array([1, 2, 8, 9]), norms),
    }
    read = metrics_of(metrics_table("run", columns, 6), 6)
    assert list(read) == ["loss", "norm"]
    for name, (steps, values) in columns.items():
        assert read[name][0].dtype == np.int64
        np.testing.assert_array_equal(read[name][0], steps)
        np.testing.assert_array_equal(read[name][1], values)
        assert read[name][1].flags.c_contiguous
