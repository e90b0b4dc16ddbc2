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

from benchmarks.hopper.tiles import (
    LOG2E,
    ROWS,
    barriers_of_two_rings,
    block_and_head,
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

TO_WHOLE = gl.constexpr(12582912.0)
EXPONENT = gl.constexpr(0x7F800000)


@gluon.jit
def copy_tiles(
    descs, rings, sizes, BQ: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy Q of each block, and K and V of each tile that it sees."""
    q_desc, key_descs = descs
    q_smem, q_full, q_empty, key_rings = rings
    B, H, T, GROUP = sizes
    n_blocks = gl.cdiv(T, BQ)
    GROUPS: gl.constexpr = BQ // ROWS
    i, blocks = 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        sequence, head = number // H, number % H
        mbarrier.wait(q_empty, (blocks & 1) ^ 1)
        mbarrier.expect(q_full, BQ * D * 2)
        for group in gl.static_range(GROUPS):
            copy_in(q_desc, [sequence, head, i_q * BQ + group * ROWS, 0], q_full, q_smem.index(group))
        blocks += 1
        last = last_tile(i_q * BQ, BQ, T, BK)
        i = copy_keys(key_descs, key_rings, (sequence, head), last, i, BK, D, STAGES)


@gluon.jit
def shifted_exponentials(s, shift, UNIT: gl.constexpr, FUSED: gl.constexpr):
    """Return exp2((S − shift)·UNIT/ln 2), with a shift for each row.

    FUSED: one fused multiply-add an element. It is not exactly 1 at the shift, but within 2⁻²⁴·|shift·UNIT|.
    """
    FACTOR: gl.constexpr = UNIT * LOG2E
    return exponentials(s, (shift * FACTOR)[:, None], UNIT) if FUSED else gl.exp2((s - shift[:, None]) * FACTOR)


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

    FUSED: as in ``shifted_exponentials``.
    TURNS: two groups that see the same tiles issue products in turn.
    """
    out_desc, residual_desc = descs
    rings, turns, results, sizes = shared
    q_smem, q_full, q_empty, key_rings = rings
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = key_rings
    out_smem, residual_smem = results
    B, H, T, GROUP = sizes
    n_blocks = gl.cdiv(T, BQ)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(BK))
    O_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(D))
    FACTOR: gl.constexpr = UNIT * LOG2E
    q = q_smem.index(mine).reshape([ROWS, D])
    i, blocks, turn = 0, 0, 0
    for tile in range(gl.program_id(0), n_blocks * B * H, gl.num_programs(0)):
        i_q, number = block_and_head(tile, n_blocks, B * H, GROUP)
        first_row = i_q * BQ + mine * ROWS
        last = last_tile(first_row, ROWS, T, BK)
        others = last_tile(i_q * BQ, BQ, T, BK) - last
        i = pass_tiles(others, i, (k_full, k_empty), (v_full, v_empty), STAGES)
        mbarrier.wait(q_full, blocks & 1)
        mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
        s = product(q, k_smem.index(i % STAGES).reshape([BK, D]), BK)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(i % STAGES))
        rows = first_row + gl.arange(0, ROWS, S_ROWS)
        columns = last * BK + gl.arange(0, BK, gl.SliceLayout(0, product_layout(BK)))
        s = gl.where(columns[None, :] <= rows[:, None], s, float("-inf"))
        m = gl.max(s, 1)
        p = shifted_exponentials(s, m, UNIT, FUSED)
        mass = gl.sum(p, 1)
        operand = gl.convert_layout(p.to(gl.bfloat16), operand_layout(D))
        out = gl.zeros([ROWS, D], gl.float32, product_layout(D))
        for _ in range(last):
            v_stage, v_phase = i % STAGES, (i // STAGES) & 1
            i += 1
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                mbarrier.wait(turns.index(mine), (turn & 1) ^ (1 - mine))
            s = product(q, k_smem.index(stage).reshape([BK, D]), BK)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            out = warpgroup_mma(operand, v_smem.index(v_stage).reshape([BK, D]), out, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - mine))
                turn += 1
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            m_new = gl.maximum(m, gl.max(s, 1))
            rescale = gl.exp2((m - m_new) * FACTOR)
            p = shifted_exponentials(s, m_new, UNIT, FUSED)
            m = m_new
            mass = mass * rescale + gl.sum(p, 1)
            mbarrier.wait(v_full.index(v_stage), v_phase)  # it is: the assembler would wait before the exponentials
            out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(v_empty.index(v_stage))
            out = out * gl.convert_layout(rescale, O_ROWS)[:, None]
            operand = gl.convert_layout(p.to(gl.bfloat16), operand_layout(D))
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
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_smem, v_smem = pair_of_buffers((k_desc, v_desc), STAGES, BK, D)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], out_desc.layout)
    residual_smem = gl.allocate_shared_memory(gl.int8, [GROUPS, 1, 1, ROWS, D], residual_desc.layout)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers_of_two_rings(STAGES, GROUPS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    rings = (q_smem, q_full, q_empty, (k_smem, v_smem, k_full, k_empty, v_full, v_empty))
    sizes, written = (B, H, T, GROUP), (out_desc, residual_desc)
    shared = (rings, turns, (out_smem, residual_smem), sizes)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, TURNS)),
                (attend, (1, written, lse_ptr, shared, BQ, BK, D, STAGES, UNIT, MANTISSA, FUSED, TURNS)),
                (copy_tiles, ((q_desc, (k_desc, v_desc)), rings, sizes, BQ, BK, D, STAGES)),
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
                (copy_tiles, ((q_desc, (k_desc, v_desc)), rings, sizes, BQ, BK, D, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
