"""Forward pass: O, L and, where a variant asks, another O for δ. One program per head and block of queries.

Comments give the lines of FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from flashpoint_kernels.addressing import Head, block_and_head, head_of, load_rows, token_offsets
from flashpoint_kernels.residual import residual
from flashpoint_kernels.rounding import (
    BF16_BITS,
    Noise,
    as_operand,
    divide,
    exponential,
    in_registers,
    product,
    round_point,
    to_dtype_of,
)
from flashpoint_kernels.scores import exponentials, merge_two_largest, row_maxima, tile_scores, two_largest


class Inputs(NamedTuple):
    """Descriptors of [B, H, T, d]."""

    q_desc: tl.tensor
    k_desc: tl.tensor
    v_desc: tl.tensor


class Outputs(NamedTuple):
    """What the kernel stores: O and what is saved for δ as [B, T, H, D], the others as [B, H, T]."""

    out_ptr: tl.tensor
    saved_out_ptr: tl.tensor
    logsumexp_ptr: tl.tensor
    shift_ptr: tl.tensor
    ones_ptr: tl.tensor


class Queries(NamedTuple):
    """The block of queries of a program."""

    q: tl.tensor
    """[BQ, D], an operand."""
    positions: tl.tensor
    """[BQ], in the sequence."""
    column: tl.tensor
    """The same [BQ, 1]."""
    features: tl.tensor
    """[1, D], of one row."""
    k_desc: tl.tensor
    v_desc: tl.tensor
    head: Head
    noise: Noise


class Softmax(NamedTuple):
    """The running softmax of a block of queries, FP32 but for the count."""

    m: tl.tensor
    """The shift [BQ]."""
    mass: tl.tensor
    """ℓ [BQ]."""
    out: tl.tensor
    """Ō [BQ, D], rounded per block if the variant says so."""
    other: tl.tensor
    """The Ō [BQ, D] of δ, where that differs from block to block."""
    ones: tl.tensor
    """How many P̄ are 1 under the shift as operands [BQ], int32."""


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
    queries, start, D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr
):
    """Return S of a block of queries and the tile of keys from ``start`` on."""
    b_k = load_rows(queries.k_desc, queries.head, start, BK, D)
    columns, T = (start + tl.arange(0, BK))[None, :], queries.head.length
    return tile_scores(queries.q, tl.trans(b_k), queries.column, columns, T, queries.noise, C, MASKED, PACKED)


@triton.jit
def add_tile(
    softmax, x, queries, start,
    D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, OTHER_SUM: tl.constexpr,
    STATISTICS: tl.constexpr,
):  # fmt: skip
    """Return the softmax with one more tile, whose scores are ``x``, under its shift: lines 9 and 10.

    With ``before_product`` its ℓ is the whole row's already, and P̄/ℓ takes the place of P̄.
    """
    PROBS: tl.constexpr = C.probs
    b_l, b_o, b_other, b_ones = softmax.mass, softmax.out, softmax.other, softmax.ones
    rows, columns = queries.column, (start + tl.arange(0, BK))[None, :]
    b_p = exponentials(x, softmax.m, C, PACKED)
    if C.normalizer == "before_product":
        b_p = divide(b_p, b_l[:, None])
    b_p_operand = as_operand(b_p, PROBS, queries.noise, rows, columns)
    if C.normalizer == "rounded":
        b_p = round_point(b_p, PROBS, queries.noise, 0, rows, columns)
    if C.normalizer != "before_product":
        b_l += tl.sum(b_p, 1)
    b_v = load_rows(queries.v_desc, queries.head, start, BK, D)
    b_o = product(b_p_operand, b_v, b_o)
    if OTHER_SUM:
        b_other = product(b_p_operand, b_v, b_other)
    if STATISTICS:
        b_ones += tl.sum((b_p_operand.to(tl.float32) == 1.0).to(tl.int32), 1)
    return Softmax(softmax.m, b_l, b_o, b_other, b_ones)


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
    queries, start, stop,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return :func:`largest_scores` of a block of several tiles of keys."""
    b_max = tl.full([BQ], float("-inf"), tl.float32)
    b_second = b_max
    for o_k in range(start, stop, BK):
        x = scores_of_keys(queries, o_k, D, BK, C, MASKED, PACKED)
        b_max_here, b_second_here = largest_scores(x, C, PACKED)
        if C.shift == "dynamic_max":
            b_max, b_second = merge_two_largest(b_max, b_second, b_max_here, b_second_here)
        else:
            b_max = tl.maximum(b_max, b_max_here)
    return b_max, b_second


