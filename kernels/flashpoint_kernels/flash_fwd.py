"""Forward pass: O, L and, where a variant asks, another O for δ. One program per head and block of queries.

Comments give the lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

import triton
import triton.language as tl

from flashpoint_kernels.addressing import block_and_head, load_rows, token_offsets
from flashpoint_kernels.residual import residual
from flashpoint_kernels.rounding import (
    BF16_BITS,
    as_operand,
    divide,
    exponential,
    in_registers,
    product,
    round_point,
    to_dtype_of,
)
from flashpoint_kernels.scores import exponentials, merge_two_largest, row_maxima, tile_scores, two_largest


@triton.jit
def block_shift(b_max, b_second, C: tl.constexpr):
    """Return the m [BQ] that a block of keys asks for, from its two largest scores a row (Qiu & Yao, Algorithm 1)."""
    b_shift = b_max
    if C.shift == "offset":
        b_shift = b_max + C.shift_offset
    if C.shift == "dynamic_max":
        tied = (b_second >= b_max - C.tie_tolerance) & (b_max > float("-inf"))
        b_shift = tl.where(tied & (b_max > 0), C.beta * b_max, b_max)
        b_below = 0.0
        if C.gamma != 0:
            b_below = C.gamma * b_max
        b_shift = tl.where(tied & (b_max < 0), b_below, b_shift)
        b_shift = tl.minimum(b_shift, b_max + C.max_shift)
    return b_shift


@triton.jit
def scores_of_keys(
    b_q, k_desc, i_b, i_h, start, rows, T, noise_ptr, layer, i_bh,
    D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return S of a block of queries and the tile of keys from ``start`` on."""
    b_k = load_rows(k_desc, i_b, i_h, start, BK, D)
    columns = (start + tl.arange(0, BK))[None, :]
    return tile_scores(b_q, tl.trans(b_k), rows, columns, T, noise_ptr, layer, i_bh, C, MASKED, PACKED)


@triton.jit
def add_tile(
    x, v_desc, i_b, i_h, start, rows, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer, i_bh,
    D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, OTHER_SUM: tl.constexpr,
    STATISTICS: tl.constexpr,
):  # fmt: skip
    """Return ℓ, Ō, the Ō of δ and the P̄ that are 1, with one more tile under the shift m: lines 9 and 10.

    With ``before_product`` ``b_l`` is the whole row's already, and P̄/ℓ takes the place of P̄.
    """
    PROBS: tl.constexpr = C.probs
    columns = (start + tl.arange(0, BK))[None, :]
    b_p = exponentials(x, b_m, C, PACKED)
    if C.normalizer == "before_product":
        b_p = divide(b_p, b_l[:, None])
    b_p_operand = as_operand(b_p, PROBS, noise_ptr, layer, i_bh, rows, columns)
    if C.normalizer == "rounded":
        b_p = round_point(b_p, PROBS, noise_ptr, layer, 0, i_bh, rows, columns)
    if C.normalizer != "before_product":
        b_l += tl.sum(b_p, 1)
    b_v = load_rows(v_desc, i_b, i_h, start, BK, D)
    b_o = product(b_p_operand, b_v, b_o)
    if OTHER_SUM:
        b_other = product(b_p_operand, b_v, b_other)
    if STATISTICS:
        b_ones += tl.sum((b_p_operand.to(tl.float32) == 1.0).to(tl.int32), 1)
    return b_l, b_o, b_other, b_ones


