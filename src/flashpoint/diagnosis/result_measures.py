"""What an attention call's results say of each head, against FP64 on the same Q, K, V and dO.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.measures import Measures, Results, finite_part, relative

if TYPE_CHECKING:
    from flashpoint.diagnosis.roundings import RoundedOut
    from flashpoint.numerics.variant import AttentionVariant

OUT_OFF = 0.01
"""Relative error of O beyond which a factor of the scores may be far from 1; rounding P̄ and O to BF16 makes 0.003."""
ROW_OFF = 0.1
"""A row is off where its O or dQ is farther than this share of its length from FP64's; BF16's rounding is 0.004."""
DEAD = 0.5
"""A row is switched off where |O| is below this share of FP64's."""
NO_ROW = 2**-23
"""A row has no O to be switched off where FP64's |O| is not above this share of the head's root mean square."""
_TURNED_BEYOND = 4.0
"""Times the largest error of a row that roundings make, from where a row is turned by something else."""
BF16 = 2**-9
"""A common relative error of a number rounded to BF16, half of the largest."""
FP16_STEP = 2**-24
"""How far FP16's numbers lie apart below its smallest normal number, 2^-14."""
FP16_MAX = 65_504.0
_GRADIENTS = {"grad_q": table.GRAD_Q, "grad_k": table.GRAD_K, "grad_v": table.GRAD_V}


def of_results(
    call: AttentionCall,
    results: Results,
    true: Exact,
    n: int,
    rounded: RoundedOut | None,
    declared: AttentionVariant | None,
) -> Measures:
    """Return how the results of a sequence differ from FP64's, [H] each: what the table has from ``nonfinite`` on.
    ``rounded`` is of their O, and None without one.

    A gradient's error is NaN where it and FP64's are 0, as without loss (:func:`_size`). Where O of a head is off by
    more than :data:`OUT_OFF`, its ``score_factor`` and ``score_factor_left`` are of :func:`.fitted_factor`.
    """
    from flashpoint.diagnosis.roundings import of_delta  # a loop that is watched does without

    measured: Measures = {}
    delta_error = None if results.grad_q is None else delta_error_of(results.grad_q[n].double(), true)
    if rounded is not None:
        measured[table.NONFINITE_OUT.name] = (~rounded.out.isfinite().all(-1)).double().sum(-1)
        measured |= _of_returned_out(call, rounded, true, n, declared)
    for name in _GRADIENTS:
        if (returned := getattr(results, name)) is not None:
            measured |= _of_gradient(name, finite_part(returned[n]), call, true, n, delta_error)
    if rounded is not None and results.grad_v is not None:
        found, grad_v = finite_part(rounded.out), finite_part(results.grad_v[n])
        measured[table.OUT_UNSHARED.name] = _unshared(found, grad_v, call, true)
    if rounded is not None and results.grad_q is not None:
        measured |= _beside_factor(results, finite_part(rounded.out), measured, call, true, n)
    if true.softcap:
        measured |= of_cap(call, true, n)
    if call.q.dtype == call.grad_out.dtype == torch.float16:
        measured |= of_fp16(call, true, n)
    if delta_error is not None:
        noise = noise_of_grad_q(true)
        measured[table.GRAD_DELTA_ROUNDING.name] = _rounding_of_grad_q(noise, true)
        if rounded is not None:
            measured |= of_delta(rounded, delta_error, noise, true)
    return {**measured, table.NONFINITE.name: _rows_not_finite(call, results, rounded, true, n)}


def _rows_not_finite(call: AttentionCall, results: Results, rounded: RoundedOut | None, true: Exact, n: int) -> Tensor:
    """Return of how many queries or keys [H] some result of a sequence holds NaN or infinity."""
    heads, longest = len(true.out), max(true.q.shape[1], true.k.shape[1])
    places = torch.zeros(heads, longest, dtype=torch.bool, device=true.out.device)
    returned = [] if rounded is None else [(rounded.out, 1)]
    for name in _GRADIENTS:
        if (of_all := getattr(results, name)) is not None:
            returned.append((of_all[n].double(), 1 if name == "grad_q" else call.groups))
    for found, repeats in returned:
        here = ~found.isfinite().all(-1)
        places[:, : here.shape[1]] |= here.repeat_interleave(repeats, 0)
    return places.double().sum(-1)


