"""Backward pass, second half: dK and dV, one program per block of keys, after δ and dQ. No atomics.

Comments give the lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 2.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from flashpoint_kernels.addressing import block_and_head, head_of, load_rows, token_offsets
from flashpoint_kernels.rounding import Noise, as_operand, product, round_point, to_dtype_of
from flashpoint_kernels.scores import probabilities, tile_scores


class Inputs(NamedTuple):
    """What dK and dV are made of: [B, H, T, d] by descriptors, and what dQ's kernel stored by pointers."""

    q_desc: tl.tensor
    k_desc: tl.tensor
    v_desc: tl.tensor
    grad_out_desc: tl.tensor
    rows_ptr: tl.tensor
    """L and δ: two planes [B·H, T_ROWS] of PLANE elements."""
    T_ROWS: tl.tensor
    PLANE: tl.tensor
    drift_ptr: tl.tensor
    """[B·H, DRIFTS, D]: what centring takes off dK."""
    DRIFTS: tl.tensor


class Outputs(NamedTuple):
    """What the kernel stores."""

    grad_k_ptr: tl.tensor
    grad_v_ptr: tl.tensor


class Keys(NamedTuple):
    """The block of keys of a program."""

    k: tl.tensor
    """[BK, D], an operand."""
    v: tl.tensor
    """[BK, D], an operand."""
    positions: tl.tensor
    """[BK, 1], of the keys in the sequence."""


class Sums(NamedTuple):
    """What a pass over the queries adds up for a block of keys, [BK, D] FP32. If blocks of queries are rounded, it is
    that of the block of queries at hand and of those before."""

    grad_k: tl.tensor
    grad_v: tl.tensor
    grad_k_before: tl.tensor
    grad_v_before: tl.tensor


