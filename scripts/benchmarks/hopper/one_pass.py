"""Backward pass on Hopper in one kernel: S and dP once, and dQ added up in memory in an order that never changes.

Programs take blocks of keys, the last of a head first. A tile of queries gets what each block adds to its dQ in that
order, which is also the order in which programs that start together come to it: they hardly wait for each other.
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from benchmarks.hopper.forward import LOG2E, ROWS, copy_in, copy_out
from flashpoint_kernels.addressing import head_of, token_offsets

GROUPS = gl.constexpr(2)


@builtin
def add_out(desc, coord, src, _semantic=None):
    """Add a tile of shared memory to one in global memory, as ``copy_out`` copies it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def added(x):
    """Return x when what ``add_out`` began is in global memory."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def grad_q_kernel(summed_ptr, grad_q_ptr, H, T, D: tl.constexpr, BQ: tl.constexpr, ALPHA: tl.constexpr):
    """Store α times the sums, which lie as [B·H, T, D], as BF16 in [B, T, H, D]."""
    head = head_of(tl.program_id(1), H, T)
    positions = tl.program_id(0) * BQ + tl.arange(0, BQ)
    column = positions[:, None]
    o_summed = (head.number.to(tl.int64) * T + column) * D + tl.arange(0, D)[None, :]
    summed = tl.load(summed_ptr + o_summed, mask=column < T, other=0)
    tl.store(grad_q_ptr + token_offsets(head, positions, D), (summed * ALPHA).to(tl.bfloat16), mask=column < T)


@gluon.jit
def copy_queries(descs, rings, sizes, D: gl.constexpr, STAGES: gl.constexpr):
    """Copy K and V of each block, and Q, L, dO and δ of each tile that sees it."""
    q_desc, k_desc, v_desc, do_desc, rows_desc = descs
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, full, empty = rings
    B, H, T = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BK)
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        number, i_k = tile // n_blocks, n_blocks - 1 - tile % n_blocks
        sequence, head = number // H, number % H
        mbarrier.wait(kv_empty, (blocks & 1) ^ 1)
        mbarrier.expect(kv_full, 2 * BK * D * 2)
        for group in gl.static_range(GROUPS):
            first = i_k * BK + group * ROWS
            copy_in(k_desc, [sequence, head, first, 0], kv_full, k_smem.index(group))
            copy_in(v_desc, [sequence, head, first, 0], kv_full, v_smem.index(group))
        blocks += 1
        for start in range(i_k * BK, T, ROWS):
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), 2 * ROWS * (2 * D + 4))
            copy_in(q_desc, [sequence, head, start, 0], full.index(stage), q_smem.index(stage))
            copy_in(rows_desc, [0, number, start], full.index(stage), lse_smem.index(stage))
            copy_in(do_desc, [sequence, head, start, 0], full.index(stage), do_smem.index(stage))
            copy_in(rows_desc, [1, number, start], full.index(stage), delta_smem.index(stage))
            i += 1


@gluon.jit
def add_grad_q(summed_desc, turns_ptr, ring, sizes, D: gl.constexpr):
    """Add each tile of dQ to the sums when it is the block's turn: ``turns_ptr`` [B·H, tiles] counts those before."""
    dq_smem, dq_full, dq_empty = ring
    B, H, T = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks, n_tiles = gl.cdiv(T, BK), gl.cdiv(T, ROWS)
    i = 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        number, i_k = tile // n_blocks, n_blocks - 1 - tile % n_blocks
        for start in range(i_k * BK, T, ROWS):
            mbarrier.wait(dq_full, i & 1)
            turn = turns_ptr + number * n_tiles + start // ROWS
            before = start // BK - i_k
            while gl.atomic_add(turn, 0) != before:
                pass
            for half in gl.static_range(2):
                add_out(summed_desc, [number, start, half * (D // 2)], dq_smem.index(half))
            tma.store_wait(0)
            mbarrier.arrive(dq_empty)
            gl.atomic_add(turn, added(before) - before + 1)
            i += 1


@gluon.jit
def add_queries(
    mine: gl.constexpr, grad_k, grad_v, k, v, keys, start, i, rings, ds_ring, dq_ring,
    D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Return dK, still under way, and dV with tile ``i`` of queries, and hand half of the features of its dQ on."""
    k_smem, _, q_smem, do_smem, lse_smem, delta_smem, _, _, full, empty = rings
    ds_smem, ds_full, ds_empty = ds_ring
    dq_smem, dq_full, dq_empty = dq_ring
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    S_COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    FACTOR: gl.constexpr = UNIT * LOG2E
    stage, phase = i % STAGES, (i // STAGES) & 1
    q, grad_out = q_smem.index(stage).reshape([ROWS, D]), do_smem.index(stage).reshape([ROWS, D])
    nothing = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
    mbarrier.wait(full.index(stage), phase)
    s = warpgroup_mma(k, q.permute([1, 0]), nothing, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, grad_out.permute([1, 0]), nothing, use_acc=False, is_async=True)
    s, grad_k = warpgroup_mma_wait(1, deps=[s, grad_k])
    if not FIRST:
        mbarrier.arrive(empty.index((i - 1) % STAGES))
        mbarrier.arrive(ds_empty)
    lse = lse_smem.index(stage).reshape([ROWS]).load(S_COLUMNS)
    p = gl.exp2(gl.fma(s, gl.full_like(s, FACTOR), gl.zeros_like(s) - lse[None, :]))
    if MASKED:
        queries = start + gl.arange(0, ROWS, S_COLUMNS)
        p = gl.where(keys[:, None] <= queries[None, :], p, 0.0)
    p_operand = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
    grad_v = warpgroup_mma(p_operand, grad_out, warpgroup_mma_init(grad_v), is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(stage).reshape([ROWS]).load(S_COLUMNS)
    ds = (p * (dp - delta[None, :])).to(gl.bfloat16)
    mbarrier.wait(ds_empty, (i & 1) ^ 1)
    ds_smem.index(mine).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full)
    mbarrier.wait(ds_full, i & 1)
    dq = gl.zeros([ROWS, D // 2], gl.float32, DQ_LAYOUT)
    of_group = k_smem.index(0).reshape([ROWS, D]).slice(mine * (D // 2), D // 2, dim=1)
    dq = warpgroup_mma(ds_smem.index(0).permute([1, 0]), of_group, dq, use_acc=False, is_async=True)
    of_group = k_smem.index(1).reshape([ROWS, D]).slice(mine * (D // 2), D // 2, dim=1)
    dq = warpgroup_mma(ds_smem.index(1).permute([1, 0]), of_group, dq, is_async=True)
    grad_k = warpgroup_mma(ds_smem.index(mine), q, warpgroup_mma_init(grad_k), is_async=True)
    dq, grad_v = warpgroup_mma_wait(1, deps=[dq, grad_v])
    mbarrier.wait(dq_empty, (i & 1) ^ 1)
    dq_smem.index(mine).reshape([ROWS, D // 2]).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full)
    return grad_k, grad_v


@gluon.jit
def sum_grads(
    mine: gl.constexpr, descs, rings, ds_ring, dq_ring, sizes,
    D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of rows ``mine`` of each block of keys, and half of the features of what it adds to dQ."""
    grad_k_desc, grad_v_desc = descs
    k_smem, v_smem, _, _, _, _, kv_full, kv_empty, _, empty = rings
    B, H, T = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BK)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k, v = k_smem.index(mine).reshape([ROWS, D]), v_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        number, i_k = tile // n_blocks, n_blocks - 1 - tile % n_blocks
        first = i_k * BK
        keys = first + mine * ROWS + gl.arange(0, ROWS, S_ROWS)
        mbarrier.wait(kv_full, blocks & 1)
        grad_k = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, K_LAYOUT))
        grad_v = gl.zeros([ROWS, D], gl.float32, K_LAYOUT)
        grad_k, grad_v = add_queries(
            mine, grad_k, grad_v, k, v, keys, first, i, rings, ds_ring, dq_ring, D, STAGES, UNIT, True, True
        )
        i += 1
        for start in range(first + ROWS, gl.minimum(first + BK, T), ROWS):
            grad_k, grad_v = add_queries(
                mine, grad_k, grad_v, k, v, keys, start, i, rings, ds_ring, dq_ring, D, STAGES, UNIT, True, False
            )
            i += 1
        for start in range(first + BK, T, ROWS):
            grad_k, grad_v = add_queries(
                mine, grad_k, grad_v, k, v, keys, start, i, rings, ds_ring, dq_ring, D, STAGES, UNIT, False, False
            )
            i += 1
        summed = warpgroup_mma_wait(0, deps=[grad_k])
        mbarrier.arrive(empty.index((i - 1) % STAGES))
        mbarrier.arrive(ds_ring[2])
        mbarrier.wait(ds_ring[2], (i & 1) ^ 1)  # the other group has read K for dQ, too
        k.store((summed * ALPHA).to(gl.bfloat16))
        v.store(grad_v.to(gl.bfloat16))
        fence_async_shared()
        at = first + mine * ROWS
        copy_out(grad_k_desc, [number // H, number % H, at, 0], k_smem.index(mine))
        copy_out(grad_v_desc, [number // H, number % H, at, 0], v_smem.index(mine))
        tma.store_wait(0)
        blocks += 1
        mbarrier.arrive(kv_empty)


@gluon.jit(do_not_specialize=["B", "H", "T"])
def hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, grad_k_desc, grad_v_desc, summed_desc, turns_ptr, B, H, T,
    D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Store dK and dV of all heads and add dQ/α up; each program takes every gridDim-th block of keys."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, ROWS], rows_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, ROWS], rows_desc.layout)
    ds_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, ROWS], DS)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, ROWS, D // 2], summed_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=GROUPS)
    mbarrier.init(ds_full, count=GROUPS)
    mbarrier.init(ds_empty, count=GROUPS)
    mbarrier.init(dq_full, count=GROUPS)
    mbarrier.init(dq_empty, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    rings = (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, kv_empty, full, empty)
    ds_ring, dq_ring = (ds_smem, ds_full, ds_empty), (dq_smem, dq_full, dq_empty)
    sizes, written = (B, H, T), (grad_k_desc, grad_v_desc)
    gl.warp_specialize(
        [
            (sum_grads, (0, written, rings, ds_ring, dq_ring, sizes, D, STAGES, UNIT, ALPHA)),
            (sum_grads, (1, written, rings, ds_ring, dq_ring, sizes, D, STAGES, UNIT, ALPHA)),
            (copy_queries, ((q_desc, k_desc, v_desc, do_desc, rows_desc), rings, sizes, D, STAGES)),
            (add_grad_q, (summed_desc, turns_ptr, dq_ring, sizes, D)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