def _of_gradient(
    name: str, found: Tensor, call: AttentionCall, true: Exact, n: int, delta_error: Tensor | None
) -> Measures:
    """Return the measures of a sequence's dQ, dK or dV, [H] each; ``delta_error`` [H, T] is what dQ tells of δ's."""
    from flashpoint.diagnosis.factors import factor_of_grad_q
    from flashpoint.diagnosis.roundings import of_logsumexp

    rows, of_queries = _GRADIENTS[name], name == "grad_q"
    wanted = true.grad_q if of_queries else _of_keys(getattr(true, name), call)
    measured: Measures = {}
    errors = {rows.error: (found - wanted).norm(dim=(-2, -1))}
    if of_queries:
        measured |= of_grad_q(found, true)
        measured[table.GRAD_Q_FACTOR.name] = factor_of_grad_q(found, true)
        measured |= of_logsumexp(found, true)
        errors[table.GRAD_Q_UNEXPLAINED] = _unexplained_grad_q(found, true)
    if name == "grad_k" and delta_error is not None:
        by_delta = -call.form.scale * (true.slopes.mT @ (delta_error[..., None] * call.q[n].double()))
        unexplained = (found - wanted - _of_keys(by_delta, call)).norm(dim=(-2, -1))
        # Where PK almost cancels, the rounding of dQ looks like a large error of δ, which dK does not have.
        errors[table.GRAD_K_UNEXPLAINED] = torch.minimum(unexplained, errors[rows.error])
    size, repeats = _size(name, wanted, call, true), 1 if of_queries else call.groups
    return measured | {one.name: (error / size).repeat_interleave(repeats, 0) for one, error in errors.items()}


def _unshared(out: Tensor, grad_v: Tensor, call: AttentionCall, true: Exact) -> Tensor:
    """Return what share of O's error dV lacks [H], for O [H, T_q, d_v] and dV [H_kv, T_k, d_v].

    O = P V and dV = Pᵀ dO. So dOᵀ O is dVᵀ V with any P that both passes have: any mask, bias, scale or cap.
    """
    of_out = _of_keys(true.grad_out.mT @ (out - true.out), call)
    values = true.v[:: call.groups]
    of_grad_v = (grad_v - _of_keys(true.grad_v, call)).mT @ values
    size = of_out.norm(dim=(-2, -1))
    share = (of_out - of_grad_v).norm(dim=(-2, -1)) / size
    return share.where(size > 0, torch.nan).repeat_interleave(call.groups, 0)


def _beside_factor(
    results: Results, out: Tensor, measured: Measures, call: AttentionCall, true: Exact, n: int
) -> Measures:
    """Return how far dQ, dK and O are from those of scores that have the factor of dQ. Where it is
    nearer to 1 than :data:`OUT_OFF`, O is taken as without it."""
    from flashpoint.diagnosis.factors import out_of_factor

    assert results.grad_q is not None
    factor = measured[table.GRAD_Q_FACTOR.name].nan_to_num(0.0)
    by, far, of_out = 1 + factor[:, None, None], factor.abs() > OUT_OFF, measured[table.OUT_ERROR.name].clone()
    if far.any():  # [H, T_q, T_k] is gone over where it may tell something
        few = true.of_heads(far)
        size = few.out.norm(dim=(-2, -1)).clamp_min(1e-300)
        of_out[far] = (out[far] - out_of_factor(factor[far], few)).norm(dim=(-2, -1)) / size
    of_q = (finite_part(results.grad_q[n]) - by * true.grad_q).norm(dim=(-2, -1))
    beside = {
        table.GRAD_Q_BESIDE_FACTOR.name: of_q / ((1 + factor).abs() * _size("grad_q", true.grad_q, call, true)),
        table.OUT_BESIDE_FACTOR.name: of_out,
    }
    if results.grad_k is not None:
        wanted = _of_keys(by * true.grad_k, call)
        of_k = (finite_part(results.grad_k[n]) - wanted).norm(dim=(-2, -1)) / _size("grad_k", wanted, call, true)
        beside[table.GRAD_K_BESIDE_FACTOR.name] = of_k.repeat_interleave(call.groups, 0)
    return beside


