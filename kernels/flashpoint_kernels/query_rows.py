"""A block of queries in the backward pass: what δ can be made of."""

from typing import NamedTuple

import triton
import triton.language as tl

from flashpoint_kernels.addressing import Head, load_rows
from flashpoint_kernels.rounding import Noise, product, round_point
from flashpoint_kernels.scores import probabilities, tile_scores


class QueryRows(NamedTuple):
    """Tiles of the block, and where the rest of its sequence and head lies."""

    q: tl.tensor
    """[BQ, D], an operand."""
    grad_out: tl.tensor
    """dO [BQ, D], an operand."""
    logsumexp: tl.tensor
    """L [BQ], FP32; +∞ past the last query."""
    positions: tl.tensor
    """[BQ], of the queries in the sequence."""
    column: tl.tensor
    """The same [BQ, 1]."""
    offsets: tl.tensor
    """[BQ, D], of the rows in O."""
    out_ptr: tl.tensor
    """O as returned."""
    saved_out_ptr: tl.tensor
    """What the forward pass saved beside it."""
    k_desc: tl.tensor
    v_desc: tl.tensor
    block: tl.tensor
    """Number of the block of queries."""
    head: Head
    noise: Noise


@triton.jit
def rows_of(ptr, rows):
    """Return the rows [BQ, D] of O, or of what lies as O does; 0 past the last query."""
    return tl.load(ptr + rows.offsets, mask=rows.column < rows.head.length, other=0)


@triton.jit
def seen_keys(i_q, T, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return how many keys all queries of a block see in tiles that need no mask, and where the keys they see end."""
    if C.causal:
        whole, end = i_q * BQ, tl.minimum((i_q + 1) * BQ, T)
    else:
        whole, end = T // BK * BK, T
    return whole, end


@triton.jit
def probs_of(rows, b_k, columns, C: tl.constexpr, MASKED: tl.constexpr):
    """Return P [BQ, BK] of the tile of keys ``b_k`` at ``columns``, FP32."""
    b_s = tile_scores(rows.q, tl.trans(b_k), rows.column, columns, rows.head.length, rows.noise, C, MASKED, False)
    return probabilities(b_s, rows.logsumexp[:, None], C)


@triton.jit
def grad_probs_of(rows, b_v, columns, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return dP [BQ, BK] of the tile of values ``b_v`` at ``columns``, rounded: line 13."""
    GRAD_PROBS: tl.constexpr = C.grad_probs
    b_dp = product(rows.grad_out, tl.trans(b_v), tl.zeros([BQ, BK], tl.float32))
    return round_point(b_dp, GRAD_PROBS, rows.noise, 0, rows.column, columns)


@triton.jit
def row_sums(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASS: tl.constexpr):
    """Return Σ_j P_ij·dP_ij and, with MASS, Σ_j P_ij, [BQ] each: a pass over the keys of its own."""
    whole, end = seen_keys(rows.block, rows.head.length, BQ, BK, C)
    b_sum, b_mass = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
    for masked in tl.static_range(2):
        first, last = (whole, end) if masked else (0, tl.minimum(whole, end))
        for start in range(first, last, BK):
            columns = (start + tl.arange(0, BK))[None, :]
            b_k = load_rows(rows.k_desc, rows.head, start, BK, D)
            b_v = load_rows(rows.v_desc, rows.head, start, BK, D)
            b_p = probs_of(rows, b_k, columns, C, masked)
            b_dp = grad_probs_of(rows, b_v, columns, BQ, BK, C)
            b_sum += tl.sum(b_p * b_dp, 1)
            if MASS:
                b_mass += tl.sum(b_p, 1)
    return b_sum, b_mass
