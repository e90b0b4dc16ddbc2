"""What the inputs of an attention call say of each head.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.measures import Measures


def of_scores(true: Exact) -> Measures:
    """Return what the scores of a sequence say, [H] each; NaN where a score that is not masked is no finite number."""
    # What is not finite in q or k makes its row's own score so, which no mask hides.
    told = true.scores.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    finite = true.scores.isfinite()
    rounded = true.scores.bfloat16()
    tied = (rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1
    several = finite.sum(-1) > 1
    lowest, highest = true.scores.masked_fill(~finite, 0.0).flatten(-2).aminmax(dim=-1)
    return {
        table.TIES.name: ((tied & several).double().sum(-1) / several.sum(-1).clamp_min(1)).where(told, torch.nan),
        table.LARGEST_SCORE.name: torch.maximum(-lowest, highest).where(told, torch.nan),
    }


def of_inputs(true: Exact, q: Tensor, scale: float) -> Measures:
    """Return what the inputs of a sequence alone say, [H] each: those of :func:`of_scores`, and what all keys share.

    The terms of ``score_spacing`` are of a query and a key that it sees. Kernels hold S·log₂e.
    """
    seen = true.scores.isfinite()
    finite = true.scores.masked_fill(~seen, 0.0)
    terms = (q.abs() @ true.k.abs().mT).masked_fill_(~seen, 0.0)
    largest = scale * terms.amax((-2, -1)) / math.log(2)
    above = torch.nextafter(largest.float(), torch.tensor(math.inf, device=largest.device))
    shared = true.k.mean(-2).square().sum(-1) / true.k.square().sum(-1).mean(-1).clamp_min(1e-300)
    return {
        **of_scores(true),
        table.SCORE_OFFSET.name: (finite.sum(-1) / seen.sum(-1)).abs().mean(-1),
        table.SCORE_SPACING.name: (above - largest.float()).double() * math.log(2),
        table.MEAN_KEY_SHARE.name: shared,
    }