def _of_returned_out(
    call: AttentionCall, rounded: RoundedOut, true: Exact, n: int, declared: AttentionVariant | None
) -> Measures:
    """Return the measures of a sequence's O, and of what else its roundings would be."""
    from flashpoint.diagnosis.factors import added_to_denominator, factors_of_scores, fitted_factor
    from flashpoint.diagnosis.roundings import of_few_bit_scores

    found, dtype = finite_part(rounded.out), rounded.dtype
    expected, coarse = (x.to(dtype).double() for x in (rounded.of_probs, rounded.coarser(declared)))
    measured = of_out(found, true, true.grad_out, dtype, None if declared else coarse)
    error = found - true.out
    across = error - (_along(error, true)[..., None] * true.out)
    measured[table.OUT_TURNED.name] = across.norm(dim=(-2, -1)) / true.out.norm(dim=(-2, -1)).clamp_min(1e-300)
    numbers = measured[table.OUT_NUMBERS.name] = _degrees_of_freedom(error.flatten(-2))
    of_scores = ((true.probs > 0).sum(-1) - 1).clamp(0, true.out.shape[-1]).sum(-1)
    measured[table.OUT_NUMBERS_OF_SCORES.name] = torch.minimum(numbers, of_scores.clamp_min(1))
    measured[table.SUMS_ROUNDED.name] = rounded.as_of_rounded_sums
    measured[table.OUT_CUT.name] = rounded.as_cut_off
    measured |= of_few_bit_scores(call, found, true, n)
    measured |= _rows_turned(across, coarse, true, dtype)
    added, mended = added_to_denominator(found, true)
    measured[table.DENOMINATOR_ADDED.name] = added
    measured[table.OUT_ERROR_ADDED.name] = mended.norm(dim=(-2, -1)) / true.out.norm(dim=(-2, -1)).clamp_min(1e-300)
    measured[table.LENGTH_ROWS.name] = _degrees_of_freedom(_length_errors(found, true))
    measured |= _expected(expected, coarse, true)
    factor, of_coarse, of_expected = factors_of_scores((found, coarse, expected), true)
    left, off = torch.ones_like(factor), measured[table.OUT_ERROR.name] > OUT_OFF
    if off.any():
        factor[off], left[off] = fitted_factor(found[off], true.of_heads(off), factor[off])
    return {
        **measured,
        table.SCORE_FACTOR.name: factor,
        table.SCORE_FACTOR_COARSE.name: of_coarse,
        table.SCORE_FACTOR_EXPECTED.name: of_expected,
        table.SCORE_FACTOR_LEFT.name: left,
    }


def of_out(found: Tensor, true: Exact, grad_out: Tensor, dtype: torch.dtype, coarse: Tensor | None = None) -> Measures:
    """Return those measures of :func:`of_results` that a sequence's O [H, T, d] has beside FP64's, [H] each.

    Args:
        dtype: in which O was returned.
        coarse: O of an attention that rounds more, whose rows are no fault: see :func:`_dead`.
    """
    difference, size = found - true.out, true.out.norm(dim=-1).clamp_min(1e-300)
    error = (grad_out * difference).sum(-1)
    first, exact = found[:, 0], true.out[:, 0]
    along = (first * exact).sum(-1, keepdim=True) / exact.square().sum(-1, keepdim=True).clamp_min(1e-300)
    return {
        **_rows_off(table.OUT_ROWS_OFF, difference.norm(dim=-1) / size),
        table.FIRST_ROW_TURNED.name: (first - along * exact).norm(dim=-1) / size[:, 0],
        table.DEAD_ROWS.name: _dead(found, true, dtype, coarse),
        table.LENGTH_ERROR.name: _length_error(found, true),
        table.OUT_ERROR.name: difference.norm(dim=(-2, -1)) / true.out.norm(dim=(-2, -1)).clamp_min(1e-300),
        **relative(table.DELTA, error, true.bound),
    }


