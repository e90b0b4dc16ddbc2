"""Forward pass on Hopper: the causal attention that rounds P̄ and O alone.

While a group of warps takes the exponentials of one tile, the matrix units add up P̄V of the tile before it, and what
the other group issued (FlashAttention-3, arXiv 2407.08608). Tiles of keys go from the diagonal to the first.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashpoint_kernels.hopper.tiles import (
    GROUPS,
    LOG2E,
    ROWS,
    barriers,
    block_and_head,
    copy_in,
    copy_keys,
    copy_out,
    last_tile,
    operand_layout,
    pair_of_buffers,
    pass_tiles,
    product,
    product_layout,
)

LN2 = gl.constexpr(0.6931471805599453)
TO_WHOLE = gl.constexpr(12582912.0)
EXPONENT = gl.constexpr(0x7F800000)


@gluon.jit
def copy_tiles(
    descs, rings, sizes, BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy Q of each block, and K and V of each tile that it sees."""
    q_desc, key_descs = descs
    q_smem, q_full, q_empty, key_rings = rings
    B, H, T, GROUP = sizes
    BQ: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BQ)
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
def shifted_exponentials(s, shift, UNIT: gl.constexpr):
    """Return exp((S − shift)·UNIT), with a shift for each row: exactly 1 at the shift."""
    FACTOR: gl.constexpr = UNIT * LOG2E
    return gl.exp2((s - shift[:, None]) * FACTOR)


@constexpr_function
def fp32(x):
    """Return the FP32 number nearest to an FP64 one (Veltkamp)."""
    upper = x * (2**29 + 1)
    return upper - (upper - x)


@gluon.jit
def log_sums(shift, mass, UNIT: gl.constexpr):
    """Return L = shift·UNIT + ln ℓ, rounded once, with the UNIT that the exponentials have: their factor is FP32.

    UNIT's own FP32 number differs from that by up to 2⁻²⁴ of it. Both that and a product rounded by itself are errors
    as large as FP32's of L.
    """
    EXACT: gl.constexpr = fp32(UNIT * LOG2E) * LN2
    HIGH: gl.constexpr = fp32(EXACT)
    LOW: gl.constexpr = EXACT - HIGH
    scaled, of_mass = shift * HIGH, gl.log(mass)
    lacking_of_product = gl.fma(shift, gl.full_like(shift, HIGH), gl.zeros_like(shift) - scaled) + shift * LOW
    whole = scaled + of_mass
    added = whole - scaled
    lacking_of_sum = (scaled - (whole - added)) + (of_mass - added)  # exact (Knuth)
    return whole + (lacking_of_product + lacking_of_sum)


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
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, MANTISSA: gl.constexpr,
):  # fmt: skip
    """Compute rows ``mine`` of each block."""
    out_desc, residual_desc = descs
    rings, results, sizes = shared
    q_smem, q_full, q_empty, key_rings = rings
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = key_rings
    out_smem, residual_smem = results
    B, H, T, GROUP = sizes
    BQ: gl.constexpr = GROUPS * ROWS
    n_blocks = gl.cdiv(T, BQ)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(BK))
    O_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(D))
    FACTOR: gl.constexpr = UNIT * LOG2E
    q = q_smem.index(mine).reshape([ROWS, D])
    i, blocks = 0, 0
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
        p = shifted_exponentials(s, m, UNIT)
        mass = gl.sum(p, 1)
        operand = gl.convert_layout(p.to(gl.bfloat16), operand_layout(D))
        out = gl.zeros([ROWS, D], gl.float32, product_layout(D))
        for _ in range(last):
            v_stage, v_phase = i % STAGES, (i // STAGES) & 1
            i += 1
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = product(q, k_smem.index(stage).reshape([BK, D]), BK)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            out = warpgroup_mma(operand, v_smem.index(v_stage).reshape([BK, D]), out, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            m_new = gl.maximum(m, gl.max(s, 1))
            rescale = gl.exp2((m - m_new) * FACTOR)
            p = shifted_exponentials(s, m_new, UNIT)
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
        gl.store(lse_ptr + number.to(gl.int64) * T + rows, log_sums(m, mass, UNIT), mask=rows < T)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "T", "GROUP"])
def hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, residual_desc, lse_ptr, B, H, T, GROUP,
    BK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr, MANTISSA: gl.constexpr,
):  # fmt: skip
    """Store O, its residual and L of all heads; each program takes every gridDim-th block of queries."""
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_smem, v_smem = pair_of_buffers((k_desc, v_desc), STAGES, BK, D)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, D], out_desc.layout)
    residual_smem = gl.allocate_shared_memory(gl.int8, [GROUPS, 1, 1, ROWS, D], residual_desc.layout)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers(STAGES)
    rings = (q_smem, q_full, q_empty, (k_smem, v_smem, k_full, k_empty, v_full, v_empty))
    sizes, written = (B, H, T, GROUP), (out_desc, residual_desc)
    shared = (rings, (out_smem, residual_smem), sizes)
    gl.warp_specialize(
        [
            (attend, (0, written, lse_ptr, shared, BK, D, STAGES, UNIT, MANTISSA)),
            (attend, (1, written, lse_ptr, shared, BK, D, STAGES, UNIT, MANTISSA)),
            (copy_tiles, ((q_desc, (k_desc, v_desc)), rings, sizes, BK, D, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
