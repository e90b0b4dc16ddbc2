"""Backward pass, first half: δ and dQ, one program per block of queries. No atomics.

Comments give the lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 2.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from flashpoint_kernels.addressing import block_and_head, head_of, load_rows, token_offsets
from flashpoint_kernels.delta_rules import delta_by_rule
from flashpoint_kernels.query_rows import QueryRows, grad_probs_of, probs_of, row_sums, rows_of, seen_keys
from flashpoint_kernels.rounding import Noise, as_operand, noise_words, product, round_point, to_dtype_of


class Inputs(NamedTuple):
    """What dQ is made of: [B, H, T, d] by descriptors, and what the forward pass saved by pointers."""

    q_desc: tl.tensor
    k_desc: tl.tensor
    centered_desc: tl.tensor
    """dQ's keys where C.center_grad_q."""
    v_desc: tl.tensor
    grad_out_desc: tl.tensor
    out_ptr: tl.tensor
    saved_out_ptr: tl.tensor
    logsumexp_ptr: tl.tensor


class Outputs(NamedTuple):
    """What the kernel stores."""

    rows_ptr: tl.tensor
    """Two planes [B·H, T_ROWS] of PLANE elements for the other half: L, +∞ past the end, so that P is 0 there, and dK's
    δ."""
    T_ROWS: tl.tensor
    PLANE: tl.tensor
    drift_ptr: tl.tensor
    """[B·H, blocks, D]: Σᵢ (Σⱼ dSᵢⱼ) qᵢ, which centring takes off dK."""
    grad_q_ptr: tl.tensor


class Sums(NamedTuple):
    """What a pass over the keys adds up for a block of queries, FP32."""

    grad_q: tl.tensor
    """dQ [BQ, D]; if blocks of keys are rounded, of the block of keys at hand."""
    grad_q_before: tl.tensor
    """[BQ, D], of the blocks of keys before."""
    attended: tl.tensor
    """PK [BQ, D], and with it the row sums [BQ] of dS and P, if they correct δ after the pass."""
    left: tl.tensor
    mass: tl.tensor
    drift: tl.tensor
    """Σⱼ dSᵢⱼ [BQ, 16] in every column: the matrix units' narrowest product."""


@triton.jit
def delta_error(rows, sizes_ptr, C: tl.constexpr):
    """Return what is injected into δ [BQ]: size · |dO|₂ · |O|₂, with a random sign for ``noise``.

    ``sizes_ptr`` has the sizes that follow each other, if there are several: C.delta_error_sizes float32.
    """
    b_o = rows_of(rows.out_ptr, rows)
    b_do, b_o = rows.grad_out.to(tl.float32), b_o.to(tl.float32)
    size = C.delta_error_size
    if C.delta_error_sizes > 0:
        number = tl.load(rows.noise.key_ptr + 1) // C.delta_error_interval
        size = tl.load(sizes_ptr + tl.minimum(number, C.delta_error_sizes - 1))
    b_error = size * tl.sqrt_rn(tl.sum(b_do * b_do, 1)) * tl.sqrt_rn(tl.sum(b_o * b_o, 1))
    if C.delta_error == "noise":
        words = noise_words(rows.noise, C.delta_error_stream, 0, rows.positions, rows.positions * 0)
        b_error = tl.where(words >> 31 == 1, -b_error, b_error)
    return b_error


@triton.jit
def with_error(b_delta, rows, sizes_ptr, C: tl.constexpr):
    """Return δ of dQ and of dK, with the error injected into those that take it."""
    b_delta_of_k = b_delta
    if C.delta_error != "none":
        b_erring = b_delta + delta_error(rows, sizes_ptr, C)
        if C.delta_error_into != "grad_q":
            b_delta_of_k = b_erring
        if C.delta_error_into != "grad_k":
            b_delta = b_erring
    return b_delta, b_delta_of_k


