"""Forward pass: O, L and, where a variant asks, another O for δ. One program per head and block of queries.

Comments count lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

import triton
import triton.language as tl

from flashpoint.kernels.choices import (
    BEFORE_PRODUCT,
    BF16_BITS,
    DYNAMIC_MAX,
    FROM_OUT_FP32,
    FROM_OUT_INDEPENDENT,
    NEAREST,
    OF_ROUNDED,
    OFFSET,
)
from flashpoint.kernels.rounding import (
    as_operand,
    divide,
    exponential,
    in_registers,
    load_rows,
    product,
    round_point,
    to_dtype_of,
)
from flashpoint.kernels.scores import exponentials, merge_two_largest, row_maxima, tile_scores, two_largest


@triton.jit
def program_tile(n_blocks, n_heads, GROUP):
    """Block and head (of all sequences) of this program: heads go in groups that fit in L2, a group block by block."""
    i = tl.program_id(0)
    group, within = i // (GROUP * n_blocks), i % (GROUP * n_blocks)
    heads = tl.minimum(GROUP, n_heads - group * GROUP)
    return within // heads, group * GROUP + within % heads


@triton.jit
def token_offsets(i_b, i_h, o_tokens, H, T, D: tl.constexpr):
    """Offsets [BT, D] of tokens in a tensor that lies in memory as [B, T, H, D]."""
    return ((i_b.to(tl.int64) * T + o_tokens)[:, None] * H + i_h) * D + tl.arange(0, D)[None, :]


@triton.jit
def center_keys_kernel(
    k_ptr, centered_ptr, selected_ptr, stride_b, stride_h, stride_t, H, T,
    D: tl.constexpr, BT: tl.constexpr, CENTERS: tl.constexpr, ELSEWHERE: tl.constexpr,
):  # fmt: skip
    """K − mean_T(K) of one head and sequence, or K where a choice of heads says so; L2 holds the second read.

    CENTERS is of the selected heads and ELSEWHERE of the others, or None where all heads are centred.
    """
    i_bh = tl.program_id(0)
    b_sum = tl.zeros([D], tl.float32)
    for first in range(0, T, BT):
        b_sum += tl.sum(load_chunk(k_ptr, stride_b, stride_h, stride_t, i_bh, first, H, T, D, BT), 0)
    b_mean = b_sum[None, :] / T
    if ELSEWHERE is not None:
        centers = CENTERS if tl.load(selected_ptr + i_bh % H) != 0 else ELSEWHERE
        b_mean = tl.where(centers, b_mean, 0.0)
    for first in range(0, T, BT):
        b_k = load_chunk(k_ptr, stride_b, stride_h, stride_t, i_bh, first, H, T, D, BT)
        o_tokens = first + tl.arange(0, BT)
        o_out = token_offsets(i_bh // H, i_bh % H, o_tokens, H, T, D)
        tl.store(centered_ptr + o_out, to_dtype_of(b_k - b_mean, centered_ptr), mask=(o_tokens < T)[:, None])


@triton.jit
def load_chunk(ptr, stride_b, stride_h, stride_t, i_bh, first, H, T, D: tl.constexpr, BT: tl.constexpr):
    """Tokens [BT, D] of one head in FP32, 0 past the last."""
    o_tokens = first + tl.arange(0, BT)
    ptr += (i_bh // H).to(tl.int64) * stride_b + (i_bh % H) * stride_h
    pointers = ptr + o_tokens[:, None].to(tl.int64) * stride_t + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(o_tokens < T)[:, None], other=0.0).to(tl.float32)


@triton.jit
def block_shift(b_max, b_second, C: tl.constexpr):
    """The m [BQ] that a block of keys asks for, from its two largest scores a row (Qiu & Yao, Algorithm 1)."""
    b_shift = b_max
    if C.shift == OFFSET:
        b_shift = b_max + C.shift_offset
    if C.shift == DYNAMIC_MAX:
        tied = (b_second >= b_max - C.tie_tolerance) & (b_max > float("-inf"))
        b_shift = tl.where(tied & (b_max > 0), C.beta * b_max, b_max)
        b_shift = tl.where(tied & (b_max < 0), 0.0, b_shift)
        b_shift = tl.minimum(b_shift, b_max + C.max_shift)
    return b_shift


@triton.jit
def scores_of_keys(
    b_q, k_tiles, i_b, i_h, start, rows, noise_ptr, layer, i_bh,
    D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S of a block of queries and the tile of keys from ``start`` on."""
    b_k = load_rows(k_tiles, i_b, i_h, start, BK, D)
    columns = (start + tl.arange(0, BK))[None, :]
    return tile_scores(b_q, tl.trans(b_k), rows, columns, noise_ptr, layer, i_bh, C, MASKED, PACKED)