def of_grad_q(found: Tensor, true: Exact) -> Measures:
    """Return those measures of :func:`of_results` that a sequence's dQ [H, T, d] has beside FP64's, [H] each."""
    difference = found - true.grad_q
    # A row whose own gradient is small has an error from δ all the same: the unit is the head's typical row at least.
    size = true.grad_q.norm(dim=-1)
    size = torch.maximum(size, size.square().mean(-1, keepdim=True).sqrt()).clamp_min(1e-300)
    error = delta_error_of(found, true)
    mean_key = true.k.mean(-2, keepdim=True)
    unit = mean_key / mean_key.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    along = (difference * unit).sum(-1).square().sum(-1) / difference.square().sum((-2, -1)).clamp_min(1e-300)
    return {
        **_rows_off(table.GRAD_Q_ROWS_OFF, difference.norm(dim=-1) / size),
        **relative(table.GRAD_DELTA, error, true.bound),
        table.ALONG_MEAN_KEY.name: along,
    }


def of_fp16(call: AttentionCall, true: Exact, n: int) -> Measures:
    """Return what FP16 makes of a sequence's gradients, [H] each, however exact the sums are."""
    grad_scores = _fp16(true.grad_scores_of(_fp16(true.grad_out @ true.v.mT), _delta(call, true, n)))
    found = {
        "grad_q": _fp16(call.form.scale * (grad_scores @ true.k)),
        "grad_k": _fp16(_of_keys(call.form.scale * (grad_scores.mT @ true.q), call)),
        "grad_v": _fp16(_of_keys(true.grad_v, call)),
    }
    errors: Measures = {}
    for name, gradient in found.items():
        wanted, repeats = (true.grad_q, 1) if name == "grad_q" else (_of_keys(getattr(true, name), call), call.groups)
        error = (gradient - wanted).norm(dim=(-2, -1)) / _size(name, wanted, call, true)
        errors[_GRADIENTS[name].fp16.name] = error.repeat_interleave(repeats, 0)
    rows = (true.grad_out_norm > 0).sum(-1) * call.q.shape[-1]
    return {**errors, table.GRAD_OUT_SIZE.name: (true.grad_out_norm.square().sum(-1) / rows).sqrt()}


def of_cap(call: AttentionCall, true: Exact, n: int) -> Measures:
    """Return what roundings of a soft cap to the inputs' dtype make of a sequence's dQ and dK at most, [H] each.

    With x the score over the cap and t = tanh x, a gradient has the factor 1 - t², and ε is the dtype's: numbers from 1
    on lie ε apart. Below 1 t errs by ε/4, which changes the factor by t ε/2. x is rounded three times by ε/2 of itself:
    as a product, by the scale, by the cap. That changes it by 3 t (1 - t²) |x| ε. Errors of pairs add up as squares.
    """
    x = true.raw / true.softcap
    t = x.tanh()
    change = torch.finfo(call.q.dtype).eps * t.abs() * (0.5 + 3 * (1 - t.square()) * x.abs())
    rounded = dataclasses.replace(true, slopes=true.probs * change)
    squares = rounded.grad_scores_of(true.grad_out @ true.v.mT, _delta(call, true, n)).square()
    of_q = call.form.scale * (squares @ true.k.square()).sum((-2, -1)).sqrt()
    of_k = call.form.scale * _of_keys((squares.mT @ true.q.square()).sum((-2, -1)), call).sqrt()
    of_k = of_k / _size("grad_k", _of_keys(true.grad_k, call), call, true)
    return {
        table.GRAD_Q_CAP.name: of_q / _size("grad_q", true.grad_q, call, true),
        table.GRAD_K_CAP.name: of_k.repeat_interleave(call.groups, 0),
    }


def _delta(call: AttentionCall, true: Exact, n: int) -> Tensor:
    """Return δ [H, T, 1], beside a gradient of L less it."""
    delta = (true.grad_out * true.out).sum(-1, keepdim=True)
    return delta if call.grad_logsumexp is None else delta - call.grad_logsumexp[n].double()[..., None]


