"""The one way in which kernels round, and the operands they hand to the matrix units.

Triton's interpreter truncates where a GPU rounds to nearest even and computes BF16 on bit patterns, so there the
rounding is done by bits and products take FP32 operands, which hold the same BF16 values.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

NONE = tl.constexpr(0)
NEAREST = tl.constexpr(1)
STOCHASTIC = tl.constexpr(2)


@triton.jit
def round_nearest(x):
    """FP32 to BF16 values to nearest even, kept in FP32."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x != x, x, bits.to(tl.uint32).to(tl.float32, bitcast=True))
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_stochastic(x, noise):
    """FP32 to BF16 values with the upper 16 bits of ``noise`` as the offset; infinities and NaN stay."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise >> 16)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded)


@triton.jit
def noise_words(noise_ptr, layer_and_stream, block, head_number, rows, columns):
    """Philox4x32-10 words of a tile [R, C]; the key is (seed, step), the counter is the position."""
    seed = tl.load(noise_ptr).to(tl.uint64) | (tl.load(noise_ptr + 1).to(tl.uint64) << 32)
    zeros = tl.zeros_like(rows)[:, None] + tl.zeros_like(columns)[None, :]
    c0 = (rows[:, None] + zeros).to(tl.uint32)
    c1 = (columns[None, :] + zeros).to(tl.uint32)
    c2 = (head_number + zeros).to(tl.uint32)
    c3 = ((layer_and_stream | (block << 16)) + zeros).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, c0, c1, c2, c3, n_rounds=10)
    return word


@triton.jit
def round_point(x, MODE: tl.constexpr, noise_ptr, layer_and_stream, block, head_number, rows, columns):
    """A tile [R, C] rounded as a variant's rounding point says."""
    if MODE == NEAREST:
        x = round_nearest(x)
    elif MODE == STOCHASTIC:
        x = round_stochastic(x, noise_words(noise_ptr, layer_and_stream, block, head_number, rows, columns))
    return x


@triton.jit
def product(a, b, MODE: tl.constexpr):
    """a·b accumulated in FP32. Under a rounding ``MODE`` ``a`` holds BF16 values; ``b`` holds them always."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if MODE == NONE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(tl.bfloat16), b)


@triton.jit
def load_operand(pointers, mask, MASKED: tl.constexpr):
    """BF16 from memory as an operand of the matrix units; MASKED: 0 where ``mask`` is false."""
    x = tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def exponential(x, shift, FUSED: tl.constexpr):
    """exp(x − shift) in FP32: the difference first, or one fused multiply-add as production kernels have it."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if FUSED:
        return tl.exp2(tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), -(shift * LOG2E) + tl.zeros_like(x)))
    return tl.exp2((x - shift) * LOG2E)


@triton.jit
def to_dtype_of(x, ptr):
    """FP32 in the dtype that ``ptr`` points at, to nearest even."""
    if ptr.dtype.element_ty == tl.bfloat16:
        x = round_nearest(x)
    return x.to(ptr.dtype.element_ty)
