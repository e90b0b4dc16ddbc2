"""δ = rowsum(dO∘O) of the unrounded O, which was saved whole or as what O as returned lacks of it."""

import triton
import triton.language as tl

from flashpoint_kernels.query_rows import rows_of
from flashpoint_kernels.residual import two_parts


@triton.jit
def delta(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return δ [BQ]."""
    if C.out_mantissa > 0:
        b_returned = rows_of(rows.out_ptr, rows)
        b_o = two_parts(b_returned, rows_of(rows.saved_out_ptr, rows), C.out_mantissa)
    else:
        b_o = rows_of(rows.saved_out_ptr, rows)
    return tl.sum(rows.grad_out.to(tl.float32) * b_o.to(tl.float32), 1)