@triton.jit
def row_delta(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return δ [BQ] without an injected error; with exact row sums in one pass, the δ to begin with."""
    if C.exact_row_sum and C.exact_row_sum_passes == 2:
        b_sum, b_mass = row_sums(rows, D, BQ, BK, C, True)
        b_delta = b_sum / tl.where(rows.positions < rows.head.length, b_mass, 1.0)
    else:
        b_delta = delta_by_rule(rows, D, BQ, BK, C)  # line 4
    return b_delta


@triton.jit
def add_keys(
    sums, rows, centered_desc, b_delta, start, end,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
    IN_ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Return the sums with one more tile of keys, from ``start`` on, of the keys up to ``end``."""
    GRAD_SCORES: tl.constexpr = C.grad_scores
    PROBS: tl.constexpr = C.probs_backward
    BLOCKS: tl.constexpr = C.grad_blocks
    columns = (start + tl.arange(0, BK))[None, :]
    b_dq, b_dq_before, b_attended = sums.grad_q, sums.grad_q_before, sums.attended
    b_left, b_mass, b_drift = sums.left, sums.mass, sums.drift
    b_k = load_rows(rows.k_desc, rows.head, start, BK, D)
    b_p = probs_of(rows, b_k, columns, C, MASKED)  # line 11
    b_v = load_rows(rows.v_desc, rows.head, start, BK, D)
    b_dp = grad_probs_of(rows, b_v, columns, BQ, BK, C)  # line 13
    b_ds = b_p * (b_dp - b_delta[:, None])  # line 14
    b_ds_operand = as_operand(b_ds, GRAD_SCORES, rows.noise, rows.column, columns)
    if C.center_grad_q:
        b_k = load_rows(centered_desc, rows.head, start, BK, D)
    b_dq = product(b_ds_operand, b_k, b_dq)  # line 15
    if IN_ONE_PASS:
        b_attended = product(as_operand(b_p, PROBS, rows.noise, rows.column, columns), b_k, b_attended)
        b_left += tl.sum(b_ds, 1)
        b_mass += tl.sum(b_p, 1)
    if BLOCKS.mode != "none":  # noqa: SIM102 - known when compiling
        if (start + BK) % C.block_k == 0 or start + BK >= end:
            features = tl.arange(0, D)[None, :]
            b_dq = round_point(b_dq, BLOCKS, rows.noise, start // C.block_k, rows.column, features)
            b_dq_before, b_dq = b_dq_before + b_dq, tl.zeros([BQ, D], tl.float32)
    if C.center_keys:
        b_drift = product(b_ds_operand, tl.full([BK, 16], 1.0, b_k.dtype), b_drift)
    return Sums(b_dq, b_dq_before, b_attended, b_left, b_mass, b_drift)


@triton.jit
def flash_bwd_dq_rows(
    inputs, outputs, sizes_ptr, noise, i_q, head,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store δ and dQ [BQ, D] of one block of queries."""
    IN_ONE_PASS: tl.constexpr = C.exact_row_sum and C.exact_row_sum_passes == 1
    positions = i_q * BQ + tl.arange(0, BQ)
    column, in_rows = positions[:, None], positions < head.length
    b_q = load_rows(inputs.q_desc, head, i_q * BQ, BQ, D)
    b_do = load_rows(inputs.grad_out_desc, head, i_q * BQ, BQ, D)
    offsets = token_offsets(head, positions, D)
    logsumexp_ptr = inputs.logsumexp_ptr + head.number.to(tl.int64) * head.length
    b_lse = tl.load(logsumexp_ptr + positions, mask=in_rows, other=float("inf"))
    rows_ptr = outputs.rows_ptr + head.number.to(tl.int64) * outputs.T_ROWS
    tl.store(rows_ptr + positions, b_lse)
    whole, end = seen_keys(i_q, head.length, BQ, BK, C)
    rows = QueryRows(
        b_q, b_do, b_lse, positions, column, offsets, inputs.out_ptr, inputs.saved_out_ptr, inputs.k_desc,
        inputs.v_desc, i_q, head, noise,
    )  # fmt: skip
    b_delta = row_delta(rows, D, BQ, BK, C)
    if not IN_ONE_PASS:
        b_delta, b_delta_of_k = with_error(b_delta, rows, sizes_ptr, C)
        tl.store(rows_ptr + outputs.PLANE + positions, b_delta_of_k)
    no_row, nothing = tl.zeros([BQ], tl.float32), tl.zeros([BQ, D], tl.float32)
    sums = Sums(nothing, nothing, nothing, no_row, no_row, tl.zeros([BQ, 16], tl.float32))
    for masked in tl.static_range(2):
        first, last = (whole, end) if masked else (0, tl.minimum(whole, end))
        for start in range(first, last, BK):
            sums = add_keys(sums, rows, inputs.centered_desc, b_delta, start, end, D, BQ, BK, C, masked, IN_ONE_PASS)
    if C.center_keys:
        b_row_sum = tl.max(sums.drift, 1)
        o_drift = (head.number.to(tl.int64) * tl.cdiv(head.length, BQ) + i_q) * D + tl.arange(0, D)
        tl.store(outputs.drift_ptr + o_drift, tl.sum(b_row_sum[:, None] * b_q.to(tl.float32), 0))
    b_dq = sums.grad_q
    if C.grad_blocks.mode != "none":
        b_dq = sums.grad_q_before
    if IN_ONE_PASS:
        b_left, b_left_of_k = with_error(sums.left / tl.where(in_rows, sums.mass, 1.0), rows, sizes_ptr, C)
        tl.store(rows_ptr + outputs.PLANE + positions, b_delta + b_left_of_k)
        b_dq -= b_left[:, None] * sums.attended
    ALPHA: tl.constexpr = C.prescale * C.unit
    tl.store(outputs.grad_q_ptr + offsets, to_dtype_of(b_dq * ALPHA, outputs.grad_q_ptr), mask=column < head.length)


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
    head, noise = head_of(i_bh, H, T), Noise(noise_ptr, layer, i_bh)
    inputs = Inputs(q_desc, k_desc, centered_desc, v_desc, do_desc, o_ptr, o_delta_ptr, lse_ptr)
    outputs = Outputs(rows_ptr, T_ROWS, PLANE, drift_ptr, dq_ptr)
    if ELSEWHERE is None or tl.load(selected_ptr + head.index) != 0:
        flash_bwd_dq_rows(inputs, outputs, sizes_ptr, noise, i_q, head, D, BQ, BK, C)
    else:
        flash_bwd_dq_rows(inputs, outputs, sizes_elsewhere_ptr, noise, i_q, head, D, BQ, BK, ELSEWHERE)
