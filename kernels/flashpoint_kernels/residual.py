"""O in two parts: as returned, and what it lacks of the unrounded O, in whole units that go with O's exponent.

Both directions run once an element of O, so each takes few instructions. Integers of a byte or two need none of the
slow ones that convert between FP32 and integers. An FP32 number near 1.5·2²³ holds a whole number in its last bits.
"""

import triton
import triton.language as tl

TO_WHOLE = tl.constexpr(12582912.0)
"""1.5·2²³: FP32 numbers of that size are whole."""
WHOLE_BITS = tl.constexpr(0x4B400000)
"""TO_WHOLE as a pattern; that of TO_WHOLE + n is n more."""
EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def unit_pattern(b_out, MANTISSA: tl.constexpr):
    """Return the last place of MANTISSA mantissa bits at O, which is 2^-126 at least, as the pattern of its FP32."""
    return tl.maximum(b_out.to(tl.int32, bitcast=True) & EXPONENT, (MANTISSA + 1) << 23) - (MANTISSA << 23)


@triton.jit
def residual(b_unrounded, b_out, MANTISSA: tl.constexpr):
    """Return what O lacks of the unrounded O in units, to nearest even, int16; of no meaning where O is not finite."""
    per_unit = ((254 << 23) - unit_pattern(b_out, MANTISSA)).to(tl.float32, bitcast=True)
    whole = tl.fma(b_unrounded - b_out, per_unit, tl.full(b_out.shape, TO_WHOLE, tl.float32))
    return whole.to(tl.int32, bitcast=True).to(tl.int16)  # WHOLE_BITS has no bit there


@triton.jit
def two_parts(b_out, b_residual, MANTISSA: tl.constexpr):
    """Return the sum of O and :func:`residual`, FP32; it is exact. O stays where it is not finite."""
    b_out = b_out.to(tl.float32)
    unit = unit_pattern(b_out, MANTISSA).to(tl.float32, bitcast=True)
    units = (b_residual.to(tl.int32) + WHOLE_BITS).to(tl.float32, bitcast=True) - TO_WHOLE
    return tl.fma(units, unit, b_out)