def _expected(expected: Tensor, coarse: Tensor, true: Exact) -> Measures:
    """Return the errors of the O of roundings."""
    size = true.out.norm(dim=(-2, -1)).clamp_min(1e-300)
    return {
        table.LENGTH_ERROR_EXPECTED.name: _length_error(expected, true),
        table.OUT_ERROR_EXPECTED.name: (expected - true.out).norm(dim=(-2, -1)) / size,
        table.OUT_ERROR_COARSE.name: (coarse - true.out).norm(dim=(-2, -1)) / size,
    }


def _length_error(found: Tensor, true: Exact) -> Tensor:
    """Return the standard deviation [H] over rows of the error of O along O, over |O|."""
    along = _length_errors(found, true)
    return along.std(-1) if along.shape[-1] > 1 else along.new_zeros(len(along))


def _length_errors(found: Tensor, true: Exact) -> Tensor:
    """Return the error of O along O over |O|, less its mean, of all rows but the first [H, T - 1]."""
    along = _along(found - true.out, true)[:, 1:]
    return along - along.mean(-1, keepdim=True)


def _along(error: Tensor, true: Exact) -> Tensor:
    """Return the part of O's error along O, over |O| [H, T]."""
    return (error * true.out).sum(-1) / true.out.square().sum(-1).clamp_min(1e-300)


def _degrees_of_freedom(errors: Tensor) -> Tensor:
    """Return those [H] of the variance of errors [H, n]: 2 n / (κ - 1), n of normal ones.

    So many normal errors have a variance that is as sure; κ is the kurtosis. They are no more than n, and 1 at least.
    """
    count, squares = errors.shape[-1], errors.square()
    kurtosis = count * squares.square().sum(-1) / squares.sum(-1).square().clamp_min(1e-300)
    return (2 * count / (kurtosis - 1).clamp_min(1e-9)).clamp(1.0, max(count, 1))


def _unexplained_grad_q(found: Tensor, true: Exact) -> Tensor:
    """Return the length [H] of dQ's error without the part along PK, which an error of δ makes."""
    of_delta = -true.scale * delta_error_of(found, true)[..., None] * true.attended_keys
    return (found - true.grad_q - of_delta).norm(dim=(-2, -1))


def _rounding_of_grad_q(noise: Tensor, true: Exact) -> Tensor:
    """Return what roundings to BF16 add to the error of δ [H] that dQ tells of; ``noise`` [H, T] is of those by 1."""
    added = BF16 * noise.where(noise.isfinite(), 0.0)
    return (added.square().sum(-1) / true.bound.square().sum(-1).clamp_min(1e-300)).sqrt()


def _dead(found: Tensor, true: Exact, dtype: torch.dtype, coarse: Tensor | None) -> Tensor:
    """Return the share [H] of rows that are switched off: short, but along FP64's O as far as there is something left.

    Rows without an O do not count: V is 0 in a padded head, and before training where it is initialised so. Nor do rows
    that roundings can halve. P̄ in BF16 can where a row nearly cancels, as some of one feature do. The smallest step of
    O's dtype can: beside a sink FP16 rounds P and O of some rows to 0. ``coarse`` is O of an attention that rounds S,
    too, by nats where a mask adds -10,000. The share is NaN where FP64's O is no finite number.
    """
    length, size = found.norm(dim=-1), true.out.norm(dim=-1)
    counts = size > NO_ROW * size.square().mean(-1, keepdim=True).sqrt()
    cosine = (found * true.out).sum(-1) / (length * size).clamp_min(1e-300)
    dead = counts & (length < DEAD * size) & ((length < 1e-3 * size) | (cosine > 0.9))
    if coarse is not None and dead.any():
        dead &= (coarse - true.out).norm(dim=-1) < (1 - DEAD) * size
    if dead.any():
        v, width = true.v.norm(dim=-1, keepdim=True), true.v.shape[-1]
        by_step = (
            _step_of(dtype) / 2 * ((true.probs > 0).double() @ v + width**0.5)
        )  # of each P, and of each feature of O
        dead &= (1 - DEAD) * size > (BF16 * (true.weights @ v) + by_step)[..., 0]
    share = dead.double().sum(-1) / counts.double().sum(-1).clamp_min(1.0)
    return share.where(size.isfinite().all(-1), torch.nan)


