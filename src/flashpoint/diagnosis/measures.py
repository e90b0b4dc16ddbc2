"""What is measured of each head, what the inputs of a call say of it, and what several sequences say together.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall, heads_of
from flashpoint.diagnosis.exact import Exact

_ELEMENTS = 1 << 24
"""Scores that are held at a time, if those of one head of keys are not more."""


@dataclass(frozen=True)
class Results:
    """What an attention returned for a call, in the shapes of :class:`.AttentionCall`; None where nobody kept it."""

    out: Tensor | None = None
    grad_q: Tensor | None = None
    grad_k: Tensor | None = None
    grad_v: Tensor | None = None

    @classmethod
    def kept(cls, call: AttentionCall) -> Results:
        """The results that the call itself holds."""
        return cls(call.out, call.grad_q, call.grad_k, call.grad_v)

    def as_one_sequence(self, some: slice) -> Results:
        """Return those of :meth:`.AttentionCall.as_one_sequence`."""
        return Results(*(None if x is None else heads_of(x, some) for x in vars(self).values()))


@dataclass(frozen=True)
class Probed:
    """What an attention did with the features of its own.

    Attributes:
        out: O [N, H, T_q, d_v].
        row_sums: Σⱼ dSᵢⱼ / α [N, H, T_q] float64, α left out.
        responses: dOᵢ·∂Oᵢ/∂c [N, H, T_q] float64, with c nats added to all scores of row i: what Σⱼ dSᵢⱼ / α has to be.
        weights: [N, H, T_q, blocks], what each query gives each block of keys.
        masses: [N, H, blocks], the mean Σⱼ Pᵢⱼ of each block of queries in the backward pass; 1 in exact arithmetic
            without a sink.
        block: queries, and keys, of a block.
    """

    out: Tensor
    row_sums: Tensor
    responses: Tensor
    weights: Tensor
    masses: Tensor
    block: int

    def as_one_sequence(self, some: slice) -> Probed:
        """Return what was asked of :meth:`.AttentionCall.as_one_sequence`."""
        tensors: dict[str, Any] = {name: heads_of(x, some) for name, x in vars(self).items() if name != "block"}
        return dataclasses.replace(self, **tensors)


def without_empty_rows(call: AttentionCall, results: Results) -> tuple[AttentionCall, Results, Tensor | None]:
    """Return a call and its results without what rows hold that see no key, and these rows [N, H, T_q].

    A library returns 0, NaN or the mean of V there, and none is wrong: O, dO and dQ are 0 in what is returned. Where a
    gradient came to such a row, and O is not 0 in it, dK and dV may have a part of it: they are None. Where all rows
    see a key all is as it was, and the rows are None.
    """
    empty = call.form.empty_rows((*call.q.shape[:3], call.k.shape[2]), call.q.device)
    if empty is None or not empty.any():
        return call, results, None
    rows = empty[..., None]
    out, grad_q = (None if x is None else x.masked_fill(rows, 0.0) for x in (results.out, results.grad_q))
    told = (call.grad_out.masked_fill(~rows, 0.0) != 0).any(-1)
    if results.out is not None:
        told &= (results.out.masked_fill(~rows, 0.0) != 0).any(-1)
    of_keys = (None, None) if told.any() else (results.grad_k, results.grad_v)
    return (
        dataclasses.replace(call, grad_out=call.grad_out.masked_fill(rows, 0.0)),
        Results(out, grad_q, *of_keys),
        empty,
    )


Measures = dict[str, Tensor]
"""Measures by name, float64: [H] of a sequence, [N, H] of a call. Those of results that nobody kept are left out."""


_OfHeads = Callable[[AttentionCall, Results, Probed | None, int], Measures]
"""Measures the heads of a call [H], in the sequence of a number."""


def by_sequence(call: AttentionCall, results: Results, probed: Probed | None, of_heads: _OfHeads) -> Measures:
    """Return what ``of_heads`` measures of each sequence, [N, H] on the CPU; it is given some heads at a time. Heads of
    short sequences it is given as those of one."""
    sequences, heads = call.q.shape[:2]
    if not sequences:
        raise ValueError("a call of no sequence")
    found = []
    for start in range(0, sequences, call.at_a_time):
        whole, n = (call, results, probed), start
        if call.at_a_time > 1:
            some, n = slice(start, start + call.at_a_time), 0
            asked = probed and probed.as_one_sequence(some)
            whole = call.as_one_sequence(some), results.as_one_sequence(some), asked
        parts = [of_heads(*part, n) for part in _split(*whole)]
        found.append({name: torch.cat([part[name] for part in parts]).view(-1, heads) for name in parts[0]})
    return {name: torch.cat([one[name] for one in found]).cpu() for name in found[0]}


def _split(
    call: AttentionCall, results: Results, probed: Probed | None
) -> Iterator[tuple[AttentionCall, Results, Probed | None]]:
    """Return the call in parts of some heads of keys each, with the heads of queries that share them."""
    groups = call.groups
    step = max(1, _ELEMENTS // (groups * call.q.shape[-2] * call.k.shape[-2]))
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


def over_sequences(measures: Measures) -> Measures:
    """Return what measures [N, H] say of N sequences together, [H] each.

    How, the table says of each (:data:`.measure_table.Pooling`). A mean is NaN where one value is; ``mean where known``
    is NaN where no sequence tells.
    """
    found = {}
    for name, values in measures.items():
        match table.MEASURES[name].pooled:
            case "largest":
                found[name] = values.amax(0)
            case "mean where known":
                found[name] = values.nanmean(0)
            case "mean" | "of sums":
                found[name] = values.mean(0)
    for source in table.SOURCES:
        if source.bound.name in measures:
            found |= of_errors(source, measures)
    return found


def of_errors(source: table.DeltaErrorMeasures, measures: Measures) -> Measures:
    """Return the measures of an error of δ of sequences together, [H], of what :func:`relative` says of each [N, H].

    The bias is the ratio of the sums of ε and of bounds: a mean of ratios would count a sequence without loss as one
    without bias. The noise is the root mean square, for which sequences weigh by their squared bounds.
    """
    noises, sums, bounds, rows = (measures[one.name] for one in (source.noise, source.sum, source.bound, source.rows))
    weights = bounds / bounds.square().sum(0).sqrt().clamp_min(1e-300)
    return {
        source.bias.name: sums.sum(0) / bounds.sum(0).clamp_min(1e-300),
        source.noise.name: (noises * weights).square().sum(0).sqrt(),
        source.sum.name: sums.sum(0),
        source.bound.name: bounds.sum(0),
        source.rows.name: bounds.sum(0).square() / (bounds.square() / rows.clamp_min(1.0)).sum(0).clamp_min(1e-300),
    }


def relative(source: table.DeltaErrorMeasures, error: Tensor, bound: Tensor) -> Measures:
    """Return what errors of δ [H, T] say beside each row's bound, [H] each: bias and noise in its unit, sums of both in
    nats, and how many rows tell the bias."""
    squares = bound.square().sum(-1).clamp_min(1e-300)
    return {
        source.bias.name: error.sum(-1) / bound.sum(-1).clamp_min(1e-300),
        source.noise.name: (error.square().sum(-1) / squares).sqrt(),
        source.sum.name: error.sum(-1),
        source.bound.name: bound.sum(-1),
        source.rows.name: bound.sum(-1).square() / squares,
    }


def finite_part(returned: Tensor) -> Tensor:
    """Return a result as float64, with 0 in the place of NaN and infinity."""
    return returned.double().nan_to_num(0.0, 0.0, 0.0)


def of_scores(true: Exact) -> Measures:
    """Return what the scores of a sequence say, [H] each; NaN where q or k is no finite number."""
    told = true.q.isfinite().all(-1).all(-1) & true.k.isfinite().all(-1).all(-1)
    rounded = true.scores.bfloat16()
    tied = (rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1
    several = true.seen.sum(-1) > 1
    lowest, highest = true.seen_raw.flatten(-2).aminmax(dim=-1)
    return {
        table.TIES.name: ((tied & several).double().sum(-1) / several.sum(-1).clamp_min(1)).where(told, torch.nan),
        table.LARGEST_SCORE.name: torch.maximum(-lowest, highest).where(told, torch.nan),
    }


def of_inputs(true: Exact) -> Measures:
    """Return what the inputs of a sequence alone say, [H] each: those of :func:`of_scores`, and what all keys share.

    The terms of ``score_spacing`` are of a query and a key that it sees. Kernels hold S·log₂e.
    """
    terms = (true.q.abs() @ true.k.abs().mT).masked_fill_(~true.seen, 0.0)
    if true.bias is not None:  # at pairs that have a weight, which FP32 adds to the score
        terms += true.bias.abs().masked_fill(true.probs < 2**-24, 0.0) / true.scale
    largest = true.scale * terms.amax((-2, -1)) / math.log(2)
    above = torch.nextafter(largest.float(), torch.tensor(math.inf, device=largest.device))
    shared = true.k.mean(-2).square().sum(-1) / true.k.square().sum(-1).mean(-1).clamp_min(1e-300)
    return {
        **of_scores(true),
        table.SCORE_OFFSET.name: (true.seen_raw.sum(-1) / true.seen.sum(-1).clamp_min(1)).abs().mean(-1),
        table.SCORE_SPACING.name: (above - largest.float()).double() * math.log(2),
        table.MEAN_KEY_SHARE.name: shared,
    }
