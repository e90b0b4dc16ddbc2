"""A tile of scores, and what a softmax asks of it.

Scores that round to nearest and fit BF16 can stay packed, two to a word: maxima and ties are then found two at a time.
Every function here takes either form; ``PACKED`` says which.
"""

import triton
import triton.language as tl

from flashpoint_kernels.rounding import BF16_BITS, LOG2E, exponential, product, round_point


@triton.jit
def tile_scores(
    a, b, rows, columns, T, noise, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Return S of one tile, a·b, rounded; MASKED: −inf where the query does not see the key.

    ``rows`` (queries) and ``columns`` (keys) broadcast to the tile, whichever of them is first. PACKED: [R, C/2] int32,
    columns 2i and 2i + 1 in a word.
    """
    SCORES: tl.constexpr = C.scores
    b_s = product(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32))
    if C.prescale != 1:
        b_s *= C.prescale
    if not PACKED or SCORES.bits != BF16_BITS:
        b_s = round_point(b_s, SCORES, noise, 0, rows, columns)
    if MASKED:
        seen = columns <= rows if C.causal else columns < T
        b_s = tl.where(seen, b_s, float("-inf"))
    if PACKED:
        low, high = tl.split(tl.reshape(b_s, [b_s.shape[0], b_s.shape[1] // 2, 2]))
        x = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        x = b_s
    return x


@triton.jit
def _max_of_pairs(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _min_of_pairs(a, b):
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _two_largest_of_pairs(first, second, other_first, other_second):
    beaten = _min_of_pairs(first, other_first)
    return _max_of_pairs(first, other_first), _max_of_pairs(_max_of_pairs(second, other_second), beaten)


@triton.jit
def _low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def row_maxima(x, PACKED: tl.constexpr):
    """Return the largest score of each row, [R] FP32."""
    if PACKED:
        words = tl.reduce(x, 1, _max_of_pairs)
        b_max = tl.maximum(_low(words), _high(words))
    else:
        b_max = tl.max(x, 1)
    return b_max


@triton.jit
def two_largest(x, PACKED: tl.constexpr):
    """Return the largest and the second largest score of each row, [R] FP32; equal where the maximum occurs twice."""
    if PACKED:
        none = tl.full(x.shape, -8323200, tl.int32)  # 0xFF80FF80: −inf twice
        first, second = tl.reduce((x, none), 1, _two_largest_of_pairs)
        b_first, b_second = merge_two_largest(_low(first), _low(second), _high(first), _high(second))
    else:
        b_first = tl.max(x, 1)
        is_first = x == b_first[:, None]
        b_below = tl.max(tl.where(is_first, float("-inf"), x), 1)
        b_second = tl.where(tl.sum(is_first.to(tl.int32), 1) > 1, b_first, b_below)
    return b_first, b_second


@triton.jit
def merge_two_largest(b_first, b_second, b_other_first, b_other_second):
    """Return the two largest scores of two pairs of largest scores."""
    b_beaten = tl.minimum(b_first, b_other_first)
    return tl.maximum(b_first, b_other_first), tl.maximum(tl.maximum(b_second, b_other_second), b_beaten)


@triton.jit
def exponentials(x, b_shift, C: tl.constexpr, PACKED: tl.constexpr):
    """Return P̄ [R, C] FP32 of a tile under the shift [R]."""
    if PACKED:
        low = exponential(_low(x), b_shift[:, None], C.unit)
        high = exponential(_high(x), b_shift[:, None], C.unit)
        b_p = tl.reshape(tl.join(low, high), [x.shape[0], 2 * x.shape[1]])
    else:
        b_p = exponential(x, b_shift[:, None], C.unit)
    return b_p


@triton.jit
def probabilities(b_s, b_lse, C: tl.constexpr):
    """Return P = exp(S − L) in FP32, line 11; L broadcasts to the tile."""
    difference = tl.fma(b_s, tl.full(b_s.shape, C.unit, tl.float32), tl.zeros_like(b_s) - b_lse)
    return tl.exp2(difference * LOG2E)