def _rows_turned(across: Tensor, coarse: Tensor, true: Exact, dtype: torch.dtype) -> Measures:
    """Return in which rows the error of O across O [H, T, d] is more than roundings can make it.

    A row that almost cancels counts by the length that it would have if its terms were independent. None of a head's
    rows is told that errs by a few times what rounding S, too, makes of the worst of them.
    """
    natural = (true.weights.square() @ true.v.square().sum(-1, keepdim=True))[..., 0].sqrt()
    size = torch.maximum(true.out.norm(dim=-1), natural) + _step_of(dtype) * true.v.shape[-1] ** 0.5 / ROW_OFF
    by_rounding = ((coarse - true.out).norm(dim=-1) / size).amax(-1, keepdim=True)
    turned = across.norm(dim=-1) / size
    return _rows_off(table.OUT_ROWS_TURNED, turned.where(turned > _TURNED_BEYOND * by_rounding, 0.0))


def _step_of(dtype: torch.dtype) -> float:
    """Return how far the smallest numbers of a dtype lie apart."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _rows_off(rows: table.RowsOff, error: Tensor) -> Measures:
    """Return how many rows of [H, T] are off, the first and the last of them."""
    off = error > ROW_OFF
    places = torch.arange(off.shape[-1], device=off.device)
    some = off.any(-1)
    first, last = places.where(off, off.shape[-1]).amin(-1), places.where(off, -1).amax(-1)
    return {
        rows.count.name: off.double().sum(-1),
        rows.first.name: torch.where(some, first, -1).double(),
        rows.last.name: last.double(),
    }


def _size(name: str, wanted: Tensor, call: AttentionCall, true: Exact) -> Tensor:
    """Return the length [heads] that a gradient's error counts against: FP64's, or what it would be made of.

    Rows with one key, or with keys that are all alike, have dQ and dK that cancel, of which a tenth counts. dV of a key
    that every query sees alone is the sum of their dO. It cancels where the training has moved V for long; what it
    would be is the sum's random walk.
    """
    least = torch.zeros((), dtype=wanted.dtype, device=wanted.device)
    if name == "grad_q":
        least = 0.1 * call.form.scale * (true.bound[..., None] * true.attended_keys).norm(dim=(-2, -1))
    elif name == "grad_k":
        attended = true.slopes.mT @ (true.bound * true.q_norm)[..., None]
        least = 0.1 * call.form.scale * _of_keys(attended.norm(dim=(-2, -1)), call)
    elif name == "grad_v":
        walks = true.weights.square().sum(-1) * true.grad_out_norm.square()
        least = _of_keys(walks.sum(-1), call).sqrt()
    return torch.maximum(wanted.norm(dim=(-2, -1)), least)


def _of_keys(of_queries: Tensor, call: AttentionCall) -> Tensor:
    """Return the sums [H_kv, …] over the queries' heads [H, …] that share a head of keys."""
    return of_queries.unflatten(0, (-1, call.groups)).sum(1)


def _fp16(x: Tensor) -> Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).half().double()


def delta_error_of(grad_q: Tensor, true: Exact) -> Tensor:
    """Return the error of δ [H, T] that dQ's error along PK tells of."""
    pk = true.attended_keys
    return -((grad_q - true.grad_q) * pk).sum(-1) / (true.scale * pk.square().sum(-1).clamp_min(1e-300))


def noise_of_grad_q(true: Exact) -> Tensor:
    """Return what roundings of dS and dQ by 1 add to the error of δ [H, T] that dQ tells of; infinite where PK is 0."""
    size = true.attended_keys.norm(dim=-1, keepdim=True)
    along = true.attended_keys / size.clamp_min(1e-300)
    of_grad_scores = (true.grad_scores * (along @ true.k.mT)).square().sum(-1)
    of_grad_q = (true.grad_q * along / true.scale).square().sum(-1)
    return torch.where(size[..., 0] > 0, (of_grad_scores + of_grad_q).sqrt() / size[..., 0], math.inf)
