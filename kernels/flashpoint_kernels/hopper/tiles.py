"""Tiles of the kernels for Hopper: which of them a program takes, how warps copy and hand them on.

A ring holds STAGES tiles, tile ``i`` at i % STAGES. Each place has a barrier for when it is full and one for when it
is empty again, which every group of warps that reads it arrives at.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

# Triton 3.7 and later have other names.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
ROWS = gl.constexpr(64)
"""Rows of a group of warps."""
GROUPS = gl.constexpr(2)
"""Groups of warps that compute."""
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
def barriers(STAGES: gl.constexpr):
    """Return the barriers for when a block, and each place of two rings, is full and when it is empty."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=GROUPS)
    one_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    one_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    other_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    other_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(one_full.index(stage), count=1)
        mbarrier.init(one_empty.index(stage), count=GROUPS)
        mbarrier.init(other_full.index(stage), count=1)
        mbarrier.init(other_empty.index(stage), count=GROUPS)
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
