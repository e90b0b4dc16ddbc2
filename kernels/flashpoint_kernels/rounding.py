"""The one way in which kernels round, exponentiate and divide, and the operands they hand to the matrix units.

Triton's interpreter truncates where a GPU rounds to nearest even, and computes BF16 on bit patterns. So there the
rounding is done by bits, and products take FP32 operands, which hold the same BF16 values. PTX is for NVIDIA's GPUs: on
others the rounding is done by bits, too.
"""

import os
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from flashpoint_kernels import codes

BF16_BITS = tl.constexpr(codes.BF16_BITS)
STREAM_UNIT = tl.constexpr(codes.STREAM_UNIT)
BLOCK_UNIT = tl.constexpr(codes.BLOCK_UNIT)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)


class Noise(NamedTuple):
    """Where random bits come from, for one head of all sequences in one layer."""

    key_ptr: tl.tensor
    """Seed and step, int64."""
    layer: tl.tensor
    head: tl.tensor


@triton.jit
def round_nearest(x, BITS: tl.constexpr):
    """Round FP32 to values with BITS mantissa bits, to nearest even, kept in FP32."""
    if INTERPRETED or BITS != BF16_BITS or not is_cuda():
        DISCARDED: tl.constexpr = 23 - BITS
        pattern = x.to(tl.uint32, bitcast=True)
        odd = (pattern >> DISCARDED) & 1
        rounded = (pattern + ((1 << (DISCARDED - 1)) - 1) + odd) & (0xFFFFFFFF - ((1 << DISCARDED) - 1))
        x = tl.where(x != x, x, rounded.to(tl.uint32).to(tl.float32, bitcast=True))
    else:
        # Two at a time: the conversion of a single value runs on the slow unit that exponentials need.
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xFFFF0000;
            }""",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x


@triton.jit
def round_stochastic(x, noise, BITS: tl.constexpr):
    """Round FP32 to values with BITS mantissa bits; the upper bits of ``noise``, as many as go, are the offset.

    Infinities and NaN stay.
    """
    DISCARDED: tl.constexpr = 23 - BITS
    pattern = x.to(tl.uint32, bitcast=True)
    rounded = (pattern + (noise >> (32 - DISCARDED))) & (0xFFFFFFFF - ((1 << DISCARDED) - 1))
    rounded = rounded.to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where((pattern & 0x7F800000) == 0x7F800000, x, rounded)


@triton.jit
def noise_words(noise, STREAM: tl.constexpr, block, rows, columns):
    """Return Philox4x32-10 words of a tile; the key is (seed, step), 32 bits of each; the counter is the position.

    ``rows`` and ``columns`` broadcast to the tile: [R, 1] and [1, C], or [1, R] and [C, 1].
    """
    layer_and_stream = noise.layer | (STREAM * STREAM_UNIT)
    # Of a wider seed the upper bits would hide some of the step's.
    seed = (tl.load(noise.key_ptr).to(tl.uint64) & 0xFFFFFFFF) | (tl.load(noise.key_ptr + 1).to(tl.uint64) << 32)
    zeros = rows * 0 + columns * 0
    c0 = (rows + zeros).to(tl.uint32)
    c1 = (columns + zeros).to(tl.uint32)
    c2 = (noise.head + zeros).to(tl.uint32)
    c3 = ((layer_and_stream | (block * BLOCK_UNIT)) + zeros).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, c0, c1, c2, c3, n_rounds=10)
    return word


@triton.jit
def round_point(x, POINT: tl.constexpr, noise, block, rows, columns):
    """Return a tile rounded as a variant's rounding point says, in FP32."""
    if POINT.mode == "nearest":
        x = round_nearest(x, POINT.bits)
    elif POINT.mode == "stochastic":
        words = noise_words(noise, POINT.stream, block, rows, columns)
        x = round_stochastic(x, words, POINT.bits)
    return x


@triton.jit
def as_operand(x, POINT: tl.constexpr, noise, rows, columns):
    """Return a tile rounded as a rounding point says and ready for :func:`product`: BF16, or FP32 where it does not
    fit."""
    if INTERPRETED or POINT.mode == "stochastic" or POINT.bits != BF16_BITS:
        x = round_point(x, POINT, noise, 0, rows, columns)
    return x if INTERPRETED or POINT.mode == "none" or POINT.bits > BF16_BITS else x.to(tl.bfloat16)


@triton.jit
def product(a, b, acc):
    """Return acc + a·b, accumulated in FP32. ``b`` holds BF16 values; ``a`` is BF16, or FP32 and then all of it
    counts."""
    if a.dtype == b.dtype:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def in_registers(x):
    """The same BF16 tile, held in registers through a loop: the matrix units then read one operand less per step."""
    if not INTERPRETED and is_cuda():
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    return x


@triton.jit
def exponential(x, shift, UNIT: tl.constexpr):
    """Return exp((x − shift)·UNIT). The difference comes first: at the shift it is exactly 1, which one fused
    multiply-add, as production kernels have it, is not."""
    FACTOR: tl.constexpr = UNIT * LOG2E
    return tl.exp2((x - shift) * FACTOR)


@triton.jit
def divide(x, divisor):
    """Return x [R, C] / divisor [R, 1] to nearest even, but for subnormal intermediates.

    One division a row and two multiply-adds an element (Markstein 1990): the remainder of a first quotient is exact.
    Where the reciprocal overflows, of a divisor of at most 2^-128, the result is NaN.
    """
    reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    quotient = x * reciprocal
    remainder = tl.fma(-quotient, divisor + tl.zeros_like(x), x)
    return tl.fma(remainder, reciprocal + tl.zeros_like(x), quotient)


@triton.jit
def to_dtype_of(x, ptr):
    """Cast FP32 to the dtype that ``ptr`` points at, to nearest even."""
    if INTERPRETED and ptr.dtype.element_ty == tl.bfloat16:
        x = round_nearest(x, 7)  # BF16_BITS, which the interpreter cannot shift by
    return x.to(ptr.dtype.element_ty)
