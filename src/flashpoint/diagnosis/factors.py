"""Factors that an attention has beside what it was told: on the scores inside, and on dQ.

Both look like an error of δ that has a mean. A softmax of S·(1 + η), as with another scale or a soft cap, moves O along
the covariance of S and V under P. A factor of dQ, as of a backward pass whose P or α is off, moves dQ along itself. So
it is looked for across PK, where an error of δ moves nothing.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.finding import (
    DEAD_ROWS,
    FP32_COARSE,
    Finding,
    Make,
    by_cap,
    cut_off,
    explained,
    fp32_error,
    of_another_function,
    surely_off,
    told_range,
)
from flashpoint.diagnosis.measures import Measures

_SCORES_OFF = 5e-4
"""A factor of the scores that is told, beside 1. Roundings to BF16, of S too, make some 1e-4 without a sign."""
_GRAD_Q_OFF = 2e-3
"""The same of dQ: roundings of dS and dQ make some 1e-4."""
_OF_ROUNDING = 4.0
"""Times the factor that rounded scores make, by this package's reference: where all are large, they make all alike."""
_LEFT = 0.25
"""Of the error of O. A factor that leaves less accounts for it, however far it moves O."""
_STARTS = [2.0**power - 1 for power in range(-6, 7)]
"""From which a factor far from 1 is looked for, too: between them O is nearly linear in it."""
_LEAST_ADDED = -0.9
"""Of ℓ, which is 1 at least."""
_STEPS = 8
"""Of Gauss and Newton: O is not linear in a factor far from 1."""


@dataclass(frozen=True)
class Factors:
    """Heads [H] in which a factor surely is not 1, and what it is there, beside 1; and those of another function.

    Attributes:
        scores, grad_q: float64, 0 in the other heads.
        account: bool, where that of the scores accounts for the whole error of O, which is no small one.
        rounded: bool, where the rounding of scores makes a factor like that of the scores.
        another: bool, as of :func:`.of_another_function`.
    """

    scores: Tensor
    rounded: Tensor
    account: Tensor
    grad_q: Tensor
    another: Tensor

    @property
    def of_scores(self) -> Tensor:
        """Heads whose scores have a factor that their rounding does not make."""
        return (self.scores != 0) & ~self.rounded

    @property
    def of_rounding(self) -> Tensor:
        """Heads whose scores have a factor that their rounding makes, too; no finding names it."""
        return (self.scores != 0) & self.rounded

    @property
    def either(self) -> Tensor:
        """Heads in which an error of dQ along PK does not tell of δ."""
        return (self.scores != 0) | (self.grad_q != 0) | self.another


def factors_of_scores(outs: Sequence[Tensor], true: Exact) -> list[Tensor]:
    """Return η of the scores [H] in each O [H, T, d] of some, by least squares; NaN where no row tells, as where each
    query sees one key."""
    moved = _moved(true.probs, true, true.out)
    return [_slope(found - true.out, moved, true.out) for found in outs]


