"""The error of δ that a call's dQ tells of, and whether it follows the rounding of O.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.measures import Measures

_UNKNOWNS = 3
"""Of the regression in :func:`delta_follows`: two slopes and a constant. As many rows fit whatever they hold."""
_LEAST_LEFT = 1e-12
"""Share of the square sum of a term, of which the other terms leave more if it is not made of them: FP64 leaves 1e-20
of one that is."""


def delta_error_of(grad_q: Tensor, true: Exact, scale: float) -> Tensor:
    """Return the error of δ [H, T] that dQ's error along PK tells of."""
    pk = true.attended_keys
    return -((grad_q - true.grad_q) * pk).sum(-1) / (scale * pk.square().sum(-1).clamp_min(1e-300))


def noise_of_grad_q(true: Exact, scale: float) -> Tensor:
    """Return what roundings of dS and dQ by 1 add to the error of δ [H, T] that dQ tells of; infinite where PK is 0."""
    size = true.attended_keys.norm(dim=-1, keepdim=True)
    along = true.attended_keys / size.clamp_min(1e-300)
    of_grad_scores = (true.grad_scores * (along @ true.k.mT)).square().sum(-1)
    of_grad_q = (true.grad_q * along / scale).square().sum(-1)
    return torch.where(size[..., 0] > 0, (of_grad_scores + of_grad_q).sqrt() / size[..., 0], math.inf)


def delta_follows(call: AttentionCall, out: Tensor, error: Tensor, noise: Tensor, true: Exact, n: int) -> Measures:
    """Return those measures of :func:`.of_results` that say whether δ takes the rounding of O, [H] each.

    Args:
        out: O [H, T, d] float64 as the attention returned it.
        error: of δ [H, T] float64.
        noise: what roundings by 1 add to each ``error``; infinite for rows of which it does not tell.
    """
    from flashpoint.diagnosis.rounded_out import out_of_rounded_probs  # the reference, which takes a while to load

    grad_out, of_probs = call.grad_out[n].double(), out_of_rounded_probs(call, n)
    of_out, others = ((grad_out * difference).sum(-1) for difference in (out - of_probs, of_probs - true.out))
    # The reference may round P̄ otherwise than the attention does, as tiles have other maxima: that is noise, too.
    delta = (grad_out * true.out).sum(-1, keepdim=True)
    of_rounded = (true.grad_scores + true.probs * delta).square().sum(-1)  # P∘dP
    weights = (noise.square() + of_rounded).rsqrt()
    rows = (true.bound > 0) & noise.isfinite() & torch.stack([of_out, others, error, weights]).isfinite().all(0)
    x, other, y, unit = (of * weights for of in (of_out, others, error, true.bound))
    x, other, y, unit = (of.where(rows, 0.0) for of in (x, other, y, unit))
    size = x.square().sum(-1)
    other = _without(other, unit)  # a constant error follows neither
    x = _without(_without(x, unit), other)
    left = x.square().sum(-1)
    tells = (rows.sum(-1) > _UNKNOWNS) & (left > _LEAST_LEFT * size)
    bound = true.bound.where(rows, 0.0).square().sum(-1)
    return {
        table.FOLLOWS_OUT.name: torch.where(tells, (x * y).sum(-1) / left, torch.nan),
        table.DELTA_ROUNDING.name: (of_out.where(rows, 0.0).square().sum(-1) / bound.clamp_min(1e-300)).sqrt(),
    }


def _without(x: Tensor, other: Tensor) -> Tensor:
    """Return x [H, T] without its part along other [H, T]."""
    unit = other / other.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return x - (x * unit).sum(-1, keepdim=True) * unit
