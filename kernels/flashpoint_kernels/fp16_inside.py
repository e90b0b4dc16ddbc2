"""The passes around an attention in FP16, in eager mode: each reads a tensor once, and tells beside it what the host
wants counted. A compiled graph has PyTorch's operations instead, which its compiler fuses with their neighbours.

A tensor is read as units of WIDTH elements that lie in a row, in the order in which the result lies in memory. Unit u
is number u % n2 of a row, the rows are n1 to a group. Strides between units, rows and groups count STEP elements.

A call has STATES numbers of its own: of each of three tensors what each program found, or of dO. Behind these stand the
power of two, how many programs have ended, and how many found a number that is not finite in dQ, dK and dV.
"""

import triton
import triton.language as tl

from flashpoint_kernels import codes
from flashpoint_kernels.rounding import to_dtype_of

FACTOR_AT = tl.constexpr(codes.FACTOR_AT)
ENDED_AT = tl.constexpr(codes.FACTOR_AT + 1)
BAD_AT = tl.constexpr(codes.FACTOR_AT + 2)
CALL = tl.constexpr(codes.CALL)
FP16_MAX = tl.constexpr(codes.FP16_MAX)
INFINITE = tl.constexpr(0x7F800000)
"""Bits of an infinite FP32 number. Those of NaN without a sign are larger."""
TILE = tl.constexpr(2048)
"""Elements that a program reads at a time."""