@triton.jit
def add_tile(
    x, v_tiles, i_b, i_h, start, rows, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer, i_bh,
    D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, OTHER_SUM: tl.constexpr,
    STATISTICS: tl.constexpr,
):  # fmt: skip
    """ℓ, Ō, the Ō of δ and the P̄ that are 1, with one more tile under the shift m: lines 9 and 10.

    With BEFORE_PRODUCT ``b_l`` is the whole row's already, and P̄/ℓ takes the place of P̄.
    """
    columns = (start + tl.arange(0, BK))[None, :]
    b_p = exponentials(x, b_m, C, PACKED)
    if C.normalizer == BEFORE_PRODUCT:
        b_p = divide(b_p, b_l[:, None])
    b_p_operand = as_operand(b_p, C.probs, C.probs_bits, noise_ptr, layer | (1 << 12), i_bh, rows, columns)
    if C.normalizer == OF_ROUNDED:
        b_p = round_point(b_p, C.probs, C.probs_bits, noise_ptr, layer | (1 << 12), 0, i_bh, rows, columns)
    if C.normalizer != BEFORE_PRODUCT:
        b_l += tl.sum(b_p, 1)
    b_v = load_rows(v_tiles, i_b, i_h, start, BK, D)
    b_o = product(b_p_operand, b_v, b_o)
    if OTHER_SUM:
        b_other = product(b_p_operand, b_v, b_other)
    if STATISTICS:
        b_ones += tl.sum((b_p_operand.to(tl.float32) == 1.0).to(tl.int32), 1)
    return b_l, b_o, b_other, b_ones


