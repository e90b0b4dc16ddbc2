"""Backward pass on Hopper with warps of three roles: a candidate, as :mod:`benchmarks.hopper.forward` is.

Three kernels: L and δ of each query, dQ by blocks of queries, dK and dV by blocks of keys. One group of warps copies
tiles, two compute. No atomics.
"""

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

from benchmarks.hopper.forward import ROWS, block_and_head, copy_in, copy_out, last_tile
from flashpoint_kernels.addressing import head_of, token_offsets
from flashpoint_kernels.residual import two_parts

LOG2E = gl.constexpr(1.4426950408889634)
GROUPS = gl.constexpr(2)


@triton.jit
def row_deltas_kernel(
    out_ptr, residual_ptr, grad_out_ptr, lse_ptr, rows_ptr, H, T, T_ROWS, PLANE,
    stride_b, stride_h, stride_t, D: tl.constexpr, BQ: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Store L/ln 2, +∞ past the end, and δ of the unrounded O: two planes [B·H, T_ROWS]."""
    head = head_of(tl.program_id(1), H, T)
    positions = tl.program_id(0) * BQ + tl.arange(0, BQ)
    column = positions[:, None]
    offsets = token_offsets(head, positions, D)
    b_out = tl.load(out_ptr + offsets, mask=column < T, other=0)
    b_residual = tl.load(residual_ptr + offsets, mask=column < T, other=0)
    o_do = head.sequence.to(tl.int64) * stride_b + head.index * stride_h + column * stride_t + tl.arange(0, D)[None, :]
    b_do = tl.load(grad_out_ptr + o_do, mask=column < T, other=0).to(tl.float32)
    b_lse = tl.load(lse_ptr + head.number.to(tl.int64) * T + positions, mask=positions < T, other=float("inf"))
    rows = rows_ptr + head.number.to(tl.int64) * T_ROWS + positions
    tl.store(rows, b_lse * 1.4426950408889634)
    tl.store(rows + PLANE, tl.sum(b_do * two_parts(b_out, b_residual, MANTISSA), 1))


@gluon.jit
def copy_keys(
    descs, rings, sizes, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """For dQ: copy Q and dO of each block, and K and V of each tile that it sees."""
    q_desc, k_desc, v_desc, do_desc = descs
    q_smem, do_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    B, H, T, GROUP = sizes
    BQ: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BQ)
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        sequence, head = number // H, number % H
        mbarrier.wait(q_empty, (blocks & 1) ^ 1)
        mbarrier.expect(q_full, 2 * BQ * D * 2)
        for group in gl.static_range(GROUPS):
            first = i_q * BQ + group * ROWS
            copy_in(q_desc, [sequence, head, first, 0], q_full, q_smem.index(group))
            copy_in(do_desc, [sequence, head, first, 0], q_full, do_smem.index(group))
        blocks += 1
        last = last_tile(i_q * BQ, BQ, T, BK)
        for left in range(last + 1):
            stage, phase = i % STAGES, (i // STAGES) & 1
            start = (last - left) * BK
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BK * D * 2)
            copy_in(k_desc, [sequence, head, start, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BK * D * 2)
            copy_in(v_desc, [sequence, head, start, 0], v_full.index(stage), v_smem.index(stage))
            i += 1


@gluon.jit
def add_keys(
    grad_q, q, grad_out, lse, delta, rows, start, i, rings,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Return dQ, still under way, with tile ``i`` of keys; FIRST: the one on the diagonal."""
    _, _, k_smem, v_smem, _, _, k_full, k_empty, v_full, v_empty = rings
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    FACTOR: gl.constexpr = UNIT * LOG2E
    stage, phase = i % STAGES, (i // STAGES) & 1
    k, v = k_smem.index(stage).reshape([BK, D]), v_smem.index(stage).reshape([BK, D])
    nothing = gl.zeros([ROWS, BK], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = warpgroup_mma(grad_out, v.permute([1, 0]), nothing, use_acc=False, is_async=True)
    s, grad_q = warpgroup_mma_wait(1, deps=[s, grad_q])
    if not FIRST:
        mbarrier.arrive(k_empty.index((i - 1) % STAGES))
    p = gl.exp2(gl.fma(s, gl.full_like(s, FACTOR), gl.zeros_like(s) - lse[:, None]))
    if FIRST:
        columns = start + gl.arange(0, BK, gl.SliceLayout(0, S_LAYOUT))
        p = gl.where(columns[None, :] <= rows[:, None], p, 0.0)
    mbarrier.wait(v_full.index(stage), phase)  # it is: the assembler would wait before the exponentials
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_empty.index(stage))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), DS_LAYOUT)
    return warpgroup_mma(ds, k, warpgroup_mma_init(grad_q), is_async=True)


