"""All measures of a call, computed for a few heads at a time, as many as memory is meant for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_measures import delta_follows
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.input_measures import of_inputs
from flashpoint.diagnosis.measures import Measures, Results
from flashpoint.diagnosis.probe import Probed, delta_error_of_row_sums, probed_measures
from flashpoint.diagnosis.result_measures import of_results

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant

_ELEMENTS = 1 << 24
"""Scores that are held at a time, if those of one head of keys are not more."""
_OfHeads = Callable[[AttentionCall, Results, Probed | None, int], Measures]
"""Measures the heads of a call [H], in the sequence of a number."""


def measured(
    call: AttentionCall, results: Results, probed: Probed | None = None, declared: AttentionVariant | None = None
) -> Measures:
    """Return the measures of a call by name, [N, H] float64 on the CPU.

    Those of inputs, of results, and where ``probed`` is given of what the attention said when it was asked.
    ``declared`` is what the attention says that it rounds.
    """
    return by_sequence(call, results, probed, functools.partial(_of_heads, declared=declared))


def by_sequence(call: AttentionCall, results: Results, probed: Probed | None, of_heads: _OfHeads) -> Measures:
    """Return what ``of_heads`` measures of each sequence, [N, H] on the CPU; it is given some heads at a time."""
    if not call.q.shape[0]:
        raise ValueError("a call of no sequence")
    found = []
    for n in range(call.q.shape[0]):
        parts = [of_heads(*some, n) for some in _split(call, results, probed)]
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return {name: torch.stack([one[name] for one in found]).cpu() for name in found[0]}


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


def _split(
    call: AttentionCall, results: Results, probed: Probed | None
) -> Iterator[tuple[AttentionCall, Results, Probed | None]]:
    """Return the call in parts of some heads of keys each, with the heads of queries that share them."""
    length, groups = call.q.shape[-2], call.groups
    step = max(1, _ELEMENTS // (groups * length**2))
    for start in range(0, call.k.shape[1], step):
        keys = slice(start, min(start + step, call.k.shape[1]))
        queries = slice(keys.start * groups, keys.stop * groups)
        some = Results(
            out=None if results.out is None else results.out[:, queries],
            grad_q=None if results.grad_q is None else results.grad_q[:, queries],
            grad_k=None if results.grad_k is None else results.grad_k[:, keys],
            grad_v=None if results.grad_v is None else results.grad_v[:, keys],
        )
        asked = probed and dataclasses.replace(
            probed,
            out=probed.out[:, queries],
            row_sums=probed.row_sums[:, queries],
            responses=probed.responses[:, queries],
            weights=probed.weights[:, queries],
            masses=probed.masses[:, keys],
        )
        yield call.of_heads(keys), some, asked
