"""A variant as the kernels take it: one compile-time value, in numbers that a kernel can branch on."""

from dataclasses import dataclass

import triton.language as tl

NONE = tl.constexpr(0)
NEAREST = tl.constexpr(1)
STOCHASTIC = tl.constexpr(2)

BF16_BITS = tl.constexpr(7)

ROWMAX = tl.constexpr(0)
OFFSET = tl.constexpr(1)
DYNAMIC_MAX = tl.constexpr(2)

OF_UNROUNDED = tl.constexpr(0)
OF_ROUNDED = tl.constexpr(1)
BEFORE_PRODUCT = tl.constexpr(2)

FROM_OUT = tl.constexpr(0)
FROM_OUT_FP32 = tl.constexpr(1)
FROM_P_DP = tl.constexpr(2)
FROM_OUT_INDEPENDENT = tl.constexpr(3)

NO_ERROR = tl.constexpr(0)
BIAS = tl.constexpr(1)
NOISE = tl.constexpr(2)

INTO_BOTH = tl.constexpr(0)
INTO_GRAD_Q = tl.constexpr(1)
INTO_GRAD_K = tl.constexpr(2)


@dataclass(frozen=True)
class Choices:
    """Every numerical choice of one attention; names as in ``flashpoint.attention.variant``.

    Scores are kept in units of ``unit`` nats, after a factor ``prescale`` on QKᵀ, with prescale · unit = α. Where α
    is a power of two nothing has to be multiplied: prescale is 1, and rounding commutes with the unit. The shift's
    constants are in the same units.
    """

    scores: int
    scores_bits: int
    probs: int
    probs_bits: int
    out_unnormalized: int
    out_unnormalized_bits: int
    per_block: bool
    out: int
    out_bits: int
    grad_scores: int
    grad_scores_bits: int
    shift: int
    shift_offset: float
    beta: float
    tie_tolerance: float
    max_shift: float
    normalizer: int
    """BEFORE_PRODUCT only with one block of keys for the whole row."""
    delta: int
    delta_error: int
    """NO_ERROR also in layers that take none."""
    delta_error_size: float
    delta_error_into: int
    exact_row_sum: bool
    center_keys: bool
    center_grad_q: bool
    fused_exponent: bool
    tiles: int
    """Tiles of keys in a block of the online softmax."""
    prescale: float
    unit: float
