"""O in two parts: as returned, and what it lacks of the unrounded O, in whole units that go with O's exponent.

Both directions run once an element of O, so each takes few instructions. Integers of a byte or two need none of the
slow ones that convert between FP32 and integers: an FP32 number near 1.5·2²³ holds a whole number in its last bits.
"""

import triton
import triton.language as tl

from flashpoint_kernels.addressing import token_offsets

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
    """Return the sum of O and :func:`residual`, which is int32 here, FP32; it is exact. O stays where it is not
    finite."""
    b_out = b_out.to(tl.float32)
    unit = unit_pattern(b_out, MANTISSA).to(tl.float32, bitcast=True)
    units = (b_residual + WHOLE_BITS).to(tl.float32, bitcast=True) - TO_WHOLE
    return tl.fma(units, unit, b_out)


@triton.jit
def store_residual(ptr, b_residual, i_b, i_h, o_rows, H, T, D: tl.constexpr, BQ: tl.constexpr):
    """Store residuals [BQ, D] of the tokens of a head; those of two features share a byte where ``ptr`` is to uint8."""
    if ptr.dtype.element_ty == tl.uint8:
        b_even, b_odd = tl.split(tl.reshape(b_residual, [BQ, D // 2, 2]))
        b_residual = b_even & 15 | b_odd << 4
        o_saved = token_offsets(i_b, i_h, o_rows, H, T, D // 2)
    else:
        o_saved = token_offsets(i_b, i_h, o_rows, H, T, D)
    tl.store(ptr + o_saved, b_residual.to(ptr.dtype.element_ty), mask=o_rows[:, None] < T)


@triton.jit
def load_residual(ptr, i_b, i_h, o_rows, H, T, D: tl.constexpr, BQ: tl.constexpr):
    """Return what :func:`store_residual` stored, int32; 0 past the last token."""
    if ptr.dtype.element_ty == tl.uint8:
        o_saved = token_offsets(i_b, i_h, o_rows, H, T, D // 2)
        b_pairs = tl.load(ptr + o_saved, mask=o_rows[:, None] < T, other=0).to(tl.int32)
        b_residual = tl.reshape(tl.join(b_pairs << 28 >> 28, b_pairs << 24 >> 28), [BQ, D])
    else:
        o_saved = token_offsets(i_b, i_h, o_rows, H, T, D)
        b_residual = tl.load(ptr + o_saved, mask=o_rows[:, None] < T, other=0).to(tl.int32)
    return b_residual