@triton.jit
def largest_scores(x, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the largest score of each row of a tile, and the second largest if the shift needs it."""
    if C.shift == "dynamic_max":
        b_max, b_second = two_largest(x, PACKED)
    else:
        b_max = row_maxima(x, PACKED)
        b_second = b_max
    return b_max, b_second


@triton.jit
def largest_of_block(
    b_q, k_desc, i_b, i_h, start, stop, rows, T, noise_ptr, layer, i_bh,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return :func:`largest_scores` of a block of several tiles of keys."""
    b_max = tl.full([BQ], float("-inf"), tl.float32)
    b_second = b_max
    for o_k in range(start, stop, BK):
        x = scores_of_keys(b_q, k_desc, i_b, i_h, o_k, rows, T, noise_ptr, layer, i_bh, D, BK, C, MASKED, PACKED)
        b_max_here, b_second_here = largest_scores(x, C, PACKED)
        if C.shift == "dynamic_max":
            b_max, b_second = merge_two_largest(b_max, b_second, b_max_here, b_second_here)
        else:
            b_max = tl.maximum(b_max, b_max_here)
    return b_max, b_second


@triton.jit
def round_unnormalized(
    b_o, b_other, block, noise_ptr, layer, i_bh, rows, features, C: tl.constexpr, REDRAWS: tl.constexpr
):  # fmt: skip
    """Return Ō, or P̄V of one block of keys, and with REDRAWS that of δ, rounded after the block of keys of that
    number."""
    OUT_UNNORMALIZED: tl.constexpr = C.out_unnormalized
    FOR_DELTA: tl.constexpr = C.out_unnormalized_for_delta
    b_o = round_point(b_o, OUT_UNNORMALIZED, noise_ptr, layer, block, i_bh, rows, features)
    if REDRAWS:
        b_other = round_point(b_other, FOR_DELTA, noise_ptr, layer, block, i_bh, rows, features)
    return b_o, b_other


@triton.jit
def add_block(
    b_q, k_desc, v_desc, i_b, i_h, start, stop, rows, features, T, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer,
    i_bh,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    OTHER_SUM: tl.constexpr, REDRAWS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Return m, ℓ, Ō, the Ō of δ and the P̄ that are 1, with the keys from ``start`` to ``stop``: a block of the
    softmax."""
    BY_BLOCK: tl.constexpr = C.out_unnormalized_when != "final"
    BY_PRODUCT: tl.constexpr = C.out_unnormalized_when == "per_product"
    if C.tiles_per_block == 1:
        x = scores_of_keys(b_q, k_desc, i_b, i_h, start, rows, T, noise_ptr, layer, i_bh, D, BK, C, MASKED, PACKED)
        b_max, b_second = largest_scores(x, C, PACKED)
    else:
        b_max, b_second = largest_of_block(
            b_q, k_desc, i_b, i_h, start, stop, rows, T, noise_ptr, layer, i_bh, D, BQ, BK, C, MASKED, PACKED
        )
    # line 9: the running m, and what was summed under the old one rescaled
    b_m_new = tl.maximum(b_m, block_shift(b_max, b_second, C))
    b_rescale = exponential(b_m, b_m_new, C.unit)
    b_l = b_l * b_rescale
    b_o = b_o * b_rescale[:, None]
    if OTHER_SUM:
        b_other = b_other * b_rescale[:, None]
    if STATISTICS:
        b_ones = tl.where(b_m_new > b_m, 0, b_ones)
    b_m = b_m_new
    b_l_before, b_o_before, b_other_before = b_l, b_o, b_other
    if C.denominator_floor > 0:
        b_l = tl.zeros([BQ], tl.float32)
    if BY_PRODUCT:
        b_o, b_other = tl.zeros([BQ, D], tl.float32), tl.zeros([BQ, D], tl.float32)
    if C.normalizer == "before_product":
        for o_k in range(start, stop, BK):
            x_again = scores_of_keys(
                b_q, k_desc, i_b, i_h, o_k, rows, T, noise_ptr, layer, i_bh, D, BK, C, MASKED, PACKED
            )
            b_l += tl.sum(exponentials(x_again, b_m, C, PACKED), 1)
    if C.tiles_per_block == 1:
        b_l, b_o, b_other, b_ones = add_tile(
            x, v_desc, i_b, i_h, start, rows, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer, i_bh, D, BK, C,
            PACKED, OTHER_SUM, STATISTICS,
        )  # fmt: skip
    else:
        for o_k in range(start, stop, BK):
            x = scores_of_keys(b_q, k_desc, i_b, i_h, o_k, rows, T, noise_ptr, layer, i_bh, D, BK, C, MASKED, PACKED)
            b_l, b_o, b_other, b_ones = add_tile(
                x, v_desc, i_b, i_h, o_k, rows, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer, i_bh, D, BK,
                C, PACKED, OTHER_SUM, STATISTICS,
            )  # fmt: skip
    if BY_BLOCK:
        b_o, b_other = round_unnormalized(
            b_o, b_other, start // (C.tiles_per_block * BK), noise_ptr, layer, i_bh, rows, features, C, REDRAWS
        )
    if BY_PRODUCT:
        b_o, b_other = b_o_before + b_o, b_other_before + b_other
    if C.denominator_floor > 0:
        b_l = tl.maximum(b_l, C.denominator_floor)
        if MASKED and C.causal and C.tiles_per_block * BK < BQ:  # the first queries come before this block
            b_l = tl.where(tl.reshape(rows, [BQ]) >= start, b_l, 0.0)
        b_l = b_l_before + b_l
    return b_m, b_l, b_o, b_other, b_ones


@triton.jit
def count_masked_blocks(b_m, b_l, b_ones, o_rows, first, T, BLOCK: tl.constexpr, C: tl.constexpr):
    """Return m, ℓ, the factor by which Ō shrinks and the P̄ that are 1, with the blocks of keys after each query."""
    b_factor = tl.full(b_m.shape, 1.0, tl.float32)
    for block in range(first, tl.cdiv(T, BLOCK)):
        masked = o_rows < block * BLOCK
        b_m_new = b_m
        if C.shift == "dynamic_max":
            b_m_new = tl.where(masked, tl.maximum(b_m, 0.0), b_m)
        b_rescale = exponential(b_m, b_m_new, C.unit)
        b_ones = tl.where(b_m_new > b_m, 0, b_ones)
        b_l = b_l * b_rescale + tl.where(masked, C.denominator_floor, 0.0)
        b_factor = b_factor * b_rescale
        b_m = b_m_new
    return b_m, b_l, b_factor, b_ones


@triton.jit
def store_rows(
    b_m, b_l, b_o, b_other, b_ones, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr,
    o_rows, i_bh, H, T, layer, D: tl.constexpr, BQ: tl.constexpr, C: tl.constexpr, FOR_DELTA: tl.constexpr,
    REDRAWS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Store O and L of a block of queries, with FOR_DELTA the O of δ or what O lacks of it, with STATISTICS m and the
    count of ones."""
    OUT: tl.constexpr = C.out
    OUT_FOR_DELTA: tl.constexpr = C.out_for_delta
    rows, features = o_rows[:, None], tl.arange(0, D)[None, :]
    DENOMINATOR: tl.constexpr = C.denominator
    b_unrounded = b_l
    b_l = round_point(b_l, DENOMINATOR, noise_ptr, layer, 0, i_bh, o_rows, o_rows * 0)
    b_divisor = b_l
    if C.out_divisor == "unrounded_in_first_block":
        b_divisor = tl.where(o_rows < C.block_k, b_unrounded, b_l)
    if C.normalizer == "before_product":
        b_divisor = tl.full([BQ], 1.0, tl.float32)
        b_unrounded = b_divisor
    b_out = divide(b_o, b_divisor[:, None])
    b_out = round_point(b_out, OUT, noise_ptr, layer, 0, i_bh, rows, features)
    o_out = token_offsets(i_bh // H, i_bh % H, o_rows, H, T, D)
    tl.store(o_ptr + o_out, to_dtype_of(b_out, o_ptr), mask=rows < T)  # line 12
    if FOR_DELTA:
        o_delta_ptr += o_out
        b_other = divide(b_other, b_divisor[:, None] if REDRAWS else b_unrounded[:, None])
        if REDRAWS:
            b_other = round_point(b_other, OUT_FOR_DELTA, noise_ptr, layer, 0, i_bh, rows, features)
        if C.out_mantissa > 0:
            b_other = residual(b_other, b_out, C.out_mantissa)
        tl.store(o_delta_ptr, b_other.to(o_delta_ptr.dtype.element_ty), mask=rows < T)
    o_lse = i_bh.to(tl.int64) * T + o_rows
    tl.store(lse_ptr + o_lse, b_m * C.unit + tl.log(b_l), mask=o_rows < T)  # line 13
    if STATISTICS:
        tl.store(shift_ptr + o_lse, b_m * C.unit, mask=o_rows < T)
        tl.store(ones_ptr + o_lse, b_ones, mask=o_rows < T)


@triton.jit
def flash_fwd_rows(
    q_desc, k_desc, v_desc, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr, i_q, i_bh, H, T, layer,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    STATISTICS: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries. Shift and per-block rounding act on blocks of C.tiles_per_block tiles, products on
    tiles.

    STATISTICS: the final m in nats and the number of P̄ that are 1 under it, as operands, are stored too.
    """
    PACKED: tl.constexpr = PAIRS and C.scores.mode == "nearest" and C.scores.bits <= BF16_BITS
    REDRAWS: tl.constexpr = C.saved_out == "redrawn"
    FOR_DELTA: tl.constexpr = C.saved_out != "none"
    tl.static_assert(not FOR_DELTA or REDRAWS or C.saved_out == "unrounded", "no such O is known here")
    BY_BLOCK: tl.constexpr = C.out_unnormalized_when != "final"
    OTHER_SUM: tl.constexpr = FOR_DELTA and BY_BLOCK
    BLOCK: tl.constexpr = C.tiles_per_block * BK
    i_b, i_h = i_bh // H, i_bh % H
    o_rows = i_q * BQ + tl.arange(0, BQ)
    rows, features = o_rows[:, None], tl.arange(0, D)[None, :]
    b_q = load_rows(q_desc, i_b, i_h, i_q * BQ, BQ, D)
    if C.tiles_per_block == 1 and D <= 64:
        b_q = in_registers(b_q)

    b_m = tl.full([BQ], float("-inf"), tl.float32)
    b_l = tl.zeros([BQ], tl.float32)
    b_o = tl.zeros([BQ, D], tl.float32)  # Ō, rounded per block if the variant says so
    b_other = tl.zeros([BQ, D], tl.float32)  # the Ō of δ, where that differs from block to block
    b_ones = tl.zeros([BQ], tl.int32)
    # Blocks of keys that all queries see whole need no mask: those below the diagonal, or all but a last one cut short.
    SPLIT: tl.constexpr = BQ % BLOCK == 0 or not C.causal
    whole, end = i_q * BQ, tl.minimum((i_q + 1) * BQ, T)
    if not C.causal:
        whole, end = T // BLOCK * BLOCK, T
    for masked in tl.static_range(0 if SPLIT else 1, 2):
        first = whole if SPLIT and masked else 0
        last = end if masked else tl.minimum(whole, end)
        for start in range(first, last, BLOCK):
            b_m, b_l, b_o, b_other, b_ones = add_block(
                b_q, k_desc, v_desc, i_b, i_h, start, tl.minimum(start + BLOCK, last), rows, features, T, b_m, b_l,
                b_o, b_other, b_ones, noise_ptr, layer, i_bh, D, BQ, BK, C, masked, PACKED, OTHER_SUM, REDRAWS,
                STATISTICS,
            )  # fmt: skip
    if C.counts_masked:
        b_m, b_l, b_rescale, b_ones = count_masked_blocks(b_m, b_l, b_ones, o_rows, i_q * BQ // BLOCK + 1, T, BLOCK, C)
        b_o, b_other = b_o * b_rescale[:, None], b_other * b_rescale[:, None]
    if not OTHER_SUM:
        b_other = b_o
    if not BY_BLOCK:
        b_o, b_other = round_unnormalized(b_o, b_other, 0, noise_ptr, layer, i_bh, rows, features, C, REDRAWS)
    store_rows(
        b_m, b_l, b_o, b_other, b_ones, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr,
        o_rows, i_bh, H, T, layer, D, BQ, C, FOR_DELTA, REDRAWS, STATISTICS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "layer"])  # one compilation for all layers and batch sizes
def flash_fwd_kernel(
    q_desc, k_desc, v_desc, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr, selected_ptr,
    B, H, T, layer, GROUP,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, ELSEWHERE: tl.constexpr,
    PAIRS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Run C for all heads, or for the selected ones and ELSEWHERE for the others."""
    n_blocks = tl.cdiv(T, BQ)
    i_q, i_bh = block_and_head(n_blocks, B * H, GROUP)
    i_q = n_blocks - 1 - i_q  # the longest rows first
    if ELSEWHERE is None or tl.load(selected_ptr + i_bh % H) != 0:
        flash_fwd_rows(
            q_desc, k_desc, v_desc, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr,
            i_q, i_bh, H, T, layer, D, BQ, BK, C, PAIRS, STATISTICS,
        )  # fmt: skip
    else:
        flash_fwd_rows(
            q_desc, k_desc, v_desc, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr,
            i_q, i_bh, H, T, layer, D, BQ, BK, ELSEWHERE, PAIRS, STATISTICS,
        )  # fmt: skip