@gluon.jit
def sum_grad_q(
    mine: gl.constexpr, grad_q_desc, rows_ptr, rings, sizes, T_ROWS, PLANE,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Compute dQ of rows ``mine`` of each block."""
    q_smem, do_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    B, H, T, GROUP = sizes
    BQ: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BQ)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16]))
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q, grad_out = q_smem.index(mine).reshape([ROWS, D]), do_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        first_row = i_q * BQ + mine * ROWS
        rows = first_row + gl.arange(0, ROWS, S_ROWS)
        of_head = rows_ptr + number.to(gl.int64) * T_ROWS
        lse, delta = gl.load(of_head + rows), gl.load(of_head + PLANE + rows)
        last = last_tile(first_row, ROWS, T, BK)
        for _ in range(last_tile(i_q * BQ, BQ, T, BK) - last):  # which other rows see
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage))
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage))
            i += 1
        mbarrier.wait(q_full, blocks & 1)
        grad_q = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, Q_LAYOUT))
        grad_q = add_keys(grad_q, q, grad_out, lse, delta, rows, last * BK, i, rings, BK, D, STAGES, UNIT, True)
        for _ in range(last):
            i += 1
            grad_q = add_keys(grad_q, q, grad_out, lse, delta, rows, 0, i, rings, BK, D, STAGES, UNIT, False)
        summed = warpgroup_mma_wait(0, deps=[grad_q])
        mbarrier.arrive(k_empty.index(i % STAGES))
        i += 1
        blocks += 1
        q.store((summed * ALPHA).to(gl.bfloat16))  # in Q's place, which nobody reads any more
        fence_async_shared()
        copy_out(grad_q_desc, [number // H, number % H, first_row, 0], q_smem.index(mine))
        tma.store_wait(0)
        mbarrier.arrive(q_empty)


@gluon.jit(do_not_specialize=["B", "H", "T", "GROUP", "T_ROWS", "PLANE"])
def hopper_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, grad_q_desc, rows_ptr, B, H, T, GROUP, T_ROWS, PLANE,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Store dQ of all heads; each program takes every gridDim-th block of queries."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BK, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BK, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    rings = (q_smem, do_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (B, H, T, GROUP)
    gl.warp_specialize(
        [
            (sum_grad_q, (0, grad_q_desc, rows_ptr, rings, sizes, T_ROWS, PLANE, BK, D, STAGES, UNIT, ALPHA)),
            (sum_grad_q, (1, grad_q_desc, rows_ptr, rings, sizes, T_ROWS, PLANE, BK, D, STAGES, UNIT, ALPHA)),
            (copy_keys, ((q_desc, k_desc, v_desc, do_desc), rings, sizes, BK, D, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


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
        mbarrier.wait(kv_empty, (blocks & 1) ^ 1)
        mbarrier.expect(kv_full, 2 * BK * D * 2)
        for group in gl.static_range(GROUPS):
            first = i_k * BK + group * ROWS
            copy_in(k_desc, [sequence, head, first, 0], kv_full, k_smem.index(group))
            copy_in(v_desc, [sequence, head, first, 0], kv_full, v_smem.index(group))
        blocks += 1
        for start in range(i_k * BK, T, BQ):
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), BQ * (2 * D + 4))
            copy_in(q_desc, [sequence, head, start, 0], q_full.index(stage), q_smem.index(stage))
            copy_in(rows_desc, [0, number, start], q_full.index(stage), lse_smem.index(stage))
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            mbarrier.expect(do_full.index(stage), BQ * (2 * D + 4))
            copy_in(do_desc, [sequence, head, start, 0], do_full.index(stage), do_smem.index(stage))
            copy_in(rows_desc, [1, number, start], do_full.index(stage), delta_smem.index(stage))
            i += 1


@gluon.jit
def add_queries(
    grad_k, grad_v, k, v, keys, start, i, rings,
    BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Return dK and dV, still under way, with tile ``i`` of queries; FIRST: the one on the diagonal."""
    _, _, q_smem, do_smem, lse_smem, delta_smem, _, _, q_full, q_empty, do_full, do_empty = rings
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16])
    S_COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    FACTOR: gl.constexpr = UNIT * LOG2E
    stage, phase = i % STAGES, (i // STAGES) & 1
    q, grad_out = q_smem.index(stage).reshape([BQ, D]), do_smem.index(stage).reshape([BQ, D])
    nothing = gl.zeros([ROWS, BQ], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(stage), phase)
    s = warpgroup_mma(k, q.permute([1, 0]), nothing, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(v, grad_out.permute([1, 0]), nothing, use_acc=False, is_async=True)
    s, grad_k, grad_v = warpgroup_mma_wait(1, deps=[s, grad_k, grad_v])
    if not FIRST:
        mbarrier.arrive(q_empty.index((i - 1) % STAGES))
        mbarrier.arrive(do_empty.index((i - 1) % STAGES))
    lse = lse_smem.index(stage).reshape([BQ]).load(S_COLUMNS)
    p = gl.exp2(gl.fma(s, gl.full_like(s, FACTOR), gl.zeros_like(s) - lse[None, :]))
    if FIRST:
        queries = start + gl.arange(0, BQ, S_COLUMNS)
        p = gl.where(keys[:, None] <= queries[None, :], p, 0.0)
    p_operand = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
    grad_v = warpgroup_mma(p_operand, grad_out, warpgroup_mma_init(grad_v), is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(stage).reshape([BQ]).load(S_COLUMNS)
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(gl.bfloat16), P_LAYOUT)
    grad_k = warpgroup_mma(ds, q, warpgroup_mma_init(grad_k), is_async=True)
    grad_v = warpgroup_mma_wait(1, deps=[grad_v])  # two sums under way at a loop's end make the assembler wait for each
    return grad_k, warpgroup_mma_init(grad_v)


@gluon.jit
def sum_grad_kv(
    mine: gl.constexpr, descs, rings, sizes,
    BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of rows ``mine`` of each block of keys."""
    grad_k_desc, grad_v_desc = descs
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, q_full, q_empty, do_full, do_empty = rings
    B, H, T, GROUP = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BK)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16]))
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k, v = k_smem.index(mine).reshape([ROWS, D]), v_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        left, number = block_and_head(tile, n_blocks, B * H, GROUP)
        i_k = n_blocks - 1 - left
        first_key = i_k * BK + mine * ROWS
        keys = first_key + gl.arange(0, ROWS, S_ROWS)
        for _ in range(gl.cdiv(gl.minimum(mine * ROWS, T - i_k * BK), BQ)):  # queries that see none of mine
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(q_full.index(stage), phase)
            mbarrier.arrive(q_empty.index(stage))
            mbarrier.wait(do_full.index(stage), phase)
            mbarrier.arrive(do_empty.index(stage))
            i += 1
        mbarrier.wait(kv_full, blocks & 1)
        nothing = gl.zeros([ROWS, D], gl.float32, K_LAYOUT)
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
            k.store((summed_k * ALPHA).to(gl.bfloat16))  # in K's place, which nobody reads any more
            v.store(summed_v.to(gl.bfloat16))
            fence_async_shared()
            copy_out(grad_k_desc, [number // H, number % H, first_key, 0], k_smem.index(mine))
            copy_out(grad_v_desc, [number // H, number % H, first_key, 0], v_smem.index(mine))
            tma.store_wait(0)
        blocks += 1
        mbarrier.arrive(kv_empty)


@gluon.jit(do_not_specialize=["B", "H", "T", "GROUP"])
def hopper_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, grad_k_desc, grad_v_desc, B, H, T, GROUP,
    BQ: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Store dK and dV of all heads; each program takes every gridDim-th block of keys."""
    gl.static_assert(BQ == ROWS, "a group of keys has one tile on the diagonal")
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BQ, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BQ, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BQ], rows_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BQ], rows_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=GROUPS)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(do_empty.index(stage), count=GROUPS)
    rings = (
        k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, q_full, q_empty, do_full, do_empty
    )  # fmt: skip
    sizes = (B, H, T, GROUP)
    written = (grad_k_desc, grad_v_desc)
    gl.warp_specialize(
        [
            (sum_grad_kv, (0, written, rings, sizes, BQ, D, STAGES, UNIT, ALPHA)),
            (sum_grad_kv, (1, written, rings, sizes, BQ, D, STAGES, UNIT, ALPHA)),
            (copy_queries, ((q_desc, k_desc, v_desc, do_desc, rows_desc), rings, sizes, BQ, D, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
