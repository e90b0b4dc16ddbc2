"""Forward pass on Hopper with warps of three roles: a candidate for the causal attention that rounds P̄ and O alone.

One group of warps copies tiles into rings of buffers. The others compute, each 64 queries of a block. While a group
takes the exponentials of one tile, the matrix units add up P̄V of the tile before it, and in turn with another group
whatever that one issued (FlashAttention-3, arXiv 2407.08608). Blocks of keys go from the diagonal to the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.7 and later have other names.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
ROWS = gl.constexpr(64)
"""Queries of a group of warps."""
LOG2E = gl.constexpr(1.4426950408889634)
TO_WHOLE = gl.constexpr(12582912.0)
EXPONENT = gl.constexpr(0x7F800000)


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
def copy_tiles(
    descs, rings, sizes, BQ: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy Q of each block, and K and V of each tile that it sees."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    B, H, T, GROUP = sizes
    n_blocks = gl.cdiv(T, BQ)
    GROUPS: gl.constexpr = BQ // ROWS
    BYTES: gl.constexpr = BK * D * 2
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        sequence, head = number // H, number % H
        mbarrier.wait(q_empty, (blocks & 1) ^ 1)
        mbarrier.expect(q_full, BQ * D * 2)
        for group in gl.static_range(GROUPS):
            copy_in(q_desc, [sequence, head, i_q * BQ + group * ROWS, 0], q_full, q_smem.index(group))
        blocks += 1
        for left in range(last_tile(i_q * BQ, BQ, T, BK) + 1):
            start = (last_tile(i_q * BQ, BQ, T, BK) - left) * BK
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BYTES)
            copy_in(k_desc, [sequence, head, start, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BYTES)
            copy_in(v_desc, [sequence, head, start, 0], v_full.index(stage), v_smem.index(stage))
            i += 1


@gluon.jit
def scores(q, k, BK: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin QKᵀ [ROWS, BK]."""
    nothing = gl.zeros([ROWS, BK], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.reshape([BK, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def divided(x, reciprocal, divisor):
    """As ``flashpoint_kernels.rounding.divide``, of which the reciprocal is given."""
    quotient = x * reciprocal
    return gl.fma(gl.fma(-quotient, divisor, x), reciprocal, quotient)


@gluon.jit
def lacking(unrounded, rounded, MANTISSA: gl.constexpr):
    """As ``flashpoint_kernels.residual.residual``."""
    pattern = gl.maximum(rounded.to(gl.int32, bitcast=True) & EXPONENT, (MANTISSA + 1) << 23) - (MANTISSA << 23)
    per_unit = ((254 << 23) - pattern).to(gl.float32, bitcast=True)
    whole = gl.fma(unrounded - rounded, per_unit, gl.full_like(rounded, TO_WHOLE))
    return whole.to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def attend(
    mine: gl.constexpr, descs, lse_ptr, shared,
    BQ: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
    MANTISSA: gl.constexpr, FUSED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Compute rows ``mine`` of each block.

    FUSED: exp2 of one fused multiply-add an element. It is not exactly 1 at the shift, but within 2⁻²⁴·|m·UNIT|.
    TURNS: two groups that see the same tiles issue products in turn.
    """
    out_desc, residual_desc = descs
    rings, turns, results, sizes = shared
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    out_smem, residual_smem = results
    B, H, T, GROUP = sizes
    n_blocks = gl.cdiv(T, BQ)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    FACTOR: gl.constexpr = UNIT * LOG2E
    q = q_smem.index(mine).reshape([ROWS, D])
    i, blocks, turn = 0, 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        first_row = i_q * BQ + mine * ROWS
        last = last_tile(first_row, ROWS, T, BK)
        for _ in range(last_tile(i_q * BQ, BQ, T, BK) - last):  # which other rows see
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage))
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage))
            i += 1
        mbarrier.wait(q_full, blocks & 1)
        mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
        s = scores(q, k_smem.index(i % STAGES), BK, D, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(i % STAGES))
        rows = first_row + gl.arange(0, ROWS, S_ROWS)
        columns = last * BK + gl.arange(0, BK, gl.SliceLayout(0, S_LAYOUT))
        s = gl.where(columns[None, :] <= rows[:, None], s, float("-inf"))
        m = gl.max(s, 1)
        if FUSED:
            p = gl.exp2(gl.fma(s, gl.full_like(s, FACTOR), gl.zeros_like(s) - (m * FACTOR)[:, None]))
        else:
            p = gl.exp2((s - m[:, None]) * FACTOR)
        mass = gl.sum(p, 1)
        operand = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
        out = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        for _ in range(last):
            v_stage, v_phase = i % STAGES, (i // STAGES) & 1
            i += 1
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                mbarrier.wait(turns.index(mine), (turn & 1) ^ (1 - mine))
            s = scores(q, k_smem.index(stage), BK, D, S_LAYOUT)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            out = warpgroup_mma(operand, v_smem.index(v_stage).reshape([BK, D]), out, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - mine))
                turn += 1
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            m_new = gl.maximum(m, gl.max(s, 1))
            rescale = gl.exp2((m - m_new) * FACTOR)
            if FUSED:
                p = gl.exp2(gl.fma(s, gl.full_like(s, FACTOR), gl.zeros_like(s) - (m_new * FACTOR)[:, None]))
            else:
                p = gl.exp2((s - m_new[:, None]) * FACTOR)
            m = m_new
            mass = mass * rescale + gl.sum(p, 1)
            mbarrier.wait(v_full.index(v_stage), v_phase)  # it is: the assembler would wait before the exponentials
            out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(v_empty.index(v_stage))
            out = out * gl.convert_layout(rescale, O_ROWS)[:, None]
            operand = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
        mbarrier.arrive(q_empty)
        mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
        out = warpgroup_mma(operand, v_smem.index(i % STAGES).reshape([BK, D]), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(v_empty.index(i % STAGES))
        i += 1
        blocks += 1
        divisor = gl.convert_layout(mass, O_ROWS)
        reciprocal = gl.div_rn(gl.full_like(divisor, 1.0), divisor)
        unrounded = divided(out, reciprocal[:, None] + gl.zeros_like(out), divisor[:, None] + gl.zeros_like(out))
        rounded = unrounded.to(gl.bfloat16)
        tma.store_wait(0)  # of the block before
        out_smem.index(mine).reshape([ROWS, D]).store(rounded)
        residual_smem.index(mine).reshape([ROWS, D]).store(lacking(unrounded, rounded.to(gl.float32), MANTISSA))
        fence_async_shared()
        copy_out(out_desc, [number // H, number % H, first_row, 0], out_smem.index(mine))
        copy_out(residual_desc, [number // H, number % H, first_row, 0], residual_smem.index(mine))
        gl.store(lse_ptr + number.to(gl.int64) * T + rows, m * UNIT + gl.log(mass), mask=rows < T)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "T", "GROUP"])
def hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, residual_desc, lse_ptr, B, H, T, GROUP,
    BQ: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
    MANTISSA: gl.constexpr, FUSED: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Store O, its residual and L of all heads; each program takes every gridDim-th block of queries."""
    GROUPS: gl.constexpr = BQ // ROWS
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BK, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BK, D], v_desc.layout)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], out_desc.layout)
    residual_smem = gl.allocate_shared_memory(gl.int8, [GROUPS, 1, 1, ROWS, D], residual_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    rings = (q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes, written = (B, H, T, GROUP), (out_desc, residual_desc)
    shared = (rings, turns, (out_smem, residual_smem), sizes)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, TURNS)),
                (attend, (1, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, TURNS)),
                (copy_tiles, ((q_desc, k_desc, v_desc), rings, sizes, BQ, BK, D, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (0, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, False)),
                (attend, (1, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, False)),
                (attend, (2, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, False)),
                (copy_tiles, ((q_desc, k_desc, v_desc), rings, sizes, BQ, BK, D, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