@triton.jit
def load_units(x_ptr, first, units, n1, n2, s0, s1, s2, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Return a tile [units, WIDTH] in FP32, its units' numbers, and which of them there are."""
    o_units = first + tl.arange(0, TILE // WIDTH)
    o_rows = o_units // n2
    offsets = (o_rows // n1).to(tl.int64) * s0 + (o_rows % n1).to(tl.int64) * s1 + (o_units % n2).to(tl.int64) * s2
    m_units = (o_units < units)[:, None]
    pointers = x_ptr + (offsets * STEP)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=m_units, other=0.0).to(tl.float32), o_units, m_units


@triton.jit
def store_units(out_ptr, x, o_units, m_units, WIDTH: tl.constexpr):
    pointers = out_ptr + (o_units.to(tl.int64) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers, to_dtype_of(x, out_ptr), mask=m_units)


@triton.jit
def magnitude(x):
    """Return the bits of |x|, which are ordered as the numbers are, and NaN behind them."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of(tile):
    return tl.max(tl.max(tile, 1), 0)


@triton.jit
def store_found(state_ptr, place, bits):
    tl.store(state_ptr + place, bits.to(tl.float32, bitcast=True))


@triton.jit
def load_found(state_ptr, which, PROGRAMS: tl.constexpr):
    """Return the bits of the largest magnitude that programs found in a tensor."""
    found = tl.load(state_ptr + which * PROGRAMS + tl.arange(0, PROGRAMS))
    return tl.max(magnitude(found), 0)


@triton.jit
def cast_to_fp16(
    x_ptr, out_ptr, state_ptr, which, program, units, n1, n2, s0, s1, s2,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = TILE // WIDTH
    largest = tl.zeros([UNITS, WIDTH], tl.int32)
    for first in range(program * UNITS, units, PROGRAMS * UNITS):
        b_x, o_units, m_units = load_units(x_ptr, first, units, n1, n2, s0, s1, s2, WIDTH, STEP)
        largest = tl.maximum(largest, magnitude(b_x))
        b_x = tl.where(b_x > FP16_MAX, FP16_MAX, tl.where(b_x < -FP16_MAX, -FP16_MAX, b_x))  # NaN stays
        store_units(out_ptr, b_x, o_units, m_units, WIDTH)
    store_found(state_ptr, which * PROGRAMS + program, largest_of(largest))


@triton.jit(do_not_specialize=[
    "units_q", "n1_q", "n2_q", "s0_q", "s1_q", "s2_q",
    "units_k", "n1_k", "n2_k", "s0_k", "s1_k", "s2_k",
    "units_v", "n1_v", "n2_v", "s0_v", "s1_v", "s2_v",
])  # fmt: skip
def to_fp16_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, state_ptr,
    units_q, n1_q, n2_q, s0_q, s1_q, s2_q,
    units_k, n1_k, n2_k, s0_k, s1_k, s2_k,
    units_v, n1_v, n2_v, s0_v, s1_v, s2_v,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store q, k and v in FP16, what is beyond it as its largest number, and the largest |x| of each program."""
    i = tl.program_id(0)
    # Programs that have a tile more than others of q are not those of k and v.
    i_k, i_v = (i + PROGRAMS // 3) % PROGRAMS, (i + 2 * PROGRAMS // 3) % PROGRAMS
    cast_to_fp16(
        q_ptr, q_out_ptr, state_ptr, 0, i, units_q, n1_q, n2_q, s0_q, s1_q, s2_q,
        PROGRAMS, WIDTH, STEP,
    )  # fmt: skip
    cast_to_fp16(
        k_ptr, k_out_ptr, state_ptr, 1, i_k, units_k, n1_k, n2_k, s0_k, s1_k, s2_k,
        PROGRAMS, WIDTH, STEP,
    )  # fmt: skip
    cast_to_fp16(
        v_ptr, v_out_ptr, state_ptr, 2, i_v, units_v, n1_v, n2_v, s0_v, s1_v, s2_v,
        PROGRAMS, WIDTH, STEP,
    )  # fmt: skip


@triton.jit
def beyond_fp16(state_ptr, PROGRAMS: tl.constexpr):
    """Return how many of q, k and v held a number beyond FP16, int64; a tensor that holds NaN is none of them."""
    count = tl.zeros([], tl.int64)
    for which in tl.static_range(3):
        bits = load_found(state_ptr, which, PROGRAMS)
        count += ((bits <= INFINITE) & (bits.to(tl.float32, bitcast=True) > FP16_MAX)).to(tl.int64)
    return count


@triton.jit(do_not_specialize=["units", "n1", "n2", "s0", "s1", "s2"])
def from_fp16_kernel(
    x_ptr, out_ptr, state_ptr, counted_ptr, units, n1, n2, s0, s1, s2,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Store O in another dtype, and count the call and what :func:`to_fp16_kernel` found beyond FP16."""
    UNITS: tl.constexpr = TILE // WIDTH
    i = tl.program_id(0)
    for first in range(i * UNITS, units, PROGRAMS * UNITS):
        b_x, o_units, m_units = load_units(x_ptr, first, units, n1, n2, s0, s1, s2, WIDTH, STEP)
        store_units(out_ptr, b_x, o_units, m_units, WIDTH)
    if COUNTS:
        is_first = i == 0
        if is_first:
            tl.atomic_add(counted_ptr, beyond_fp16(state_ptr, PROGRAMS) + CALL)


@triton.jit(do_not_specialize=["units", "n1", "n2", "s0", "s1", "s2"])
def largest_kernel(
    x_ptr, state_ptr, units, n1, n2, s0, s1, s2, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Store the largest |x| of each program."""
    UNITS: tl.constexpr = TILE // WIDTH
    i = tl.program_id(0)
    largest = tl.zeros([UNITS, WIDTH], tl.int32)
    for first in range(i * UNITS, units, PROGRAMS * UNITS):
        b_x, _, _ = load_units(x_ptr, first, units, n1, n2, s0, s1, s2, WIDTH, STEP)
        largest = tl.maximum(largest, magnitude(b_x))
    store_found(state_ptr, i, largest_of(largest))


@triton.jit
def power_of_two(bits, tokens):
    """Return the bits of the largest power of two by which tokens·max|dO| stays below 2¹⁵, of the bits of max|dO|."""
    size = bits.to(tl.float32, bitcast=True) * tokens
    size_bits = size.to(tl.int32, bitcast=True)
    none = (size_bits == 0) | (size_bits >= INFINITE)
    exponent = tl.where(none, 127 + 14, size_bits >> 23)  # 2^(exponent - 127) ≤ size < 2^(exponent - 126)
    return tl.minimum(2 * 127 + 14 - exponent, 127 + 126) << 23


@triton.jit(do_not_specialize=["tokens", "units", "n1", "n2", "s0", "s1", "s2"])
def scale_kernel(
    x_ptr, out_ptr, state_ptr, tokens, units, n1, n2, s0, s1, s2,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store dO times the power of two that follows from what :func:`largest_kernel` found, and that power."""
    UNITS: tl.constexpr = TILE // WIDTH
    i = tl.program_id(0)
    factor = power_of_two(load_found(state_ptr, 0, PROGRAMS), tokens.to(tl.float32)).to(tl.float32, bitcast=True)
    for first in range(i * UNITS, units, PROGRAMS * UNITS):
        b_x, o_units, m_units = load_units(x_ptr, first, units, n1, n2, s0, s1, s2, WIDTH, STEP)
        store_units(out_ptr, b_x * factor, o_units, m_units, WIDTH)
    if i == 0:
        tl.store(state_ptr + FACTOR_AT, factor)
        tl.store(state_ptr + ENDED_AT + tl.arange(0, 4), tl.zeros([4], tl.float32))


@triton.jit
def divide_units(
    x_ptr, out_ptr, state_ptr, which, program, inverse, units, n1, n2, s0, s1, s2,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = TILE // WIDTH
    largest = tl.zeros([UNITS, WIDTH], tl.int32)
    for first in range(program * UNITS, units, PROGRAMS * UNITS):
        b_x, o_units, m_units = load_units(x_ptr, first, units, n1, n2, s0, s1, s2, WIDTH, STEP)
        largest = tl.maximum(largest, magnitude(b_x))
        store_units(out_ptr, b_x * inverse, o_units, m_units, WIDTH)
    if largest_of(largest) >= INFINITE:
        tl.atomic_add(state_ptr + BAD_AT + which, 1.0)


@triton.jit
def all_ended(state_ptr, PROGRAMS: tl.constexpr):
    """Whether this program is the last that ends: it sees what the others found."""
    return tl.atomic_add(state_ptr + ENDED_AT, 1.0) == PROGRAMS - 1


@triton.jit
def overflowed(state_ptr):
    """Return 1 where programs found a number that is not finite in dQ or dK, and none in dV, int64."""
    bad_q, bad_k = tl.atomic_add(state_ptr + BAD_AT, 0.0), tl.atomic_add(state_ptr + BAD_AT + 1, 0.0)
    bad_v = tl.atomic_add(state_ptr + BAD_AT + 2, 0.0)
    return ((bad_v == 0) & (bad_q + bad_k > 0)).to(tl.int64)


@triton.jit(do_not_specialize=[
    "units_q", "n1_q", "n2_q", "s0_q", "s1_q", "s2_q",
    "units_k", "n1_k", "n2_k", "s0_k", "s1_k", "s2_k",
    "units_v", "n1_v", "n2_v", "s0_v", "s1_v", "s2_v",
])  # fmt: skip
def divide_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, state_ptr, counted_ptr,
    units_q, n1_q, n2_q, s0_q, s1_q, s2_q,
    units_k, n1_k, n2_k, s0_k, s1_k, s2_k,
    units_v, n1_v, n2_v, s0_v, s1_v, s2_v,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Store dQ, dK and dV divided by the power of two, and count the call and whether dQ or dK overflowed."""
    i = tl.program_id(0)
    i_k, i_v = (i + PROGRAMS // 3) % PROGRAMS, (i + 2 * PROGRAMS // 3) % PROGRAMS
    factor = tl.load(state_ptr + FACTOR_AT).to(tl.int32, bitcast=True)
    inverse = ((2 * 127 << 23) - factor).to(tl.float32, bitcast=True)  # of a power of two it is exact
    divide_units(
        q_ptr, q_out_ptr, state_ptr, 0, i, inverse, units_q, n1_q, n2_q, s0_q, s1_q, s2_q,
        PROGRAMS, WIDTH, STEP,
    )  # fmt: skip
    divide_units(
        k_ptr, k_out_ptr, state_ptr, 1, i_k, inverse, units_k, n1_k, n2_k, s0_k, s1_k, s2_k,
        PROGRAMS, WIDTH, STEP,
    )  # fmt: skip
    divide_units(
        v_ptr, v_out_ptr, state_ptr, 2, i_v, inverse, units_v, n1_v, n2_v, s0_v, s1_v, s2_v,
        PROGRAMS, WIDTH, STEP,
    )  # fmt: skip
    if COUNTS:
        is_last = all_ended(state_ptr, PROGRAMS)
        if is_last:
            tl.atomic_add(counted_ptr, overflowed(state_ptr) + CALL)
