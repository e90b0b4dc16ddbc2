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

from benchmarks.hopper.tiles import (
    GROUPS,
    ROWS,
    add_grad_v,
    barriers,
    copy_block,
    copy_with_row,
    product,
    product_layout,
    query_buffers,
    store_grad_kv,
)
from flashpoint_kernels.addressing import head_of, token_offsets


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
        copy_block((k_desc, v_desc), (k_smem, v_smem), kv_full, kv_empty, blocks, (sequence, head, i_k), D)
        blocks += 1
        for start in range(i_k * BK, T, ROWS):
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), 2 * ROWS * (2 * D + 4))
            at = sequence, head, number, start
            copy_with_row((q_desc, rows_desc), (q_smem, lse_smem), full, at, stage, 0)
            copy_with_row((do_desc, rows_desc), (do_smem, delta_smem), full, at, stage, 1)
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
    stage, phase = i % STAGES, (i // STAGES) & 1
    q, grad_out = q_smem.index(stage).reshape([ROWS, D]), do_smem.index(stage).reshape([ROWS, D])
    mbarrier.wait(full.index(stage), phase)
    s = product(k, q, ROWS)
    dp = product(v, grad_out, ROWS)
    s, grad_k = warpgroup_mma_wait(1, deps=[s, grad_k])
    if not FIRST:
        mbarrier.arrive(empty.index((i - 1) % STAGES))
        mbarrier.arrive(ds_empty)
    row_rings = lse_smem, delta_smem
    grad_v, ds = add_grad_v(grad_v, s, dp, grad_out, row_rings, stage, keys, start, ROWS, D, UNIT, MASKED)
    mbarrier.wait(ds_empty, (i & 1) ^ 1)
    ds_smem.index(mine).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full)
    mbarrier.wait(ds_full, i & 1)
    dq = gl.zeros([ROWS, D // 2], gl.float32, product_layout(D // 2))
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
    k_smem, v_smem, _, _, _, _, kv_full, kv_empty, _, empty = rings
    B, H, T = sizes
    BK: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BK)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(ROWS))
    k, v = k_smem.index(mine).reshape([ROWS, D]), v_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        number, i_k = tile // n_blocks, n_blocks - 1 - tile % n_blocks
        first = i_k * BK
        keys = first + mine * ROWS + gl.arange(0, ROWS, S_ROWS)
        mbarrier.wait(kv_full, blocks & 1)
        grad_k = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, product_layout(D)))
        grad_v = gl.zeros([ROWS, D], gl.float32, product_layout(D))
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
        at = number, H, first + mine * ROWS
        store_grad_kv(descs, (k_smem.index(mine), v_smem.index(mine)), summed, grad_v, at, D, ALPHA)
        blocks += 1
        mbarrier.arrive(kv_empty)


@gluon.jit(do_not_specialize=["B", "H", "T"])
def hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, grad_k_desc, grad_v_desc, summed_desc, turns_ptr, B, H, T,
    D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, ALPHA: gl.constexpr,
):  # fmt: skip
    """Store dK and dV of all heads and add dQ/α up; each program takes every gridDim-th block of keys."""
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    descs = (q_desc, k_desc, v_desc, do_desc, rows_desc)
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = query_buffers(descs, ROWS, D, STAGES)
    ds_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, ROWS], DS)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, ROWS, D // 2], summed_desc.layout)
    kv_full, kv_empty = barriers(1, GROUPS)
    ds_full, ds_empty = barriers(GROUPS, GROUPS)
    dq_full, dq_empty = barriers(GROUPS, 1)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
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
            (copy_queries, (descs, rings, sizes, D, STAGES)),
            (add_grad_q, (summed_desc, turns_ptr, dq_ring, sizes, D)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
