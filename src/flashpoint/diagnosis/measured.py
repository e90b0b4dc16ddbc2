"""All measures of a call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_measures import delta_follows
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.measures import Measures, Results, by_sequence, of_inputs
from flashpoint.diagnosis.probe import Probed, delta_error_of_row_sums, probed_measures
from flashpoint.diagnosis.result_measures import of_results

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant


def measured(
    call: AttentionCall, results: Results, probed: Probed | None = None, declared: AttentionVariant | None = None
) -> Measures:
    """Return the measures of a call by name, [N, H] float64 on the CPU.

    Those of inputs, of results, and where ``probed`` is given of what the attention said when it was asked.
    ``declared`` is what the attention says that it rounds.
    """
    return by_sequence(call, results, probed, functools.partial(_of_heads, declared=declared))


def _of_heads(
    call: AttentionCall, results: Results, probed: Probed | None, n: int, declared: AttentionVariant | None
) -> Measures:
    true = exact(call, n)
    found = {**of_inputs(true, call.q[n].double(), call.scale), **of_results(call, results, true, n, declared)}
    if probed is not None and results.out is not None:
        found |= probed_measures(call, probed, true, n)
        noise = true.grad_scores.norm(dim=-1)  # of a key's feature that is 1, whatever K is
        found |= delta_follows(call, results.out[n].double(), delta_error_of_row_sums(probed, true, n), noise, true, n)
    return found
