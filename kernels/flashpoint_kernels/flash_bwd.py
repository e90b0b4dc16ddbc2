"""Backward pass: δ with dQ (one program per block of queries), then dK and dV (one per block of keys). No atomics.

Comments give the lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 2.
"""

import triton
import triton.language as tl

from flashpoint_kernels.addressing import block_and_head, load_rows, token_offsets
from flashpoint_kernels.delta_rules import delta_by_rule
from flashpoint_kernels.query_rows import QueryRows, row_sums, seen_keys
from flashpoint_kernels.rounding import as_operand, noise_words, product, round_point, to_dtype_of
from flashpoint_kernels.scores import probabilities, tile_scores


@triton.jit
def delta_error(b_do, b_o, o_rows, noise_ptr, sizes_ptr, layer, i_bh, C: tl.constexpr):
    """Return what is injected into δ [BQ]: size · |dO|₂ · |O|₂, with a random sign for ``noise``.

    ``sizes_ptr`` has the sizes that follow each other, if there are several: C.delta_error_sizes float32.
    """
    b_do, b_o = b_do.to(tl.float32), b_o.to(tl.float32)
    size = C.delta_error_size
    if C.delta_error_sizes > 0:
        number = tl.load(noise_ptr + 1) // C.delta_error_interval
        size = tl.load(sizes_ptr + tl.minimum(number, C.delta_error_sizes - 1))
    b_error = size * tl.sqrt_rn(tl.sum(b_do * b_do, 1)) * tl.sqrt_rn(tl.sum(b_o * b_o, 1))
    if C.delta_error == "noise":
        words = noise_words(noise_ptr, layer, C.delta_error_stream, 0, i_bh, o_rows, o_rows * 0)
        b_error = tl.where(words >> 31 == 1, -b_error, b_error)
    return b_error


