"""δ by the rule that a variant names: ``NAME.py`` has the branch of the rule ``NAME``.

What a rule means is in the file of its name in ``flashpoint.numerics.delta_rules``, which checks at import that both
folders have the same files. A rule without a branch below does not compile.
"""

import triton
import triton.language as tl

from flashpoint_kernels.delta_rules import out, out_fp32, out_independent, p_dp


@triton.jit
def delta_by_rule(rows, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return δ [BQ] of ``rows`` (:class:`~flashpoint_kernels.query_rows.QueryRows`), FP32, before exact row sums and
    an injected error."""
    if C.delta == "out":
        b_delta = out.delta(rows, D, BQ, BK, C)
    elif C.delta == "out_fp32":
        b_delta = out_fp32.delta(rows, D, BQ, BK, C)
    elif C.delta == "out_independent":
        b_delta = out_independent.delta(rows, D, BQ, BK, C)
    elif C.delta == "p_dp":
        b_delta = p_dp.delta(rows, D, BQ, BK, C)
    else:
        tl.static_assert(False, "this rule of delta has no branch in flashpoint_kernels/delta_rules/__init__.py")
    return b_delta