@triton.jit
def add_queries(
    sums, keys, inputs, noise, start, head,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the sums with one more tile of queries, from ``start`` on. Tiles are [BK, BQ]: keys by queries."""
    PROBS: tl.constexpr = C.probs_backward
    GRAD_PROBS: tl.constexpr = C.grad_probs
    GRAD_SCORES: tl.constexpr = C.grad_scores
    K_BLOCKS: tl.constexpr = C.grad_k_blocks
    V_BLOCKS: tl.constexpr = C.grad_v_blocks
    T, columns = head.length, keys.positions
    b_dk, b_dv, b_dk_before, b_dv_before = sums.grad_k, sums.grad_v, sums.grad_k_before, sums.grad_v_before
    o_rows = start + tl.arange(0, BQ)
    rows = o_rows[None, :]
    b_q = load_rows(inputs.q_desc, head, start, BQ, D)
    b_do = load_rows(inputs.grad_out_desc, head, start, BQ, D)
    rows_ptr = inputs.rows_ptr + head.number.to(tl.int64) * inputs.T_ROWS
    b_lse = tl.load(rows_ptr + o_rows)
    b_delta = tl.load(rows_ptr + inputs.PLANE + o_rows)
    b_s = tile_scores(keys.k, tl.trans(b_q), rows, columns, T, noise, C, MASKED, False)
    b_p = probabilities(b_s, b_lse[None, :], C)
    b_p_operand = as_operand(b_p, PROBS, noise, rows, columns)
    b_dv = product(b_p_operand, b_do, b_dv)  # line 12
    b_dp = product(keys.v, tl.trans(b_do), tl.zeros([BK, BQ], tl.float32))  # line 13
    b_dp = round_point(b_dp, GRAD_PROBS, noise, 0, rows, columns)
    b_ds = b_p * (b_dp - b_delta[None, :])  # line 14
    b_ds_operand = as_operand(b_ds, GRAD_SCORES, noise, rows, columns)
    b_dk = product(b_ds_operand, b_q, b_dk)  # line 16
    if K_BLOCKS.mode != "none":  # noqa: SIM102 - known when compiling
        if (start + BQ) % C.block_k == 0 or start + BQ >= T:
            block, features = start // C.block_k, tl.arange(0, D)[None, :]
            b_dk = round_point(b_dk, K_BLOCKS, noise, block, columns, features)
            b_dv = round_point(b_dv, V_BLOCKS, noise, block, columns, features)
            b_dk_before, b_dk = b_dk_before + b_dk, tl.zeros([BK, D], tl.float32)
            b_dv_before, b_dv = b_dv_before + b_dv, tl.zeros([BK, D], tl.float32)
    return Sums(b_dk, b_dv, b_dk_before, b_dv_before)


@triton.jit
def drift_of(inputs, head, D: tl.constexpr):
    """Return Σᵢ (Σⱼ dSᵢⱼ) qᵢ [D] of all queries."""
    b_drift = tl.zeros([D], tl.float32)
    for first in range(0, inputs.DRIFTS, 16):
        numbers = (first + tl.arange(0, 16))[:, None]
        o_drifts = (head.number.to(tl.int64) * inputs.DRIFTS + numbers) * D
        pointers = inputs.drift_ptr + o_drifts + tl.arange(0, D)[None, :]
        b_drift += tl.sum(tl.load(pointers, mask=numbers < inputs.DRIFTS, other=0.0), 0)
    return b_drift


@triton.jit
def flash_bwd_dkdv_keys(
    inputs, outputs, noise, i_k, head, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr
):
    """Store dK and dV [BK, D] of one block of keys, over all queries that see it."""
    T = head.length
    o_cols = i_k * BK + tl.arange(0, BK)
    columns = o_cols[:, None]
    b_k = load_rows(inputs.k_desc, head, i_k * BK, BK, D)
    b_v = load_rows(inputs.v_desc, head, i_k * BK, BK, D)
    keys, nothing = Keys(b_k, b_v, columns), tl.zeros([BK, D], tl.float32)
    sums = Sums(nothing, nothing, nothing, nothing)
    diagonal, below = (i_k * BK) // BQ * BQ, tl.cdiv((i_k + 1) * BK, BQ) * BQ
    if not C.causal:  # all queries see every key; what keys past the end get is not stored
        diagonal, below = 0, 0
    # Blocks that are rounded come in one pass, in which every tile is masked.
    ONE_PASS: tl.constexpr = C.grad_k_blocks.mode != "none"
    for on_diagonal in tl.static_range(1 if ONE_PASS else 0, 2):
        first, last = (diagonal, T if ONE_PASS else tl.minimum(below, T)) if on_diagonal else (below, T)
        for start in range(first, last, BQ):
            sums = add_queries(sums, keys, inputs, noise, start, head, D, BQ, BK, C, on_diagonal)
    b_dk, b_dv = sums.grad_k, sums.grad_v
    if ONE_PASS:
        b_dk, b_dv = sums.grad_k_before, sums.grad_v_before
    if C.center_keys:
        b_dk -= drift_of(inputs, head, D)[None, :] / T
    ALPHA: tl.constexpr = C.prescale * C.unit
    offsets = token_offsets(head, o_cols, D)
    tl.store(outputs.grad_k_ptr + offsets, to_dtype_of(b_dk * ALPHA, outputs.grad_k_ptr), mask=columns < T)
    tl.store(outputs.grad_v_ptr + offsets, to_dtype_of(b_dv, outputs.grad_v_ptr), mask=columns < T)


@triton.jit(do_not_specialize=["B", "layer"])  # one compilation for all layers and batch sizes
def flash_bwd_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, drift_ptr, dk_ptr, dv_ptr, noise_ptr, selected_ptr,
    B, H, T, T_ROWS, PLANE, DRIFTS, layer, GROUP,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, ELSEWHERE: tl.constexpr,
):  # fmt: skip
    """Run C for all heads, or for the selected ones and ELSEWHERE for the others."""
    i_k, i_bh = block_and_head(tl.cdiv(T, BK), B * H, GROUP)
    head, noise = head_of(i_bh, H, T), Noise(noise_ptr, layer, i_bh)
    inputs = Inputs(q_desc, k_desc, v_desc, do_desc, rows_ptr, T_ROWS, PLANE, drift_ptr, DRIFTS)
    outputs = Outputs(dk_ptr, dv_ptr)
    if ELSEWHERE is None or tl.load(selected_ptr + head.index) != 0:
        flash_bwd_dkdv_keys(inputs, outputs, noise, i_k, head, D, BQ, BK, C)
    else:
        flash_bwd_dkdv_keys(inputs, outputs, noise, i_k, head, D, BQ, BK, ELSEWHERE)