@triton.jit
def round_unnormalized(b_o, b_other, block, queries, C: tl.constexpr, REDRAWS: tl.constexpr):
    """Return Ō, or P̄V of one block of keys, and with REDRAWS that of δ, rounded after the block of keys of that
    number."""
    OUT_UNNORMALIZED: tl.constexpr = C.out_unnormalized
    FOR_DELTA: tl.constexpr = C.out_unnormalized_for_delta
    rows, features = queries.column, queries.features
    b_o = round_point(b_o, OUT_UNNORMALIZED, queries.noise, block, rows, features)
    if REDRAWS:
        b_other = round_point(b_other, FOR_DELTA, queries.noise, block, rows, features)
    return b_o, b_other


@triton.jit
def rescaled(softmax, b_m_new, C: tl.constexpr, OTHER_SUM: tl.constexpr, STATISTICS: tl.constexpr):
    """Return the softmax under a new shift: what was summed under the old one is rescaled, line 9."""
    b_rescale = exponential(softmax.m, b_m_new, C.unit)
    b_l = softmax.mass * b_rescale
    b_o = softmax.out * b_rescale[:, None]
    b_other, b_ones = softmax.other, softmax.ones
    if OTHER_SUM:
        b_other = b_other * b_rescale[:, None]
    if STATISTICS:
        b_ones = tl.where(b_m_new > softmax.m, 0, b_ones)
    return Softmax(b_m_new, b_l, b_o, b_other, b_ones)


