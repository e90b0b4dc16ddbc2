"""What the rounding of O adds to δ, as a gradient of L, which other libraries' backward passes take off δ."""

import triton
import triton.language as tl

from flashpoint_kernels.addressing import head_of, token_offsets
from flashpoint_kernels.residual import two_parts


@triton.jit(do_not_specialize=["H", "T", "n_blocks", "stride_b", "stride_h", "stride_t"])
def grad_logsumexp_kernel(
    do_ptr, out_ptr, saved_ptr, dl_ptr, H, T, n_blocks, stride_b, stride_h, stride_t,
    D: tl.constexpr, BQ: tl.constexpr, STEP: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Store dL = rowsum(dO∘(O − Ô)) of a block of queries, FP32.

    Ô is saved whole where MANTISSA is 0, else as the residual of O. It lies as O does: by token. Strides of dO count
    STEP elements.
    """
    head, block = head_of(tl.program_id(0) // n_blocks, H, T), tl.program_id(0) % n_blocks
    positions = block * BQ + tl.arange(0, BQ)
    in_rows = positions < T
    offsets = token_offsets(head, positions, D)
    b_out = tl.load(out_ptr + offsets, mask=in_rows[:, None], other=0)
    b_saved = tl.load(saved_ptr + offsets, mask=in_rows[:, None], other=0)
    first = head.sequence.to(tl.int64) * stride_b + head.index.to(tl.int64) * stride_h
    o_rows = first + positions.to(tl.int64) * stride_t
    pointers = do_ptr + (o_rows * STEP)[:, None] + tl.arange(0, D)[None, :]
    b_do = tl.load(pointers, mask=in_rows[:, None], other=0).to(tl.float32)
    b_whole = two_parts(b_out, b_saved, MANTISSA) if MANTISSA > 0 else b_saved
    b_dl = tl.sum(b_do * (b_out.to(tl.float32) - b_whole), 1)
    tl.store(dl_ptr + head.number.to(tl.int64) * T + positions, b_dl, mask=in_rows)
