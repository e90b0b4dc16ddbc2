"""What O shows of an attention that was written by hand: a scale that its call was not told, a window of another size.

Many models mean another scale than 1/√d, and who counts a window's keys otherwise may mean it. So neither is a fault:
the form has what O shows, and a diagnosis tells it. Shapes: :mod:`flashpoint.watching.agreement`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint.diagnosis.finding import standard_errors
from flashpoint.diagnosis.form import Form
from flashpoint.watching.agreement import agreeing
from flashpoint.watching.left_out import LeftOut
from flashpoint.watching.masks import check_size

_ROWS, _ROWS_OF_WINDOW = 64, 16
"""Of the first sequence that are looked at."""
_STARTS = [power / 2 * math.log(2) for power in range(-16, 17)]
"""Logarithms of factors from which a scale is looked for: between them O is nearly linear in it."""
_STEPS = 8
"""Of Gauss and Newton."""
_BY_ROUNDING = 5e-4
"""Of a scale: roundings to BF16, of S too, make some 1e-4 without a sign."""
_LEFT = 0.25
"""Of the error of O. A scale that leaves less accounts for it."""


def with_scale(form: Form, tensors: Sequence[Tensor]) -> Form | None:
    """Return a form with the scale that O shows; None where most heads show the form's own, or none.

    Only a scale that a program would have counts: 1, 1/d, √d, or 1/√n or n of the one whole number that is near enough.
    Else errors of δ could not be told from those of the scale.

    Args:
        tensors: q, k, v and O, as of :func:`.agreeing`.

    Raises:
        LeftOut: a scale accounts for O, but it is none of these, or one of each head's own.
    """
    if form.sink is not None:
        return None
    found, spread, left = _scales(form, [x[0] for x in tensors])
    tells, size = found.isfinite(), tensors[0].shape[-1]
    certain = standard_errors(min(_ROWS, tensors[0].shape[2]), len(found))
    margin = certain * (spread.square() + _BY_ROUNDING**2).sqrt()
    if 2 * (tells & (found.abs() > margin)).sum() <= tells.sum():
        return None
    found, margin, left = found[tells], margin[tells], left[tells]
    weights = margin.square().reciprocal()
    mean, of_mean = float((found * weights).sum() / weights.sum()), float(weights.sum().rsqrt())
    near = form.scale * math.exp(mean)
    usual = [one for one in (1.0, 1 / size, size**0.5) if abs(math.log(one / near)) <= of_mean]
    power = -2 if near < 1 else 1
    ends = sorted((near * math.exp(by * of_mean)) ** power for by in (-1, 1))
    whole = range(max(1, math.ceil(ends[0])), math.floor(ends[1]) + 1)
    scales = usual or ([whole[0] ** (1 / power)] if len(whole) == 1 else [])
    alike = [one for one in scales if bool(((found - math.log(one / form.scale)).abs() <= margin).all())]
    if alike and agreeing([other := dataclasses.replace(form, scale=alike[0])], tensors, closely=True):
        return other
    if bool((left < _LEFT).all()):
        least, most = (form.scale * math.exp(float(one)) for one in (found.min(), found.max()))
        told = (
            f"{least:.3g}" if most < 1.01 * least else f"{least:.3g} to {most:.3g} in its heads, or has a bias or sink"
        )
        remedy = "give it a parameter scale, or scale q before it, if it is no fault"
        raise LeftOut(f"O is of scale {told}, where 1/√d is {form.scale:.3g}, which it was not told: {remedy}")
    return None


def with_window(form: Form, tensors: Sequence[Tensor]) -> Form | None:
    """Return a causal form with a window of as many keys as O shows, in the place of its own or of none; None where O
    is not that of a window."""
    q, k, v, out = (x[0].to(tensors[3].dtype).double() for x in tensors)
    length, plain = q.shape[1], dataclasses.replace(form, mask=None)
    if not plain.is_plain or form.sink is not None or not form.is_causal or length != k.shape[1]:
        return None
    if form.mask is not None and form.window is None:
        return None
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    errors = q.new_zeros(length)  # by the keys that are seen, less 1
    for row in torch.linspace(0, length - 1, min(length, _ROWS_OF_WINDOW)).long().tolist():
        scores = (form.scale * q[:, row, None] @ k[:, : row + 1].mT)[:, 0].flip(-1)  # nearest keys first
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = (weights[..., None] * v[:, : row + 1].flip(1)).cumsum(1) / weights.cumsum(-1).clamp_min(1e-300)[
            ..., None
        ]
        of_row = (sums - out[:, row, None]).square().sum((0, 2)) / out[:, row].square().sum().clamp_min(1e-300)
        errors[: row + 1] += of_row
        errors[row + 1 :] += of_row[-1]
    keys = 1 + int(errors.argmin())
    check_size("the mask of a window", (length, length), 1)
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - keys)
    return agreeing([dataclasses.replace(plain, mask=mask[None, None])], tensors, closely=True)


def _scales(form: Form, sequence: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithm [H] of the scale over the form's by least squares, its standard error over rows, and what
    share of O's squared error it leaves; NaN in heads where no row tells."""
    q, k, v, out = (x.to(sequence[3].dtype).double() for x in sequence)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    rows = torch.linspace(0, q.shape[1] - 1, min(q.shape[1], _ROWS), device=q.device).long()
    raw, dropped, out = form.scale * q[:, rows] @ k.mT, form.dropped(0, rows), out[:, rows]

    def weigh(weights: Tensor) -> Tensor:
        return weights @ v if dropped is None else (weights * dropped) @ v

    def rest_of(by: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_scale = raw * by.exp()[:, None, None]
        probs = form.scores(of_scale.clone(), 0, rows).softmax(-1).nan_to_num(0.0)
        return out - weigh(probs), probs, of_scale

    def rest_and_slope(by: Tensor) -> tuple[Tensor, Tensor]:
        rest, probs, of_scale = rest_of(by)
        moved = of_scale if not form.softcap else of_scale * (1 - (of_scale / form.softcap).tanh().square())
        return rest, weigh(probs * (moved - (probs * moved).sum(-1, keepdim=True)))

    none = raw.new_zeros(len(raw))
    starts = [none + start for start in _STARTS]
    rests = torch.stack([rest_of(start)[0].square().sum((1, 2)) for start in (none, *starts)])
    by = torch.stack([none, *starts]).gather(0, rests.argmin(0)[None])[0]
    for _ in range(_STEPS):
        rest, slope = rest_and_slope(by)
        size = slope.square().sum((1, 2))
        by = by + ((rest * slope).sum((1, 2)) / size.clamp_min(1e-300)).clamp(-1, 1)
    rest, slope = rest_and_slope(by)
    size = slope.square().sum((1, 2))
    tells = size > 1e-12 * out.square().sum((1, 2))
    spread = (rest * slope).sum(2).square().sum(1).sqrt() / size.clamp_min(1e-300)
    return by.where(tells, torch.nan), spread, rest.square().sum((1, 2)) / rests[0].clamp_min(1e-300)
