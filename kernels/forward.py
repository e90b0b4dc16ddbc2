"""Forward pass: O, L and, where a variant asks, O of the unrounded Ō. One program per head and block of queries.

Comments count lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

import triton
import triton.language as tl

from flashpoint.kernels.rounding import exponential, load_operand, product, round_point, to_dtype_of

ROWMAX = tl.constexpr(0)
OFFSET = tl.constexpr(1)
DYNAMIC_MAX = tl.constexpr(2)


@triton.jit
def tile_scores(
    b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """S [BQ, BK] of queries [BQ, D] and keys [D, BK], rounded; MASKED: −inf where the key comes after the query."""
    b_s = round_point(product(b_q, b_kt, 1) * scale, SCORES, noise_ptr, layer, 0, head_number, o_rows, o_cols)
    if MASKED:
        b_s = tl.where((o_cols[None, :] <= o_rows[:, None]) & (o_cols < T)[None, :], b_s, float("-inf"))
    return b_s


@triton.jit
def load_rows(ptr, stride_t, o_tokens, T, D: tl.constexpr, MASKED: tl.constexpr):
    """Tokens [BT, D] of one head as an operand; MASKED: 0 past the end."""
    pointers = ptr + o_tokens[:, None] * stride_t + tl.arange(0, D)[None, :]
    return load_operand(pointers, (o_tokens < T)[:, None], MASKED)


@triton.jit
def load_transposed(ptr, stride_t, o_tokens, T, D: tl.constexpr, MASKED: tl.constexpr):
    """Tokens [D, BT] of one head as an operand; MASKED: 0 past the end."""
    pointers = ptr + o_tokens[None, :] * stride_t + tl.arange(0, D)[:, None]
    return load_operand(pointers, (o_tokens < T)[None, :], MASKED)


@triton.jit
def block_shift(b_max, b_ties, beta, shift_offset, max_shift, SHIFT: tl.constexpr):
    """The m [BQ] that a block of keys asks for, from its row maxima and their counts (Qiu & Yao, Algorithm 1)."""
    if SHIFT == OFFSET:
        return b_max + shift_offset
    if SHIFT == DYNAMIC_MAX:
        tied = (b_ties > 1) & (b_max > float("-inf"))
        b_shift = tl.where(tied & (b_max > 0), beta * b_max, b_max)
        b_shift = tl.where(tied & (b_max < 0), 0.0, b_shift)
        return tl.minimum(b_shift, b_max + max_shift)
    return b_max


@triton.jit
def flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, o32_ptr, lse_ptr, noise_ptr, heads_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, N_HEAD, T, layer, scale, beta, tie_tolerance, max_shift, shift_offset,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    SCORES: tl.constexpr, PROBS: tl.constexpr, OUT_UNNORMALIZED: tl.constexpr, PER_BLOCK: tl.constexpr,
    OUT: tl.constexpr, SHIFT: tl.constexpr, ROUNDED_NORMALIZER: tl.constexpr, FUSED: tl.constexpr,
    STORE_FP32: tl.constexpr,
):  # fmt: skip
    """Key blocks of TILES tiles of BK keys; shift and per-block rounding act on blocks, products on tiles."""
    i_q, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # long rows first
    i_b, i_h = i_bh // H, i_bh % H
    head_number = i_b * N_HEAD + tl.load(heads_ptr + i_h)
    q_ptr += i_b * stride_qb + i_h * stride_qh
    k_ptr += i_b * stride_kb + i_h * stride_kh
    v_ptr += i_b * stride_vb + i_h * stride_vh
    o_rows, o_d = i_q * BQ + tl.arange(0, BQ), tl.arange(0, D)
    b_q = load_rows(q_ptr, stride_qt, o_rows, T, D, True)  # [BQ, D]

    b_m = tl.full([BQ], float("-inf"), tl.float32)
    b_l = tl.zeros([BQ], tl.float32)
    b_o = tl.zeros([BQ, D], tl.float32)  # Ō, rounded per block if the variant says so
    b_exact = tl.zeros([BQ, D], tl.float32)  # Ō without that
    diagonal, end = i_q * BQ, tl.minimum((i_q + 1) * BQ, T)
    # Tiles below the diagonal need no mask, where the first tile on it starts a block of keys.
    SPLIT: tl.constexpr = BQ % (TILES * BK) == 0
    for on_diagonal in tl.static_range(0 if SPLIT else 1, 2):
        first = diagonal if SPLIT and on_diagonal else 0
        last = end if on_diagonal else tl.minimum(diagonal, end)
        for start in range(first, last, TILES * BK):
            b_max, b_ties = tl.full([BQ], float("-inf"), tl.float32), tl.zeros([BQ], tl.int32)
            stop = tl.minimum(start + TILES * BK, last)
            if TILES > 1:
                for o_k in range(start, stop, BK):
                    o_cols = o_k + tl.arange(0, BK)
                    b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, on_diagonal)
                    b_s = tile_scores(
                        b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, on_diagonal
                    )
                    b_max = tl.maximum(b_max, tl.max(b_s, 1))
                if SHIFT == DYNAMIC_MAX:
                    for o_k in range(start, stop, BK):
                        o_cols = o_k + tl.arange(0, BK)
                        b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, on_diagonal)
                        b_s = tile_scores(
                            b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, on_diagonal
                        )
                        b_ties += tl.sum((b_s >= (b_max - tie_tolerance)[:, None]).to(tl.int32), 1)
            else:
                o_cols = start + tl.arange(0, BK)
                b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, on_diagonal)
                b_s = tile_scores(
                    b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, on_diagonal
                )
                b_max = tl.max(b_s, 1)
                if SHIFT == DYNAMIC_MAX:
                    b_ties = tl.sum((b_s >= (b_max - tie_tolerance)[:, None]).to(tl.int32), 1)
            # line 9: the running m, and what was summed under the old one rescaled
            b_m_new = tl.maximum(b_m, block_shift(b_max, b_ties, beta, shift_offset, max_shift, SHIFT))
            b_rescale = exponential(b_m, b_m_new, False)
            b_l = b_l * b_rescale
            b_o = b_o * b_rescale[:, None]
            if PER_BLOCK and STORE_FP32:
                b_exact = b_exact * b_rescale[:, None]
            b_m = b_m_new
            for o_k in range(start, stop, BK):
                o_cols = o_k + tl.arange(0, BK)
                if TILES > 1:
                    b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, on_diagonal)
                    b_s = tile_scores(
                        b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, on_diagonal
                    )
                b_p = exponential(b_s, b_m[:, None], FUSED)  # line 9: P̄
                b_p_operand = round_point(b_p, PROBS, noise_ptr, layer | (1 << 12), 0, head_number, o_rows, o_cols)
                b_l += tl.sum(b_p_operand if ROUNDED_NORMALIZER else b_p, 1)  # line 9: ℓ
                b_v = load_rows(v_ptr, stride_vt, o_cols, T, D, on_diagonal)
                b_pv = product(b_p_operand, b_v, PROBS)
                b_o += b_pv  # line 10
                if PER_BLOCK and STORE_FP32:
                    b_exact += b_pv
            if PER_BLOCK:
                b_o = round_point(
                    b_o, OUT_UNNORMALIZED, noise_ptr, layer | (2 << 12), start // (TILES * BK), head_number, o_rows, o_d
                )
    if not PER_BLOCK:
        b_exact = b_o
        b_o = round_point(b_o, OUT_UNNORMALIZED, noise_ptr, layer | (2 << 12), 0, head_number, o_rows, o_d)
    # line 12, with the division that rounds to nearest
    b_divisor = b_l[:, None] + tl.zeros_like(b_o)
    b_out = round_point(tl.div_rn(b_o, b_divisor), OUT, noise_ptr, layer | (3 << 12), 0, head_number, o_rows, o_d)
    o_ptr += i_bh * T * D
    in_rows = (o_rows < T)[:, None]
    tl.store(o_ptr + o_rows[:, None] * D + o_d[None, :], to_dtype_of(b_out, o_ptr), mask=in_rows)
    if STORE_FP32:
        o32_ptr += i_bh * T * D
        tl.store(o32_ptr + o_rows[:, None] * D + o_d[None, :], tl.div_rn(b_exact, b_divisor), mask=in_rows)
    tl.store(lse_ptr + i_bh * T + o_rows, b_m + tl.log(b_l), mask=o_rows < T)  # line 13
