"""δ = rowsum(dO∘O′) of the O′ that was saved, which the forward pass rounded with other random bits."""

import triton
import triton.language as tl

from flashpoint_kernels.query_rows import rows_of


@triton.jit
def delta(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return δ [BQ]."""
    b_o = rows_of(rows.saved_out_ptr, rows)
    return tl.sum(rows.grad_out.to(tl.float32) * b_o.to(tl.float32), 1)