@triton.jit
def forward_rows(
    q_tiles, k_tiles, v_tiles, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr, i_q, i_bh, H, T, layer,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of queries. Shift and per-block rounding act on blocks of C.tiles tiles, products on tiles.

    STATISTICS: the final m in nats and the number of P̄ that are 1 under it, as operands, are stored too.
    """
    PACKED: tl.constexpr = PAIRS and C.scores == NEAREST and C.scores_bits <= BF16_BITS
    REDRAWS: tl.constexpr = C.delta == FROM_OUT_INDEPENDENT
    FOR_DELTA: tl.constexpr = REDRAWS or C.delta == FROM_OUT_FP32
    OTHER_SUM: tl.constexpr = FOR_DELTA and C.per_block
    BLOCK: tl.constexpr = C.tiles * BK
    i_b, i_h = i_bh // H, i_bh % H
    o_rows = i_q * BQ + tl.arange(0, BQ)
    rows, features = o_rows[:, None], tl.arange(0, D)[None, :]
    b_q = load_rows(q_tiles, i_b, i_h, i_q * BQ, BQ, D)
    if C.tiles == 1 and D <= 64:
        b_q = in_registers(b_q)

    b_m = tl.full([BQ], float("-inf"), tl.float32)
    b_l = tl.zeros([BQ], tl.float32)
    b_o = tl.zeros([BQ, D], tl.float32)  # Ō, rounded per block if the variant says so
    b_other = tl.zeros([BQ, D], tl.float32)  # the Ō of δ, where that differs from block to block
    b_ones = tl.zeros([BQ], tl.int32)
    diagonal, end = i_q * BQ, tl.minimum((i_q + 1) * BQ, T)
    # Tiles below the diagonal need no mask, where the first tile on it starts a block of keys.
    SPLIT: tl.constexpr = BQ % BLOCK == 0
    for on_diagonal in tl.static_range(0 if SPLIT else 1, 2):
        first = diagonal if SPLIT and on_diagonal else 0
        last = end if on_diagonal else tl.minimum(diagonal, end)
        for start in range(first, last, BLOCK):
            b_max = tl.full([BQ], float("-inf"), tl.float32)
            b_second = b_max
            stop = tl.minimum(start + BLOCK, last)
            if C.tiles == 1:
                x = scores_of_keys(
                    b_q, k_tiles, i_b, i_h, start, rows, noise_ptr, layer, i_bh, D, BK, C, on_diagonal, PACKED
                )
                if C.shift == DYNAMIC_MAX:
                    b_max, b_second = two_largest(x, PACKED)
                else:
                    b_max = row_maxima(x, PACKED)
            else:
                for o_k in range(start, stop, BK):
                    x = scores_of_keys(
                        b_q, k_tiles, i_b, i_h, o_k, rows, noise_ptr, layer, i_bh, D, BK, C, on_diagonal,
                        PACKED,
                    )  # fmt: skip
                    if C.shift == DYNAMIC_MAX:
                        b_first_here, b_second_here = two_largest(x, PACKED)
                        b_max, b_second = merge_two_largest(b_max, b_second, b_first_here, b_second_here)
                    else:
                        b_max = tl.maximum(b_max, row_maxima(x, PACKED))
            # line 9: the running m, and what was summed under the old one rescaled
            b_m_new = tl.maximum(b_m, block_shift(b_max, b_second, C))
            b_rescale = exponential(b_m, b_m_new, C.unit, False)
            b_l = b_l * b_rescale
            b_o = b_o * b_rescale[:, None]
            if OTHER_SUM:
                b_other = b_other * b_rescale[:, None]
            if STATISTICS:
                b_ones = tl.where(b_m_new > b_m, 0, b_ones)
            b_m = b_m_new
            if C.normalizer == BEFORE_PRODUCT:
                for o_k in range(start, stop, BK):
                    x_again = scores_of_keys(
                        b_q, k_tiles, i_b, i_h, o_k, rows, noise_ptr, layer, i_bh, D, BK, C, on_diagonal, PACKED
                    )
                    b_l += tl.sum(exponentials(x_again, b_m, C, PACKED), 1)
            if C.tiles == 1:
                b_l, b_o, b_other, b_ones = add_tile(
                    x, v_tiles, i_b, i_h, start, rows, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer, i_bh, D, BK, C,
                    PACKED, OTHER_SUM, STATISTICS,
                )  # fmt: skip
            else:
                for o_k in range(start, stop, BK):
                    x = scores_of_keys(
                        b_q, k_tiles, i_b, i_h, o_k, rows, noise_ptr, layer, i_bh, D, BK, C, on_diagonal,
                        PACKED,
                    )  # fmt: skip
                    b_l, b_o, b_other, b_ones = add_tile(
                        x, v_tiles, i_b, i_h, o_k, rows, b_m, b_l, b_o, b_other, b_ones, noise_ptr, layer, i_bh, D, BK,
                        C, PACKED, OTHER_SUM, STATISTICS,
                    )  # fmt: skip
            if C.per_block:
                b_o = round_point(
                    b_o, C.out_unnormalized, C.out_unnormalized_bits, noise_ptr, layer | (2 << 12), start // BLOCK,
                    i_bh, rows, features,
                )  # fmt: skip
                if REDRAWS:
                    b_other = round_point(
                        b_other, C.out_unnormalized, C.out_unnormalized_bits, noise_ptr, layer | (6 << 12),
                        start // BLOCK, i_bh, rows, features,
                    )  # fmt: skip
    if not OTHER_SUM:
        b_other = b_o
    if not C.per_block:
        b_o = round_point(
            b_o, C.out_unnormalized, C.out_unnormalized_bits, noise_ptr, layer | (2 << 12), 0, i_bh, rows, features
        )
        if REDRAWS:
            b_other = round_point(
                b_other, C.out_unnormalized, C.out_unnormalized_bits, noise_ptr, layer | (6 << 12), 0, i_bh, rows,
                features,
            )  # fmt: skip
    b_divisor = b_l
    if C.normalizer == BEFORE_PRODUCT:
        b_divisor = tl.full([BQ], 1.0, tl.float32)
    b_out = divide(b_o, b_divisor[:, None])
    b_out = round_point(b_out, C.out, C.out_bits, noise_ptr, layer | (3 << 12), 0, i_bh, rows, features)
    o_out = token_offsets(i_b, i_h, o_rows, H, T, D)
    tl.store(o_ptr + o_out, to_dtype_of(b_out, o_ptr), mask=rows < T)  # line 12
    if FOR_DELTA:
        o_delta_ptr += o_out
        b_other = divide(b_other, b_divisor[:, None])
        if REDRAWS:
            b_other = round_point(b_other, C.out, C.out_bits, noise_ptr, layer | (7 << 12), 0, i_bh, rows, features)
        tl.store(o_delta_ptr, b_other, mask=rows < T)
    o_lse = i_bh.to(tl.int64) * T + o_rows
    tl.store(lse_ptr + o_lse, b_m * C.unit + tl.log(b_l), mask=o_rows < T)  # line 13
    if STATISTICS:
        tl.store(shift_ptr + o_lse, b_m * C.unit, mask=o_rows < T)
        tl.store(ones_ptr + o_lse, b_ones, mask=o_rows < T)


@triton.jit
def flash_fwd_kernel(
    q_tiles, k_tiles, v_tiles, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr, selected_ptr,
    B, H, T, layer, GROUP,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, ELSEWHERE: tl.constexpr,
    PAIRS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """C for all heads, or for the selected ones and ELSEWHERE for the others."""
    n_blocks = tl.cdiv(T, BQ)
    i_q, i_bh = program_tile(n_blocks, B * H, GROUP)
    i_q = n_blocks - 1 - i_q  # the longest rows first
    if ELSEWHERE is None or tl.load(selected_ptr + i_bh % H) != 0:
        forward_rows(
            q_tiles, k_tiles, v_tiles, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr,
            i_q, i_bh, H, T, layer, D, BQ, BK, C, PAIRS, STATISTICS,
        )  # fmt: skip
    else:
        forward_rows(
            q_tiles, k_tiles, v_tiles, o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr, noise_ptr,
            i_q, i_bh, H, T, layer, D, BQ, BK, ELSEWHERE, PAIRS, STATISTICS,
        )  # fmt: skip
