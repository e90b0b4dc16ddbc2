"""Emulated formats against ml_dtypes and NumPy, bit for bit."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.deviation.formats import FORMATS, Format, format_named

ORACLES = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def rounded(x: np.ndarray, one: Format) -> np.ndarray:
    return one.round(torch.from_numpy(np.ascontiguousarray(x, np.float64))).numpy()


def assert_equal(x: np.ndarray, name: str) -> None:
    """As the oracle rounds, signs of zeros included. Values have at most FP32's bits: a cast by way of FP32 is one."""
    with np.errstate(over="ignore"):
        expected = x.astype(np.float32).astype(ORACLES[name]).astype(np.float64)
    found = rounded(x, FORMATS[name])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found)[~np.isnan(found)], np.signbit(expected)[~np.isnan(found)])


def every(name: str) -> np.ndarray:
    """Every number of a format of two bytes or fewer, NaN and infinities left out, in order."""
    kind = np.dtype(ORACLES[name])
    patterns = np.arange(1 << 8 * kind.itemsize).astype(_INTEGERS[kind.itemsize])
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = patterns.view(kind).astype(np.float64)
    return np.unique(numbers[np.isfinite(numbers)])


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_every_number_is_its_own_rounding_and_ties_and_their_neighbours_go_where_the_oracle_sends_them(
    name: str,
) -> None:
    numbers = every(name)
    assert_equal(numbers, name)
    between = (numbers[1:] + numbers[:-1]) / 2
    for x in (between, np.nextafter(np.float32(between), np.inf), np.nextafter(np.float32(between), -np.inf)):
        assert_equal(np.float64(x), name)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2"])
def test_every_fp16_number_rounds_as_the_oracle_rounds_it(name: str) -> None:
    assert_equal(every("fp16"), name)


@pytest.mark.parametrize("name", ORACLES)
def test_overflow_underflow_infinities_and_nan(name: str) -> None:
    largest, tiny = FORMATS[name].largest, FORMATS[name].ulp(torch.zeros(1, dtype=torch.float64)).item()
    half = FORMATS[name].ulp(torch.tensor([largest], dtype=torch.float64)).item() / 2
    x = np.array([largest, largest + half / 2, largest + half, largest + 2 * half, 2e38, tiny, tiny / 2, 0.0])
    with np.errstate(over="ignore"):
        x = np.float64(np.float32(np.concatenate([x, [np.inf, np.nan], [0.75 * tiny] if name != "fp32" else []])))
    assert_equal(np.concatenate([x, -x]), name)


def test_fp64_rounds_to_fp16_and_fp32_in_one_step() -> None:
    """Values just beside a tie, which a cast by way of another format would round twice."""
    x = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-11 - 2.0**-40, 1 + 2.0**-24 + 2.0**-50, 2.0**-25 + 2.0**-70])
    np.testing.assert_array_equal(rounded(x, FORMATS["fp16"]), x.astype(np.float16).astype(np.float64))
    np.testing.assert_array_equal(rounded(x, FORMATS["fp32"]), x.astype(np.float32).astype(np.float64))


@pytest.mark.parametrize(("name", "like"), [("m7", "bf16"), ("m10", "tf32"), ("m23", "fp32")])
def test_a_mantissa_width_is_the_format_of_that_width(name: str, like: str) -> None:
    x = np.random.default_rng(0).standard_normal(5000) * np.exp2(np.arange(5000) % 300 - 150.0)
    np.testing.assert_array_equal(rounded(x, format_named(name)), rounded(x, FORMATS[like]))


@pytest.mark.parametrize("bits", [1, 24, 50, 51, 52])
def test_any_width_rounds_to_the_nearest_number_with_so_many_bits(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(1000)
    fraction, exponent = np.frexp(x)
    expected = np.ldexp(np.rint(np.ldexp(fraction, bits + 1)), exponent - bits - 1)
    np.testing.assert_array_equal(rounded(x, format_named(f"m{bits}")), expected)


def test_limits_are_those_of_the_standards() -> None:
    for name, largest, smallest in (
        ("fp32", float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)),
        ("fp16", 65504.0, 2.0**-24),
        ("e4m3", 448.0, 2.0**-9),
        ("e5m2", 57344.0, 2.0**-16),
    ):
        assert FORMATS[name].largest == largest
        assert FORMATS[name].ulp(torch.zeros(1, dtype=torch.float64)).item() == smallest
    assert FORMATS["bf16"].ulp(torch.tensor([1.0, -1.99, 2.0, math.inf], dtype=torch.float64)).tolist() == [
        2.0**-7, 2.0**-7, 2.0**-6, 2.0**120,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["bf8", "m0", "m53", "m", "M7"])
def test_an_unknown_format_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}: no such format; give one of fp64, .* or m1 to m52"):
        format_named(name)
