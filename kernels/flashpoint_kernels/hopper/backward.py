"""Backward pass on Hopper: L and δ of each query, dQ by blocks of queries, dK and dV by blocks of keys. No atomics."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashpoint_kernels.addressing import head_of, load_rows, token_offsets
from flashpoint_kernels.hopper.tiles import (
    GROUPS,
    ROWS,
    barriers,
    block_and_head,
    copy_block,
    copy_in,
    copy_keys,
    copy_out,
    exponentials,
    last_tile,
    operand_layout,
    pair_of_buffers,
    pass_tiles,
    product,
    product_layout,
)
from flashpoint_kernels.residual import two_parts


@triton.jit(do_not_specialize=["H", "T", "T_ROWS", "PLANE"])
def row_deltas_kernel(
    do_desc, out_ptr, residual_ptr, lse_ptr, rows_ptr, H, T, T_ROWS, PLANE,
    D: tl.constexpr, BQ: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Store L/ln 2, +∞ past the end, and δ of the unrounded O: two planes [B·H, T_ROWS] of PLANE elements."""
    n_blocks = T_ROWS // BQ
    head, first = head_of(tl.program_id(0) // n_blocks, H, T), tl.program_id(0) % n_blocks * BQ
    positions = first + tl.arange(0, BQ)
    in_rows = positions < T
    offsets = token_offsets(head, positions, D)
    b_out = tl.load(out_ptr + offsets, mask=in_rows[:, None], other=0)
    b_residual = tl.load(residual_ptr + offsets, mask=in_rows[:, None], other=0)
    b_do = load_rows(do_desc, head, first, BQ, D).to(tl.float32)
    b_lse = tl.load(lse_ptr + head.number.to(tl.int64) * T + positions, mask=in_rows, other=float("inf"))
    rows = rows_ptr + head.number.to(tl.int64) * T_ROWS + positions
    tl.store(rows, b_lse * 1.4426950408889634)
    tl.store(rows + PLANE, tl.sum(b_do * two_parts(b_out, b_residual, MANTISSA), 1))


@gluon.jit
def copy_queries_and_keys(
    descs, rings, sizes, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """For dQ: copy Q and dO of each block, and K and V of each tile that it sees."""
    query_descs, key_descs = descs
    buffers, q_full, q_empty, key_rings = rings
    B, H, T, GROUP = sizes
    BQ: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BQ)
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        sequence, head = number // H, number % H
        copy_block(query_descs, buffers, q_full, q_empty, blocks, (sequence, head, i_q), D)
        blocks += 1
        i = copy_keys(key_descs, key_rings, (sequence, head), last_tile(i_q * BQ, BQ, T, BK), i, BK, D, STAGES)


@gluon.jit
def add_keys(
    grad_q, q, grad_out, lse, delta, rows, start, i, rings,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Return dQ, still under way, with tile ``i`` of keys; FIRST: the one on the diagonal."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = rings
    stage, phase = i % STAGES, (i // STAGES) & 1
    k, v = k_smem.index(stage).reshape([BK, D]), v_smem.index(stage).reshape([BK, D])
    # Not ``product``: with line numbers of two functions the assembler waits once more.
    nothing = gl.zeros([ROWS, BK], gl.float32, product_layout(BK))
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = warpgroup_mma(grad_out, v.permute([1, 0]), nothing, use_acc=False, is_async=True)
    s, grad_q = warpgroup_mma_wait(1, deps=[s, grad_q])
    if not FIRST:
        mbarrier.arrive(k_empty.index((i - 1) % STAGES))
    p = exponentials(s, lse[:, None], UNIT)
    if FIRST:
        columns = start + gl.arange(0, BK, gl.SliceLayout(0, product_layout(BK)))
        p = gl.where(columns[None, :] <= rows[:, None], p, 0.0)
    mbarrier.wait(v_full.index(stage), phase)  # it is: the assembler would wait before the exponentials
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_empty.index(stage))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), operand_layout(D))
    return warpgroup_mma(ds, k, warpgroup_mma_init(grad_q), is_async=True)


