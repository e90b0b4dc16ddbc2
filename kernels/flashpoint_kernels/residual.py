"""O in two parts: as returned, and what it lacks of the unrounded O, in whole units that go with O's exponent."""

import triton
import triton.language as tl

TO_WHOLE = tl.constexpr(12582912.0)
"""1.5·2²³: FP32 numbers of that size are whole."""


@triton.jit
def unit_exponent(b_out, MANTISSA: tl.constexpr):
    """Return the biased exponent of the last place of MANTISSA mantissa bits at O, which is 1 (2^-126) at least."""
    exponent = (b_out.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return tl.maximum(exponent, MANTISSA + 1) - MANTISSA


@triton.jit
def residual(b_unrounded, b_out, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Return what O lacks of the unrounded O in units, to nearest even, at most LARGEST; 0 where it is not a number."""
    per_unit = ((254 - unit_exponent(b_out, MANTISSA)) << 23).to(tl.float32, bitcast=True)
    units = (b_unrounded - b_out) * per_unit
    units = tl.where(units != units, 0.0, units)
    units = tl.minimum(tl.maximum(units, -LARGEST * 1.0), LARGEST * 1.0)
    return (units + TO_WHOLE) - TO_WHOLE


@triton.jit
def two_parts(b_out, b_residual, MANTISSA: tl.constexpr):
    """Return the sum of O and :func:`residual`, FP32; it is exact."""
    b_out = b_out.to(tl.float32)
    unit = (unit_exponent(b_out, MANTISSA) << 23).to(tl.float32, bitcast=True)
    return b_out + b_residual.to(tl.float32) * unit