@triton.jit
def row_delta(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return δ [BQ] without an injected error; with exact row sums in one pass, the δ to begin with."""
    if C.exact_row_sum and C.exact_row_sum_passes == 2:
        b_sum, b_mass = row_sums(rows, D, BQ, BK, C, True)
        b_delta = b_sum / tl.where(rows.positions < rows.T, b_mass, 1.0)
    else:
        b_delta = delta_by_rule(rows, D, BQ, BK, C)  # line 4
    return b_delta


@triton.jit
def with_error(b_delta, b_do, o_ptr, noise_ptr, sizes_ptr, o_token, o_rows, i_bh, T, layer, C: tl.constexpr):
    """Return δ of dQ and of dK, with the error injected into those that take it."""
    b_delta_of_k = b_delta
    if C.delta_error != "none":
        b_returned = tl.load(o_ptr + o_token, mask=o_rows[:, None] < T, other=0.0)
        b_erring = b_delta + delta_error(b_do, b_returned, o_rows, noise_ptr, sizes_ptr, layer, i_bh, C)
        if C.delta_error_into != "grad_q":
            b_delta_of_k = b_erring
        if C.delta_error_into != "grad_k":
            b_delta = b_erring
    return b_delta, b_delta_of_k


@triton.jit
def flash_bwd_dq_rows(
    q_desc, k_desc, centered_desc, v_desc, do_desc, o_ptr, o_delta_ptr, lse_ptr, rows_ptr, drift_ptr, dq_ptr,
    noise_ptr, sizes_ptr, i_q, i_bh, H, T, T_ROWS, PLANE, layer,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store δ and dQ [BQ, D] of one block of queries; ``centered_desc`` has dQ's keys where C.center_grad_q.

    For the other kernel, ``rows_ptr``, two planes [B·H, T_ROWS] of PLANE elements, takes L (+∞ past the end, so that P
    is 0 there) and dK's δ; ``drift_ptr`` [B·H, blocks, D] takes Σᵢ (Σⱼ dSᵢⱼ) qᵢ, which centring takes off dK.
    """
    GRAD_PROBS: tl.constexpr = C.grad_probs
    GRAD_SCORES: tl.constexpr = C.grad_scores
    PROBS: tl.constexpr = C.probs_backward
    BLOCKS: tl.constexpr = C.grad_blocks
    i_b, i_h = i_bh // H, i_bh % H
    o_rows = i_q * BQ + tl.arange(0, BQ)
    rows, in_rows, features = o_rows[:, None], o_rows < T, tl.arange(0, D)[None, :]
    b_q = load_rows(q_desc, i_b, i_h, i_q * BQ, BQ, D)
    b_do = load_rows(do_desc, i_b, i_h, i_q * BQ, BQ, D)
    o_token = token_offsets(i_b, i_h, o_rows, H, T, D)
    b_lse = tl.load(lse_ptr + i_bh.to(tl.int64) * T + o_rows, mask=in_rows, other=float("inf"))
    rows_ptr += i_bh.to(tl.int64) * T_ROWS
    tl.store(rows_ptr + o_rows, b_lse)
    whole, end = seen_keys(i_q, T, BQ, BK, C)

    queries = QueryRows(
        b_q, b_do, b_lse, o_rows, o_token, o_ptr, o_delta_ptr, k_desc, v_desc, noise_ptr, i_q, i_bh, H, T, layer
    )
    b_delta = row_delta(queries, D, BQ, BK, C)
    IN_ONE_PASS: tl.constexpr = C.exact_row_sum and C.exact_row_sum_passes == 1
    if not IN_ONE_PASS:
        b_delta, b_delta_of_k = with_error(
            b_delta, b_do, o_ptr, noise_ptr, sizes_ptr, o_token, o_rows, i_bh, T, layer, C
        )
        tl.store(rows_ptr + PLANE + o_rows, b_delta_of_k)

    b_dq = tl.zeros([BQ, D], tl.float32)
    b_dq_before = b_dq  # of the blocks of keys before this one, if each is rounded
    b_attended = b_dq  # PK, and the row sums of dS and P, if they correct δ after the pass
    b_row_left, b_mass = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
    b_drift = tl.zeros([BQ, 16], tl.float32)  # Σⱼ dSᵢⱼ in every column: the matrix units' narrowest product
    for masked in tl.static_range(2):
        first, last = (whole, end) if masked else (0, tl.minimum(whole, end))
        for start in range(first, last, BK):
            columns = (start + tl.arange(0, BK))[None, :]
            b_k = load_rows(k_desc, i_b, i_h, start, BK, D)
            b_s = tile_scores(b_q, tl.trans(b_k), rows, columns, T, noise_ptr, layer, i_bh, C, masked, False)
            b_p = probabilities(b_s, b_lse[:, None], C)
            b_v = load_rows(v_desc, i_b, i_h, start, BK, D)
            b_dp = product(b_do, tl.trans(b_v), tl.zeros([BQ, BK], tl.float32))  # line 13
            b_dp = round_point(b_dp, GRAD_PROBS, noise_ptr, layer, 0, i_bh, rows, columns)
            b_ds = b_p * (b_dp - b_delta[:, None])  # line 14
            b_ds_operand = as_operand(b_ds, GRAD_SCORES, noise_ptr, layer, i_bh, rows, columns)
            if C.center_grad_q:
                b_k = load_rows(centered_desc, i_b, i_h, start, BK, D)
            b_dq = product(b_ds_operand, b_k, b_dq)  # line 15
            if IN_ONE_PASS:
                b_p_operand = as_operand(b_p, PROBS, noise_ptr, layer, i_bh, rows, columns)
                b_attended = product(b_p_operand, b_k, b_attended)
                b_row_left += tl.sum(b_ds, 1)
                b_mass += tl.sum(b_p, 1)
            if BLOCKS.mode != "none":  # noqa: SIM102 - known when compiling
                if (start + BK) % C.block_k == 0 or start + BK >= end:
                    b_dq = round_point(b_dq, BLOCKS, noise_ptr, layer, start // C.block_k, i_bh, rows, features)
                    b_dq_before, b_dq = b_dq_before + b_dq, tl.zeros([BQ, D], tl.float32)
            if C.center_keys:
                b_drift = product(b_ds_operand, tl.full([BK, 16], 1.0, b_k.dtype), b_drift)
    if C.center_keys:
        b_row_sum = tl.max(b_drift, 1)
        o_drift = (i_bh.to(tl.int64) * tl.cdiv(T, BQ) + i_q) * D + tl.arange(0, D)
        tl.store(drift_ptr + o_drift, tl.sum(b_row_sum[:, None] * b_q.to(tl.float32), 0))
    if BLOCKS.mode != "none":
        b_dq = b_dq_before
    if IN_ONE_PASS:
        b_left, b_left_of_k = with_error(
            b_row_left / tl.where(in_rows, b_mass, 1.0), b_do, o_ptr, noise_ptr, sizes_ptr, o_token, o_rows, i_bh, T,
            layer, C,
        )  # fmt: skip
        tl.store(rows_ptr + PLANE + o_rows, b_delta + b_left_of_k)
        b_dq -= b_left[:, None] * b_attended
    ALPHA: tl.constexpr = C.prescale * C.unit
    tl.store(dq_ptr + o_token, to_dtype_of(b_dq * ALPHA, dq_ptr), mask=rows < T)


@triton.jit
def flash_bwd_dkdv_keys(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, drift_ptr, dk_ptr, dv_ptr, noise_ptr,
    i_k, i_bh, H, T, T_ROWS, PLANE, DRIFTS, layer,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store dK and dV [BK, D] of one block of keys, over all queries that see it. Tiles are [BK, BQ]: keys by
    queries."""
    PROBS: tl.constexpr = C.probs_backward
    GRAD_PROBS: tl.constexpr = C.grad_probs
    GRAD_SCORES: tl.constexpr = C.grad_scores
    K_BLOCKS: tl.constexpr = C.grad_k_blocks
    V_BLOCKS: tl.constexpr = C.grad_v_blocks
    i_b, i_h = i_bh // H, i_bh % H
    o_cols = i_k * BK + tl.arange(0, BK)
    columns, features = o_cols[:, None], tl.arange(0, D)[None, :]
    b_k = load_rows(k_desc, i_b, i_h, i_k * BK, BK, D)
    b_v = load_rows(v_desc, i_b, i_h, i_k * BK, BK, D)
    rows_ptr += i_bh.to(tl.int64) * T_ROWS
    b_dk, b_dv = tl.zeros([BK, D], tl.float32), tl.zeros([BK, D], tl.float32)
    b_dk_before, b_dv_before = b_dk, b_dv  # of the blocks of queries before this one, if each is rounded
    diagonal, below = (i_k * BK) // BQ * BQ, tl.cdiv((i_k + 1) * BK, BQ) * BQ
    if not C.causal:  # all queries see every key; what keys past the end get is not stored
        diagonal, below = 0, 0
    # Blocks that are rounded come in one pass, in which every tile is masked.
    ONE_PASS: tl.constexpr = K_BLOCKS.mode != "none"
    for on_diagonal in tl.static_range(1 if ONE_PASS else 0, 2):
        first, last = (diagonal, T if ONE_PASS else tl.minimum(below, T)) if on_diagonal else (below, T)
        for start in range(first, last, BQ):
            o_rows = start + tl.arange(0, BQ)
            rows = o_rows[None, :]
            b_q = load_rows(q_desc, i_b, i_h, start, BQ, D)
            b_do = load_rows(do_desc, i_b, i_h, start, BQ, D)
            b_lse = tl.load(rows_ptr + o_rows)
            b_delta = tl.load(rows_ptr + PLANE + o_rows)
            b_s = tile_scores(b_k, tl.trans(b_q), rows, columns, T, noise_ptr, layer, i_bh, C, on_diagonal, False)
            b_p = probabilities(b_s, b_lse[None, :], C)
            b_p_operand = as_operand(b_p, PROBS, noise_ptr, layer, i_bh, rows, columns)
            b_dv = product(b_p_operand, b_do, b_dv)  # line 12
            b_dp = product(b_v, tl.trans(b_do), tl.zeros([BK, BQ], tl.float32))  # line 13
            b_dp = round_point(b_dp, GRAD_PROBS, noise_ptr, layer, 0, i_bh, rows, columns)
            b_ds = b_p * (b_dp - b_delta[None, :])  # line 14
            b_ds_operand = as_operand(b_ds, GRAD_SCORES, noise_ptr, layer, i_bh, rows, columns)
            b_dk = product(b_ds_operand, b_q, b_dk)  # line 16
            if K_BLOCKS.mode != "none":  # noqa: SIM102
                if (start + BQ) % C.block_k == 0 or start + BQ >= T:
                    block = start // C.block_k
                    b_dk = round_point(b_dk, K_BLOCKS, noise_ptr, layer, block, i_bh, columns, features)
                    b_dv = round_point(b_dv, V_BLOCKS, noise_ptr, layer, block, i_bh, columns, features)
                    b_dk_before, b_dk = b_dk_before + b_dk, tl.zeros([BK, D], tl.float32)
                    b_dv_before, b_dv = b_dv_before + b_dv, tl.zeros([BK, D], tl.float32)
    if K_BLOCKS.mode != "none":
        b_dk, b_dv = b_dk_before, b_dv_before
    if C.center_keys:
        b_drift = tl.zeros([D], tl.float32)
        for first_drift in range(0, DRIFTS, 16):
            numbers = (first_drift + tl.arange(0, 16))[:, None]
            pointers = drift_ptr + (i_bh.to(tl.int64) * DRIFTS + numbers) * D + tl.arange(0, D)[None, :]
            b_drift += tl.sum(tl.load(pointers, mask=numbers < DRIFTS, other=0.0), 0)
        b_dk -= b_drift[None, :] / T
    ALPHA: tl.constexpr = C.prescale * C.unit
    o_token = token_offsets(i_b, i_h, o_cols, H, T, D)
    tl.store(dk_ptr + o_token, to_dtype_of(b_dk * ALPHA, dk_ptr), mask=columns < T)
    tl.store(dv_ptr + o_token, to_dtype_of(b_dv, dv_ptr), mask=columns < T)


@triton.jit(do_not_specialize=["B", "layer"])  # one compilation for all layers and batch sizes
def flash_bwd_dq_kernel(
    q_desc, k_desc, centered_desc, v_desc, do_desc, o_ptr, o_delta_ptr, lse_ptr, rows_ptr, drift_ptr, dq_ptr,
    noise_ptr, sizes_ptr, sizes_elsewhere_ptr, selected_ptr, B, H, T, T_ROWS, PLANE, layer, GROUP,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, ELSEWHERE: tl.constexpr,
):  # fmt: skip
    """Run C for all heads, or for the selected ones and ELSEWHERE for the others."""
    n_blocks = tl.cdiv(T, BQ)
    i_q, i_bh = block_and_head(n_blocks, B * H, GROUP)
    i_q = n_blocks - 1 - i_q  # the longest rows first
    if ELSEWHERE is None or tl.load(selected_ptr + i_bh % H) != 0:
        flash_bwd_dq_rows(
            q_desc, k_desc, centered_desc, v_desc, do_desc, o_ptr, o_delta_ptr, lse_ptr, rows_ptr, drift_ptr,
            dq_ptr, noise_ptr, sizes_ptr, i_q, i_bh, H, T, T_ROWS, PLANE, layer, D, BQ, BK, C,
        )  # fmt: skip
    else:
        flash_bwd_dq_rows(
            q_desc, k_desc, centered_desc, v_desc, do_desc, o_ptr, o_delta_ptr, lse_ptr, rows_ptr, drift_ptr,
            dq_ptr, noise_ptr, sizes_elsewhere_ptr, i_q, i_bh, H, T, T_ROWS, PLANE, layer, D, BQ, BK, ELSEWHERE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "layer"])  # one compilation for all layers and batch sizes
def flash_bwd_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, drift_ptr, dk_ptr, dv_ptr, noise_ptr, selected_ptr,
    B, H, T, T_ROWS, PLANE, DRIFTS, layer, GROUP,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, ELSEWHERE: tl.constexpr,
):  # fmt: skip
    """Run C for all heads, or for the selected ones and ELSEWHERE for the others."""
    i_k, i_bh = block_and_head(tl.cdiv(T, BK), B * H, GROUP)
    if ELSEWHERE is None or tl.load(selected_ptr + i_bh % H) != 0:
        flash_bwd_dkdv_keys(
            q_desc, k_desc, v_desc, do_desc, rows_ptr, drift_ptr, dk_ptr, dv_ptr, noise_ptr,
            i_k, i_bh, H, T, T_ROWS, PLANE, DRIFTS, layer, D, BQ, BK, C,
        )  # fmt: skip
    else:
        flash_bwd_dkdv_keys(
            q_desc, k_desc, v_desc, do_desc, rows_ptr, drift_ptr, dk_ptr, dv_ptr, noise_ptr,
            i_k, i_bh, H, T, T_ROWS, PLANE, DRIFTS, layer, D, BQ, BK, ELSEWHERE,
        )  # fmt: skip