@gluon.jit
def sum_grad_q(
    mine: gl.constexpr, grad_q_desc, rows_ptr, rings, sizes, T_ROWS, PLANE,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Compute dQ of rows ``mine`` of each block."""
    buffers, q_full, q_empty, key_rings = rings
    q_smem, do_smem = buffers
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = key_rings
    B, H, T, GROUP = sizes
    BQ: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BQ)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(BK))
    q, grad_out = q_smem.index(mine).reshape([ROWS, D]), do_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        first_row = i_q * BQ + mine * ROWS
        rows = first_row + gl.arange(0, ROWS, S_ROWS)
        of_head = rows_ptr + number.to(gl.int64) * T_ROWS
        lse, delta = gl.load(of_head + rows), gl.load(of_head + PLANE + rows)
        last = last_tile(first_row, ROWS, T, BK)
        others = last_tile(i_q * BQ, BQ, T, BK) - last
        i = pass_tiles(others, i, (k_full, k_empty), (v_full, v_empty), STAGES)
        mbarrier.wait(q_full, blocks & 1)
        grad_q = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, product_layout(D)))
        grad_q = add_keys(grad_q, q, grad_out, lse, delta, rows, last * BK, i, key_rings, BK, D, STAGES, UNIT, True)
        for _ in range(last):
            i += 1
            grad_q = add_keys(grad_q, q, grad_out, lse, delta, rows, 0, i, key_rings, BK, D, STAGES, UNIT, False)
        summed = warpgroup_mma_wait(0, deps=[grad_q])
        mbarrier.arrive(k_empty.index(i % STAGES))
        i += 1
        blocks += 1
        q.store((summed * UNIT).to(gl.bfloat16))  # in Q's place, which nobody reads any more
        fence_async_shared()
        copy_out(grad_q_desc, [number // H, number % H, first_row, 0], q_smem.index(mine))
        tma.store_wait(0)
        mbarrier.arrive(q_empty)


@gluon.jit(do_not_specialize=["B", "H", "T", "GROUP", "T_ROWS", "PLANE"])
def hopper_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, grad_q_desc, rows_ptr, B, H, T, GROUP, T_ROWS, PLANE,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Store dQ of all heads; each program takes every gridDim-th block of queries."""
    q_smem, do_smem = pair_of_buffers((q_desc, do_desc), GROUPS, ROWS, D)
    k_smem, v_smem = pair_of_buffers((k_desc, v_desc), STAGES, BK, D)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers(STAGES)
    rings = ((q_smem, do_smem), q_full, q_empty, (k_smem, v_smem, k_full, k_empty, v_full, v_empty))
    sizes = (B, H, T, GROUP)
    gl.warp_specialize(
        [
            (sum_grad_q, (0, grad_q_desc, rows_ptr, rings, sizes, T_ROWS, PLANE, BK, D, STAGES, UNIT)),
            (sum_grad_q, (1, grad_q_desc, rows_ptr, rings, sizes, T_ROWS, PLANE, BK, D, STAGES, UNIT)),
            (copy_queries_and_keys, (((q_desc, do_desc), (k_desc, v_desc)), rings, sizes, BK, D, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def query_buffers(descs, LENGTH: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Allocate K and V of a block of keys, and rings of Q, dO, L and δ of LENGTH queries."""
    q_desc, k_desc, v_desc, do_desc, rows_desc = descs
    k_smem, v_smem = pair_of_buffers((k_desc, v_desc), GROUPS, ROWS, D)
    q_smem, do_smem = pair_of_buffers((q_desc, do_desc), STAGES, LENGTH, D)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, LENGTH], rows_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, LENGTH], rows_desc.layout)
    return k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem


@gluon.jit
def copy_with_row(descs, rings, full, at, stage, PLANE: gl.constexpr):
    """Copy a tile of Q or dO, and plane PLANE of the rows beside it: L or δ.

    ``at``: sequence, head, the head's number among those of all sequences, first query.
    """
    desc, rows_desc = descs
    smem, row_smem = rings
    sequence, head, number, start = at
    copy_in(desc, [sequence, head, start, 0], full.index(stage), smem.index(stage))
    copy_in(rows_desc, [PLANE, number, start], full.index(stage), row_smem.index(stage))


@gluon.jit
def copy_queries(descs, rings, sizes, BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """For dK and dV: copy K and V of each block, and Q, L, dO and δ of each tile that sees it."""
    q_desc, k_desc, v_desc, do_desc, rows_desc = descs
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, q_full, q_empty, do_full, do_empty = rings
    B, H, T, GROUP = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BK)
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        left, number = block_and_head(tile, n_blocks, B * H, GROUP)
        i_k = n_blocks - 1 - left  # the first keys are seen most
        sequence, head = number // H, number % H
        copy_block((k_desc, v_desc), (k_smem, v_smem), kv_full, kv_empty, blocks, (sequence, head, i_k), D)
        blocks += 1
        for start in range(i_k * BK, T, BQ):
            stage, phase = i % STAGES, (i // STAGES) & 1
            at = sequence, head, number, start
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), BQ * (2 * D + 4))
            copy_with_row((q_desc, rows_desc), (q_smem, lse_smem), q_full, at, stage, 0)
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            mbarrier.expect(do_full.index(stage), BQ * (2 * D + 4))
            copy_with_row((do_desc, rows_desc), (do_smem, delta_smem), do_full, at, stage, 1)
            i += 1


@gluon.jit
def add_grad_v(
    grad_v, s, dp, grad_out, row_rings, stage, keys, start,
    BQ: gl.constexpr, D: gl.constexpr, UNIT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Return dV, still under way, with PᵀdO of a tile of queries, and its dSᵀ; ``dp`` is under way, too."""
    lse_smem, delta_smem = row_rings
    COLUMNS: gl.constexpr = gl.SliceLayout(0, product_layout(BQ))
    lse = lse_smem.index(stage).reshape([BQ]).load(COLUMNS)
    p = exponentials(s, lse[None, :], UNIT)
    if MASKED:
        queries = start + gl.arange(0, BQ, COLUMNS)
        p = gl.where(keys[:, None] <= queries[None, :], p, 0.0)
    p_operand = gl.convert_layout(p.to(gl.bfloat16), operand_layout(D))
    grad_v = warpgroup_mma(p_operand, grad_out, warpgroup_mma_init(grad_v), is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(stage).reshape([BQ]).load(COLUMNS)
    return grad_v, (p * (dp - delta[None, :])).to(gl.bfloat16)


@gluon.jit
def add_queries(
    grad_k, grad_v, k, v, keys, start, i, rings,
    BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Return dK and dV, still under way, with tile ``i`` of queries; FIRST: the one on the diagonal."""
    _, _, q_smem, do_smem, lse_smem, delta_smem, _, _, q_full, q_empty, do_full, do_empty = rings
    stage, phase = i % STAGES, (i // STAGES) & 1
    q, grad_out = q_smem.index(stage).reshape([BQ, D]), do_smem.index(stage).reshape([BQ, D])
    mbarrier.wait(q_full.index(stage), phase)
    s = product(k, q, BQ)
    mbarrier.wait(do_full.index(stage), phase)
    dp = product(v, grad_out, BQ)
    s, grad_k, grad_v = warpgroup_mma_wait(1, deps=[s, grad_k, grad_v])
    if not FIRST:
        mbarrier.arrive(q_empty.index((i - 1) % STAGES))
        mbarrier.arrive(do_empty.index((i - 1) % STAGES))
    row_rings = lse_smem, delta_smem
    grad_v, ds = add_grad_v(grad_v, s, dp, grad_out, row_rings, stage, keys, start, BQ, D, UNIT, FIRST)
    ds = gl.convert_layout(ds, operand_layout(D))
    grad_k = warpgroup_mma(ds, q, warpgroup_mma_init(grad_k), is_async=True)
    grad_v = warpgroup_mma_wait(1, deps=[grad_v])  # two sums under way at a loop's end make the assembler wait for each
    return grad_k, warpgroup_mma_init(grad_v)


@gluon.jit
def store_grad_kv(descs, buffers, grad_k, grad_v, at, D: gl.constexpr, UNIT: gl.constexpr):
    """Store dK and dV from the places of K and V, which nobody reads any more.

    ``at``: the head's number among those of all sequences, heads of a sequence, first key.
    """
    grad_k_desc, grad_v_desc = descs
    k_smem, v_smem = buffers
    number, H, first = at
    k_smem.reshape([ROWS, D]).store((grad_k * UNIT).to(gl.bfloat16))
    v_smem.reshape([ROWS, D]).store(grad_v.to(gl.bfloat16))
    fence_async_shared()
    copy_out(grad_k_desc, [number // H, number % H, first, 0], k_smem)
    copy_out(grad_v_desc, [number // H, number % H, first, 0], v_smem)
    tma.store_wait(0)


@gluon.jit
def sum_grad_kv(
    mine: gl.constexpr, descs, rings, sizes,
    BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of rows ``mine`` of each block of keys."""
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, q_full, q_empty, do_full, do_empty = rings
    B, H, T, GROUP = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BK)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(BQ))
    k, v = k_smem.index(mine).reshape([ROWS, D]), v_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        left, number = block_and_head(tile, n_blocks, B * H, GROUP)
        i_k = n_blocks - 1 - left
        first_key = i_k * BK + mine * ROWS
        keys = first_key + gl.arange(0, ROWS, S_ROWS)
        others = gl.cdiv(gl.minimum(mine * ROWS, T - i_k * BK), BQ)  # which see none of my keys
        i = pass_tiles(others, i, (q_full, q_empty), (do_full, do_empty), STAGES)
        mbarrier.wait(kv_full, blocks & 1)
        nothing = gl.zeros([ROWS, D], gl.float32, product_layout(D))
        grad_k, grad_v = warpgroup_mma_init(nothing), warpgroup_mma_init(nothing)
        if first_key < T:
            grad_k, grad_v = add_queries(grad_k, grad_v, k, v, keys, first_key, i, rings, BQ, D, STAGES, UNIT, True)
            i += 1
            for start in range(first_key + BQ, T, BQ):
                grad_k, grad_v = add_queries(grad_k, grad_v, k, v, keys, start, i, rings, BQ, D, STAGES, UNIT, False)
                i += 1
            summed_k, summed_v = warpgroup_mma_wait(0, deps=[grad_k, grad_v])
            mbarrier.arrive(q_empty.index((i - 1) % STAGES))
            mbarrier.arrive(do_empty.index((i - 1) % STAGES))
            at = number, H, first_key
            store_grad_kv(descs, (k_smem.index(mine), v_smem.index(mine)), summed_k, summed_v, at, D, UNIT)
        blocks += 1
        mbarrier.arrive(kv_empty)


@gluon.jit(do_not_specialize=["B", "H", "T", "GROUP"])
def hopper_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, grad_k_desc, grad_v_desc, B, H, T, GROUP,
    BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Store dK and dV of all heads; each program takes every gridDim-th block of keys."""
    gl.static_assert(BQ == ROWS, "a group of keys has one tile on the diagonal")
    descs = (q_desc, k_desc, v_desc, do_desc, rows_desc)
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = query_buffers(descs, BQ, D, STAGES)
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers(STAGES)
    rings = (
        k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, q_full, q_empty, do_full, do_empty
    )  # fmt: skip
    sizes = (B, H, T, GROUP)
    written = (grad_k_desc, grad_v_desc)
    gl.warp_specialize(
        [
            (sum_grad_kv, (0, written, rings, sizes, BQ, D, STAGES, UNIT)),
            (sum_grad_kv, (1, written, rings, sizes, BQ, D, STAGES, UNIT)),
            (copy_queries, (descs, rings, sizes, BQ, D, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