def fitted_factor(found: Tensor, true: Exact, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return η of the scores [H] in an O [H, T, d] that may be far from 0, and the share of O's error that it leaves.
    Where it leaves more than :data:`_LEFT`, which is no such O, return ``start``."""
    factor, left = _fitted_from(start.nan_to_num(0.0), found, true)
    if not (left < _LEFT).all():  # as where another scale is inside by mistake, such as 1 or 1/d
        others = [torch.full_like(factor, other) for other in _STARTS]
        rests = torch.stack([_rest(other, found, true) for other in others])
        again, left_again = _fitted_from(torch.stack(others).gather(0, rests.argmin(0)[None])[0], found, true)
        factor, left = torch.where(left < _LEFT, factor, again), torch.where(left < _LEFT, left, left_again)
    return torch.where(left < _LEFT, factor, start), left.nan_to_num(1.0)


def _fitted_from(start: Tensor, found: Tensor, true: Exact) -> tuple[Tensor, Tensor]:
    """Return the factor [H] by Gauss and Newton from one, and the share of O's error that it leaves."""
    factor = start
    for _ in range(_STEPS):
        probs = _with_factor(true, factor)
        out = _times_dropped(probs, true) @ true.v
        factor = factor + _slope(found - out, _moved(probs, true, out, factor), true.out).nan_to_num(0.0)
    return factor, _rest(factor, found, true) / (found - true.out).norm(dim=(-2, -1)).clamp_min(1e-300)


def out_of_factor(factor: Tensor, true: Exact) -> Tensor:
    """Return O [H, T_q, d_v] of scores times 1 + ``factor`` [H]."""
    return _times_dropped(_with_factor(true, factor), true) @ true.v


def _rest(factor: Tensor, found: Tensor, true: Exact) -> Tensor:
    """Return how far O is [H] from that of a factor."""
    return (found - out_of_factor(factor, true)).norm(dim=(-2, -1))


def added_to_denominator(found: Tensor, true: Exact) -> tuple[Tensor, Tensor]:
    """Return the constant c [H] of the O of ℓ + c that is nearest to O [H, T, d], and what it leaves of O's error.

    ℓ = Σⱼ exp(Sⱼ − max S) of a row is 1 over its largest P. Gauss and Newton, from 0.
    """
    largest = true.probs.amax(-1)
    added = largest.new_zeros(len(largest))
    for _ in range(_STEPS):
        short = 1 / (1 + added[:, None] * largest)
        moved = -(short.square() * largest)[..., None] * true.out
        step = _slope(found - short[..., None] * true.out, moved, true.out).nan_to_num(0.0)
        added = (added + step).clamp_min(_LEAST_ADDED)
    return added, found - true.out / (1 + added[:, None] * largest)[..., None]


def factor_of_grad_q(found: Tensor, true: Exact) -> Tensor:
    """Return the factor of dQ [H, T, d], beside 1, by least squares across PK."""
    size = true.attended_keys.norm(dim=-1, keepdim=True)
    unit = true.attended_keys / size.clamp_min(1e-300)
    error, across = (x - (x * unit).sum(-1, keepdim=True) * unit for x in (found - true.grad_q, true.grad_q))
    return _slope(error, across, true.grad_q)


def factors_of(measures: Measures, identities: Sequence[str]) -> Factors:
    """Return the factors of a call's heads that are sure over its sequences.

    Where scores are so small that they hardly move O, and V of all sequences is much alike, the rounding of O looks
    like a factor in each of them. That says nothing of the scores, nor does an O that is cut off, and so shorter.
    """
    told_apart = fp32_error(measures) < FP32_COARSE
    none = torch.zeros_like(fp32_error(measures))
    by_rounding, of_out = (
        measures[one.name].nanmean(0).abs().nan_to_num(0.0)
        for one in (table.SCORE_FACTOR_COARSE, table.SCORE_FACTOR_EXPECTED)
    )
    scores = surely_off(measures[table.SCORE_FACTOR.name], identities, _SCORES_OFF)
    left = measures[table.SCORE_FACTOR_LEFT.name].amax(0)
    shows = told_apart & ((measures[table.DEAD_ROWS.name].mean(0) <= DEAD_ROWS) | (left < _LEFT))
    grad_q, another = none, of_another_function(measures)
    if table.GRAD_Q_FACTOR.name in measures:
        fp16 = measures.get(table.GRAD_Q.fp16.name)
        least = _GRAD_Q_OFF + by_cap(measures, table.GRAD_Q_CAP).amax(0)
        least = least if fp16 is None else least + 2 * fp16.nanmean(0).nan_to_num(0.0)
        grad_q = surely_off(measures[table.GRAD_Q_FACTOR.name], identities, least).where(
            told_apart & ~explained(measures) & ~another, none
        )
    rounded = scores.abs() < _OF_ROUNDING * by_rounding
    shows &= rounded | (scores.abs() >= _OF_ROUNDING * of_out)
    scores = scores.where(shows & ~cut_off(measures, identities), none)
    account = (scores != 0) & ~rounded & (left < _LEFT)
    return Factors(scores, rounded, account, grad_q, another)


def factor_findings(factors: Factors, measures: Measures, finding: Make) -> list[Finding]:
    """Say which heads have a factor: of the scores, or else of dQ alone."""
    found = []
    if (heads := factors.of_scores).any():
        told = told_range(1 + factors.scores[heads], ".4f")
        errs, normal = (
            float(measures[one.name][:, heads].mean()) for one in (table.OUT_ERROR, table.OUT_ERROR_EXPECTED)
        )
        text = (
            f"O is as of scores times {told}: another scale is inside, or a soft cap; O is off by {errs:.1e}, where "
            f"the rounding of P̄ and O makes {normal:.1e}; dQ tells nothing of δ there"
        )
        found.append(finding("other_scores", heads, text))
    if (heads := (factors.grad_q != 0) & (factors.scores == 0)).any():
        told = told_range(1 + factors.grad_q[heads], ".3f")
        text = f"dQ is {told} times what it should be, and O is right; dQ tells nothing of δ there"
        found.append(finding("gradients_off", heads, text))
    return found


def _moved(probs: Tensor, true: Exact, out: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return the derivative of O [H, T_q, d_v] by a factor of α QKᵀ, where P and O are these and the factor 1 + η."""
    scores = true.seen_raw
    if true.softcap:
        at = scores if factor is None else (1 + factor[:, None, None]) * scores
        scores = scores * (1 - torch.tanh(at / true.softcap).square())
    weighted = probs * scores
    return _times_dropped(weighted, true) @ true.v - weighted.sum(-1, keepdim=True) * out


def _with_factor(true: Exact, factor: Tensor) -> Tensor:
    """Return P [H, T_q, T_k] of α QKᵀ times 1 + η, η [H]; the score of a sink is as it was."""
    scores, added = true.seen_raw, factor[:, None, None] * true.seen_raw
    if true.softcap:
        added = true.softcap * (torch.tanh((scores + added) / true.softcap) - torch.tanh(scores / true.softcap))
    largest = added.amax(-1, keepdim=True).clamp_min(0.0)
    weights = true.probs * (added - largest).exp()
    of_sink = (1 - true.mass).clamp_min(0.0)[..., None] * (-largest).exp()
    return weights / (weights.sum(-1, keepdim=True) + of_sink)


def _times_dropped(probs: Tensor, true: Exact) -> Tensor:
    return probs if true.dropped is None else probs * true.dropped


def _slope(error: Tensor, moved: Tensor, whole: Tensor) -> Tensor:
    """Return the slope [H] of an error on what a factor moves [H, T, d]."""
    size = moved.square().sum((-2, -1))
    tells = size > 1e-12 * whole.square().sum((-2, -1))  # FP64 leaves 1e-30 of what cancels
    return ((error * moved).sum((-2, -1)) / size.clamp_min(1e-300)).where(tells, torch.nan)