@triton.jit
def add_block(
    softmax, queries, start, stop,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    OTHER_SUM: tl.constexpr, REDRAWS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Return the softmax with the keys from ``start`` to ``stop``: one of its blocks."""
    BY_BLOCK: tl.constexpr = C.out_unnormalized_when != "final"
    BY_PRODUCT: tl.constexpr = C.out_unnormalized_when == "per_product"
    if C.tiles_per_block == 1:
        x = scores_of_keys(queries, start, D, BK, C, MASKED, PACKED)
        b_max, b_second = largest_scores(x, C, PACKED)
    else:
        b_max, b_second = largest_of_block(queries, start, stop, D, BQ, BK, C, MASKED, PACKED)
    before = rescaled(softmax, tl.maximum(softmax.m, block_shift(b_max, b_second, C)), C, OTHER_SUM, STATISTICS)
    b_l, b_o, b_other = before.mass, before.out, before.other
    if C.denominator_floor > 0:
        b_l = tl.zeros([BQ], tl.float32)
    if BY_PRODUCT:
        b_o, b_other = tl.zeros([BQ, D], tl.float32), tl.zeros([BQ, D], tl.float32)
    if C.normalizer == "before_product":
        for o_k in range(start, stop, BK):
            x_again = scores_of_keys(queries, o_k, D, BK, C, MASKED, PACKED)
            b_l += tl.sum(exponentials(x_again, before.m, C, PACKED), 1)
    added = Softmax(before.m, b_l, b_o, b_other, before.ones)
    if C.tiles_per_block == 1:
        added = add_tile(added, x, queries, start, D, BK, C, PACKED, OTHER_SUM, STATISTICS)
    else:
        for o_k in range(start, stop, BK):
            x = scores_of_keys(queries, o_k, D, BK, C, MASKED, PACKED)
            added = add_tile(added, x, queries, o_k, D, BK, C, PACKED, OTHER_SUM, STATISTICS)
    b_l, b_o, b_other = added.mass, added.out, added.other
    if BY_BLOCK:
        b_o, b_other = round_unnormalized(b_o, b_other, start // (C.tiles_per_block * BK), queries, C, REDRAWS)
    if BY_PRODUCT:
        b_o, b_other = before.out + b_o, before.other + b_other
    if C.denominator_floor > 0:
        b_l = tl.maximum(b_l, C.denominator_floor)
        if MASKED and C.causal and C.tiles_per_block * BK < BQ:  # the first queries come before this block
            b_l = tl.where(queries.positions >= start, b_l, 0.0)
        b_l = before.mass + b_l
    return Softmax(before.m, b_l, b_o, b_other, added.ones)


@triton.jit
def count_masked_blocks(softmax, o_rows, first, T, BLOCK: tl.constexpr, C: tl.constexpr):
    """Return the softmax with the blocks of keys after each query."""
    b_m, b_l, b_ones = softmax.m, softmax.mass, softmax.ones
    b_factor = tl.full(b_m.shape, 1.0, tl.float32)  # by which Ō shrinks
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
    return Softmax(b_m, b_l, softmax.out * b_factor[:, None], softmax.other * b_factor[:, None], b_ones)


@triton.jit
def store_rows(
    softmax, queries, outputs, D: tl.constexpr, BQ: tl.constexpr, C: tl.constexpr, FOR_DELTA: tl.constexpr,
    REDRAWS: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Store O and L of a block of queries, with FOR_DELTA the O of δ or what O lacks of it, with STATISTICS m and the
    count of ones."""
    OUT: tl.constexpr = C.out
    OUT_FOR_DELTA: tl.constexpr = C.out_for_delta
    DENOMINATOR: tl.constexpr = C.denominator
    head, noise, o_rows = queries.head, queries.noise, queries.positions
    rows, features, T = queries.column, queries.features, head.length
    b_unrounded = softmax.mass
    b_l = round_point(softmax.mass, DENOMINATOR, noise, 0, o_rows, o_rows * 0)
    b_divisor = b_l
    if C.out_divisor == "unrounded_in_first_block":
        b_divisor = tl.where(o_rows < C.block_k, b_unrounded, b_l)
    if C.normalizer == "before_product":
        b_divisor = tl.full([BQ], 1.0, tl.float32)
        b_unrounded = b_divisor
    b_out = divide(softmax.out, b_divisor[:, None])
    b_out = round_point(b_out, OUT, noise, 0, rows, features)
    o_out = token_offsets(head, o_rows, D)
    tl.store(outputs.out_ptr + o_out, to_dtype_of(b_out, outputs.out_ptr), mask=rows < T)  # line 12
    if FOR_DELTA:
        saved_ptr = outputs.saved_out_ptr + o_out
        b_other = divide(softmax.other, b_divisor[:, None] if REDRAWS else b_unrounded[:, None])
        if REDRAWS:
            b_other = round_point(b_other, OUT_FOR_DELTA, noise, 0, rows, features)
        if C.out_mantissa > 0:
            b_other = residual(b_other, b_out, C.out_mantissa)
        tl.store(saved_ptr, b_other.to(saved_ptr.dtype.element_ty), mask=rows < T)
    o_lse = head.number.to(tl.int64) * T + o_rows
    tl.store(outputs.logsumexp_ptr + o_lse, softmax.m * C.unit + tl.log(b_l), mask=o_rows < T)  # line 13
    if STATISTICS:
        tl.store(outputs.shift_ptr + o_lse, softmax.m * C.unit, mask=o_rows < T)
        tl.store(outputs.ones_ptr + o_lse, softmax.ones, mask=o_rows < T)


@triton.jit
def flash_fwd_rows(
    inputs, outputs, noise, i_q, head,
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
    T = head.length
    positions = i_q * BQ + tl.arange(0, BQ)
    column, features = positions[:, None], tl.arange(0, D)[None, :]
    b_q = load_rows(inputs.q_desc, head, i_q * BQ, BQ, D)
    if C.tiles_per_block == 1 and D <= 64:
        b_q = in_registers(b_q)
    queries = Queries(b_q, positions, column, features, inputs.k_desc, inputs.v_desc, head, noise)
    softmax = Softmax(
        tl.full([BQ], float("-inf"), tl.float32),
        tl.zeros([BQ], tl.float32),
        tl.zeros([BQ, D], tl.float32),
        tl.zeros([BQ, D], tl.float32),
        tl.zeros([BQ], tl.int32),
    )
    # Blocks of keys that all queries see whole need no mask: those below the diagonal, or all but a last one cut short.
    SPLIT: tl.constexpr = BQ % BLOCK == 0 or not C.causal
    whole, end = i_q * BQ, tl.minimum((i_q + 1) * BQ, T)
    if not C.causal:
        whole, end = T // BLOCK * BLOCK, T
    for masked in tl.static_range(0 if SPLIT else 1, 2):
        first = whole if SPLIT and masked else 0
        last = end if masked else tl.minimum(whole, end)
        for start in range(first, last, BLOCK):
            softmax = add_block(
                softmax, queries, start, tl.minimum(start + BLOCK, last), D, BQ, BK, C, masked, PACKED, OTHER_SUM,
                REDRAWS, STATISTICS,
            )  # fmt: skip
    if C.counts_masked:
        softmax = count_masked_blocks(softmax, positions, i_q * BQ // BLOCK + 1, T, BLOCK, C)
    b_o = softmax.out
    b_other = softmax.other if OTHER_SUM else b_o
    if not BY_BLOCK:
        b_o, b_other = round_unnormalized(b_o, b_other, 0, queries, C, REDRAWS)
    softmax = Softmax(softmax.m, softmax.mass, b_o, b_other, softmax.ones)
    store_rows(softmax, queries, outputs, D, BQ, C, FOR_DELTA, REDRAWS, STATISTICS)


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
    head, noise = head_of(i_bh, H, T), Noise(noise_ptr, layer, i_bh)
    inputs = Inputs(q_desc, k_desc, v_desc)
    outputs = Outputs(o_ptr, o_delta_ptr, lse_ptr, shift_ptr, ones_ptr)
    if ELSEWHERE is None or tl.load(selected_ptr + head.index) != 0:
        flash_fwd_rows(inputs, outputs, noise, i_q, head, D, BQ, BK, C, PAIRS, STATISTICS)
    else:
        flash_fwd_rows(inputs, outputs, noise, i_q, head, D, BQ, BK, ELSEWHERE, PAIRS, STATISTICS)
