"""δ = rowsum(P∘dP), in a pass over the keys of its own."""

import triton
import triton.language as tl

from flashpoint_kernels.query_rows import row_sums


@triton.jit
def delta(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return δ [BQ]."""
    b_sum, _ = row_sums(rows, D, BQ, BK, C, False)
    return b_sum
