"""Tiles of the kernels for Hopper: which of them a program takes, how warps copy and hand them on, P and dS of one.

A ring holds STAGES tiles, tile ``i`` at i % STAGES. Each place has a barrier for when it is full and one for when it
is empty again, which every group of warps that reads it arrives at.
"""

from triton import constexpr_function
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

# Triton 3.7 and later have other names.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
ROWS = gl.constexpr(64)
"""Rows of a group of warps."""
GROUPS = gl.constexpr(2)
"""Groups of warps that compute, in a backward pass."""
LOG2E = gl.constexpr(1.4426950408889634)


@constexpr_function
def product_layout(columns):
    """Return how a group of warps holds a product [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def operand_layout(columns):
    """Return how a group of warps holds what it multiplies to get a product [ROWS, columns]."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


@gluon.jit
def block_and_head(tile, n_blocks, n_heads, GROUP):
    """Return the block of queries and the head of a tile: heads in groups that fit in L2, the longest rows first."""
    group, within = tile // (GROUP * n_blocks), tile % (GROUP * n_blocks)
    heads = gl.minimum(GROUP, n_heads - group * GROUP)
    return n_blocks - 1 - within // heads, group * GROUP + within % heads


@gluon.jit
def last_tile(first_row, ROWS_OF: gl.constexpr, T, BK: gl.constexpr):
    """Return the number of the last tile of keys that rows see."""
    return (gl.minimum(T, first_row + ROWS_OF) - 1) // BK


@gluon.jit
def pair_of_buffers(descs, COUNT: gl.constexpr, LENGTH: gl.constexpr, D: gl.constexpr):
    """Allocate COUNT tiles [LENGTH, D] for each of two tensors."""
    one_desc, other_desc = descs
    one = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 1, 1, LENGTH, D], one_desc.layout)
    return one, gl.allocate_shared_memory(gl.bfloat16, [COUNT, 1, 1, LENGTH, D], other_desc.layout)


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
def barriers(WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Return the barriers for when a buffer is full and when it is empty."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=WRITERS)
    mbarrier.init(empty, count=READERS)
    return full, empty


@gluon.jit
def barriers_of_two_rings(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return the barriers of a block, as ``barriers`` does, and of each place of two rings."""
    full, empty = barriers(1, READERS)
    one_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    one_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    other_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    other_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(one_full.index(stage), count=1)
        mbarrier.init(one_empty.index(stage), count=READERS)
        mbarrier.init(other_full.index(stage), count=1)
        mbarrier.init(other_empty.index(stage), count=READERS)
    return full, empty, one_full, one_empty, other_full, other_empty


@gluon.jit
def copy_block(descs, buffers, full, empty, blocks, at, D: gl.constexpr):
    """Copy a block of two tensors, GROUPS · ROWS rows; ``at``: its sequence, head and number."""
    one_desc, other_desc = descs
    one_smem, other_smem = buffers
    sequence, head, block = at
    mbarrier.wait(empty, (blocks & 1) ^ 1)
    mbarrier.expect(full, 2 * GROUPS * ROWS * D * 2)
    for group in gl.static_range(GROUPS):
        first = block * (GROUPS * ROWS) + group * ROWS
        copy_in(one_desc, [sequence, head, first, 0], full, one_smem.index(group))
        copy_in(other_desc, [sequence, head, first, 0], full, other_smem.index(group))


@gluon.jit
def copy_keys(descs, rings, head_at, last, i, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Copy K and V from tile ``last`` of the head to its first, into ``i`` and those after; return the next ``i``."""
    k_desc, v_desc = descs
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = rings
    sequence, head = head_at
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
    return i


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
def pass_tiles(count, i, one_barriers, other_barriers, STAGES: gl.constexpr):
    """Give ``count`` tiles of two rings back unread, which other groups read; return the next ``i``."""
    one_full, one_empty = one_barriers
    other_full, other_empty = other_barriers
    for _ in range(count):
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(one_full.index(stage), phase)
        mbarrier.arrive(one_empty.index(stage))
        mbarrier.wait(other_full.index(stage), phase)
        mbarrier.arrive(other_empty.index(stage))
        i += 1
    return i


@gluon.jit
def product(a, b, COLUMNS: gl.constexpr):
    """Begin a·bᵀ [ROWS, COLUMNS]: S or dP, or its transpose."""
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    return warpgroup_mma(a, b.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def exponentials(s, shift, UNIT: gl.constexpr):
    """Return P of S: exp2(S·UNIT/ln 2 − shift), one fused multiply-add an element."""
    return gl.exp2(gl.fma(s, gl.full_like(s, UNIT * LOG2E), gl.zeros_like(s) - shift))


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
def store_grad_kv(descs, buffers, grad_k, grad_v, at, D: gl.constexpr, ALPHA: gl.constexpr):
    """Store dK and dV from the places of K and V, which nobody reads any more.

    ``at``: the head's number among those of all sequences, heads of a sequence, first key.
    """
    grad_k_desc, grad_v_desc = descs
    k_smem, v_smem = buffers
    number, H, first = at
    k_smem.reshape([ROWS, D]).store((grad_k * ALPHA).to(gl.bfloat16))
    v_smem.reshape([ROWS, D]).store(grad_v.to(gl.bfloat16))
    fence_async_shared()
    copy_out(grad_k_desc, [number // H, number % H, first, 0], k_smem)
    copy_out(grad_v_desc, [number // H, number % H, first, 0], v_smem)
    tma.store_wait(0)
