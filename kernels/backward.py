"""Backward pass: δ with dQ (one program per block of queries), then dK and dV (one per block of keys). No atomics.

Comments count lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 2.
"""

import triton
import triton.language as tl

from flashpoint.kernels.forward import load_rows, load_transposed, tile_scores
from flashpoint.kernels.rounding import exponential, product, round_point, to_dtype_of

FROM_OUT = tl.constexpr(0)
FROM_P_DP = tl.constexpr(1)


@triton.jit
def flash_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, noise_ptr, heads_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_dob, stride_doh, stride_dot,
    H, N_HEAD, T, layer, scale,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCORES: tl.constexpr, GRAD_SCORES: tl.constexpr, DELTA: tl.constexpr, EXACT_ROW_SUM: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """δ [BQ] as the variant takes it, stored for the other kernel, and dQ [BQ, D]."""
    i_q, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    head_number = i_b * N_HEAD + tl.load(heads_ptr + i_h)
    k_ptr += i_b * stride_kb + i_h * stride_kh
    v_ptr += i_b * stride_vb + i_h * stride_vh
    o_rows, o_d = i_q * BQ + tl.arange(0, BQ), tl.arange(0, D)
    in_rows = o_rows < T
    q_ptr += i_b * stride_qb + i_h * stride_qh
    do_ptr += i_b * stride_dob + i_h * stride_doh
    b_q = load_rows(q_ptr, stride_qt, o_rows, T, D, True)
    b_do = load_rows(do_ptr, stride_dot, o_rows, T, D, True)
    b_lse = tl.load(lse_ptr + i_bh * T + o_rows, mask=in_rows, other=0.0)
    end = tl.minimum((i_q + 1) * BQ, T)

    b_delta = tl.zeros([BQ], tl.float32)
    if DELTA == FROM_OUT:  # line 4; O in BF16 or FP32
        b_o = tl.load(o_ptr + i_bh * T * D + o_rows[:, None] * D + o_d[None, :], mask=in_rows[:, None], other=0.0)
        b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    else:
        for o_k in range(0, end, BK):
            o_cols = o_k + tl.arange(0, BK)
            b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, True)
            b_s = tile_scores(b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, True)
            b_p = exponential(b_s, b_lse[:, None], FUSED)
            b_vt = load_transposed(v_ptr, stride_vt, o_cols, T, D, True)
            b_delta += tl.sum(b_p * product(b_do, b_vt, 1), 1)
    if EXACT_ROW_SUM:
        b_residual, b_mass = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
        for o_k in range(0, end, BK):
            o_cols = o_k + tl.arange(0, BK)
            b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, True)
            b_s = tile_scores(b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, True)
            b_p = exponential(b_s, b_lse[:, None], FUSED)
            b_vt = load_transposed(v_ptr, stride_vt, o_cols, T, D, True)
            b_residual += tl.sum(b_p * (product(b_do, b_vt, 1) - b_delta[:, None]), 1)
            b_mass += tl.sum(b_p, 1)
        b_delta += b_residual / b_mass
    tl.store(delta_ptr + i_bh * T + o_rows, b_delta, mask=in_rows)

    b_dq = tl.zeros([BQ, D], tl.float32)
    for on_diagonal in tl.static_range(2):
        first, last = (i_q * BQ, end) if on_diagonal else (0, tl.minimum(i_q * BQ, end))
        for o_k in range(first, last, BK):
            o_cols = o_k + tl.arange(0, BK)
            b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, on_diagonal)
            b_s = tile_scores(b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, on_diagonal)
            b_p = exponential(b_s, b_lse[:, None], FUSED)  # line 11
            b_vt = load_transposed(v_ptr, stride_vt, o_cols, T, D, on_diagonal)
            b_dp = product(b_do, b_vt, 1)  # line 13
            b_ds = b_p * (b_dp - b_delta[:, None])  # line 14
            b_ds = round_point(b_ds, GRAD_SCORES, noise_ptr, layer | (4 << 12), 0, head_number, o_rows, o_cols)
            b_k = load_rows(k_ptr, stride_kt, o_cols, T, D, on_diagonal)
            b_dq += product(b_ds, b_k, GRAD_SCORES)  # line 15
    dq_ptr += i_bh * T * D
    tl.store(
        dq_ptr + o_rows[:, None] * D + o_d[None, :],
        to_dtype_of(b_dq * scale, dq_ptr),
        mask=in_rows[:, None],
    )


@triton.jit
def flash_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, noise_ptr, heads_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_dob, stride_doh, stride_dot,
    H, N_HEAD, T, layer, scale,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCORES: tl.constexpr, PROBS: tl.constexpr, GRAD_SCORES: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """dK and dV [BK, D] of one block of keys, over all queries from it on."""
    i_k, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    head_number = i_b * N_HEAD + tl.load(heads_ptr + i_h)
    q_ptr += i_b * stride_qb + i_h * stride_qh
    do_ptr += i_b * stride_dob + i_h * stride_doh
    k_ptr += i_b * stride_kb + i_h * stride_kh
    o_cols, o_d = i_k * BK + tl.arange(0, BK), tl.arange(0, D)
    in_cols = o_cols < T
    v_ptr += i_b * stride_vb + i_h * stride_vh
    b_kt = load_transposed(k_ptr, stride_kt, o_cols, T, D, True)
    b_vt = load_transposed(v_ptr, stride_vt, o_cols, T, D, True)
    b_dk, b_dv = tl.zeros([BK, D], tl.float32), tl.zeros([BK, D], tl.float32)
    diagonal, below = (i_k * BK) // BQ * BQ, tl.cdiv((i_k + 1) * BK, BQ) * BQ
    for on_diagonal in tl.static_range(2):
        first, last = (diagonal, tl.minimum(below, T)) if on_diagonal else (below, T)
        for o_q in range(first, last, BQ):
            o_rows = o_q + tl.arange(0, BQ)
            in_rows = o_rows < T
            b_q = load_rows(q_ptr, stride_qt, o_rows, T, D, True)
            b_do = load_rows(do_ptr, stride_dot, o_rows, T, D, True)
            b_lse = tl.load(lse_ptr + i_bh * T + o_rows, mask=in_rows, other=float("inf"))  # P = 0 past the end
            b_delta = tl.load(delta_ptr + i_bh * T + o_rows, mask=in_rows, other=0.0)
            b_s = tile_scores(b_q, b_kt, o_rows, o_cols, T, scale, noise_ptr, layer, head_number, SCORES, on_diagonal)
            b_p = exponential(b_s, b_lse[:, None], FUSED)  # line 11
            b_p_operand = round_point(b_p, PROBS, noise_ptr, layer | (5 << 12), 0, head_number, o_rows, o_cols)
            b_dv += product(tl.trans(b_p_operand), b_do, PROBS)  # line 12
            b_dp = product(b_do, b_vt, 1)  # line 13
            b_ds = b_p * (b_dp - b_delta[:, None])  # line 14
            b_ds = round_point(b_ds, GRAD_SCORES, noise_ptr, layer | (4 << 12), 0, head_number, o_rows, o_cols)
            b_dk += product(tl.trans(b_ds), b_q, GRAD_SCORES)  # line 16
    o_out = i_bh * T * D + o_cols[:, None] * D + o_d[None, :]
    tl.store(dk_ptr + o_out, to_dtype_of(b_dk * scale, dk_ptr), mask=in_cols[:, None])
    tl.store(dv_ptr + o_out, to_dtype_of(b_dv, dv_ptr), mask=in_cols[:, None])
