"""What an attention call's results say of each head, against FP64 on the same Q, K, V and dO.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import Exact
from flashpoint.numerics.choices import UNROUNDED, Rounding
from flashpoint.numerics.reference import flash_fwd
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

ROW_OFF = 0.1
"""A row is off where its O or dQ is farther than this share of its length from FP64's; BF16's rounding is 0.004."""
DEAD = 0.5
"""A row is switched off where |O| is below this share of FP64's."""
NO_ROW = 2**-23
"""A row has no O to be switched off where FP64's |O| is not above this share of the head's root mean square."""
FP16_STEP = 2**-24
"""How far FP16's numbers lie apart below its smallest normal number, 2^-14."""
FP16_MAX = 65_504.0
_UNKNOWNS = 3
"""Of the regression in :func:`delta_follows`: two slopes and a constant. As many rows fit whatever they hold."""
_LEAST_LEFT = 1e-12
"""Share of the square sum of a term, of which the other terms leave more if it is not made of them: FP64 leaves 1e-20
of one that is."""


@dataclass(frozen=True)
class Results:
    """What an attention returned for a call: [N, H, T, d] and for keys [N, H_kv, T, d]; None where nobody kept it."""

    out: Tensor | None
    grad_q: Tensor | None
    grad_k: Tensor | None
    grad_v: Tensor | None

    @classmethod
    def kept(cls, call: AttentionCall) -> Results:
        """The results that the call itself holds."""
        return cls(call.out, call.grad_q, call.grad_k, call.grad_v)


Measures = dict[str, Tensor]
"""Measures by name, float64: [H] of a sequence, [N, H] of a call. Those of results that nobody kept are left out."""


def of_scores(true: Exact) -> Measures:
    """Return what the scores of a sequence say, [H] each.

    ``tied_rows``: the share of rows whose two largest scores are one BF16 number, of rows with two keys or more.
    ``score_max``: the largest |S|, nats.
    Both are NaN where a score that is not masked is no finite number.
    """
    # What is not finite in q or k makes its row's own score so, which no mask hides.
    told = true.scores.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    finite = true.scores.isfinite()
    rounded = true.scores.bfloat16()
    tied = (rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1
    several = finite.sum(-1) > 1
    lowest, highest = true.scores.masked_fill(~finite, 0.0).flatten(-2).aminmax(dim=-1)
    return {
        "tied_rows": ((tied & several).double().sum(-1) / several.sum(-1).clamp_min(1)).where(told, torch.nan),
        "score_max": torch.maximum(-lowest, highest).where(told, torch.nan),
    }


def of_inputs(true: Exact, q: Tensor, scale: float) -> Measures:
    """Return what the inputs of a sequence alone say, [H] each: those of :func:`of_scores`, and what all keys share.

    ``score_offset``: the mean over rows of |mean S of the keys it sees|, nats.
    ``score_spacing``: how far apart FP32 numbers lie at the largest α Σ|qₑkₑ| (over features e) of a query and a key
    that it sees, nats: no partial sum of S is larger. Kernels hold S·log₂e.
    ``mean_key_share``: |mean K|² over the mean |K|².
    """
    seen = true.scores.isfinite()
    finite = true.scores.masked_fill(~seen, 0.0)
    terms = (q.abs() @ true.k.abs().mT).masked_fill_(~seen, 0.0)
    largest = scale * terms.amax((-2, -1)) / math.log(2)
    above = torch.nextafter(largest.float(), torch.tensor(math.inf, device=largest.device))
    shared = true.k.mean(-2).square().sum(-1) / true.k.square().sum(-1).mean(-1).clamp_min(1e-300)
    return {
        **of_scores(true),
        "score_offset": (finite.sum(-1) / seen.sum(-1)).abs().mean(-1),
        "score_spacing": (above - largest.float()).double() * math.log(2),
        "mean_key_share": shared,
    }


def of_results(
    call: AttentionCall, results: Results, true: Exact, n: int, declared: AttentionVariant | None = None
) -> Measures:
    """Return how the results of a sequence differ from FP64's, [H] each.

    ``out_error``, ``grad_q_error``, ``grad_k_error``, ``grad_v_error``: ‖difference‖ / ‖FP64‖, and of gradients that
    cancel less (:func:`_size`); NaN where both are 0, as without loss.
    ``grad_q_unexplained``, ``grad_k_unexplained``: without the part that an error of δ makes.
    ``nonfinite``: rows with NaN or infinity in any result; ``nonfinite_out``: in O. ``out_rows_off`` and
    ``grad_q_rows_off``: rows farther off than :data:`ROW_OFF`, and ``…_first``, ``…_last``: the first and last of them,
    from 0, −1 for none.
    ``dead_rows``: the share with less than half of FP64's |O|, along that O, of rows where FP64's is not 0.
    ``length_error``: the standard deviation over rows of O's error along O, over |O|: what a rounded ℓ makes.
    ``length_error_expected``, ``out_error_expected``: those of FlashAttention-2 by this package's reference, which
    rounds P̄ and O. ``out_error_coarse``: of the declared variant, or of one that rounds S and Ō, too.
    ``delta_bias`` and ``delta_noise``: of δ's error ε, Σ ε / Σ |dO||O| and (Σ ε² / Σ (|dO||O|)²)^½, with ε from O, as
    δ = rowsum(dO∘O) has it; ``delta_sum``: Σ ε, nats of the loss; ``delta_bound``: Σ |dO||O|. ``grad_delta_bias``,
    ``…_noise``, ``…_sum`` and ``…_bound``: the same with ε from dQ's error along PK. ``along_mean_key``:
    the share of dQ's squared error along the mean key. ``delta_follows_out``: the slope, over rows, of that ε on what
    the rounding of O (and Ō) adds to rowsum(dO∘O), beside a constant and what the rounding of P̄ adds: 1 where δ takes
    the rounding, 0 where it does not. A row weighs by the inverse square of what roundings add to its ε. It counts if
    its |dO||O| is not 0, and if its PK is not 0, without which dQ does not show ε. The slope is NaN where the rows do
    not tell it. ``delta_rounding``: what the rounding of O adds in these rows, as ``delta_noise``.
    """
    measured: Measures = {}
    heads, length, _ = true.out.shape
    nonfinite = torch.zeros(heads, length, dtype=torch.bool, device=true.out.device)
    delta_error = None if results.grad_q is None else delta_error_of(results.grad_q[n].double(), true, call.scale)
    for name in ("out", "grad_q", "grad_k", "grad_v"):
        if (returned := getattr(results, name)) is None:
            continue
        found, of_keys = finite_part(returned[n]), name in ("grad_k", "grad_v")
        here, repeats = ~returned[n].double().isfinite().all(-1), call.groups if of_keys else 1
        nonfinite |= here.repeat_interleave(repeats, 0)
        if name == "out":
            measured["nonfinite_out"] = here.double().sum(-1)
            measured |= of_out(found, true, call.grad_out[n].double())
            measured |= _expected(call, n, true, returned.dtype, declared)
            continue
        wanted = _of_keys(getattr(true, name), call) if of_keys else true.grad_q
        size = _size(name, wanted, call, true)
        errors = {"error": (found - wanted).norm(dim=(-2, -1))}
        if name == "grad_q":
            measured |= of_grad_q(found, true, call.scale)
            errors["unexplained"] = _unexplained_grad_q(found, true, call.scale)
        if name == "grad_k" and delta_error is not None:
            of_delta = -call.scale * (true.probs.mT @ (delta_error[..., None] * call.q[n].double()))
            errors["unexplained"] = (found - wanted - _of_keys(of_delta, call)).norm(dim=(-2, -1))
        measured |= {f"{name}_{what}": (error / size).repeat_interleave(repeats, 0) for what, error in errors.items()}
    if call.q.dtype == call.grad_out.dtype == torch.float16:
        measured |= of_fp16(call, true, n)
    if results.out is not None and delta_error is not None:
        noise = noise_of_grad_q(true, call.scale)
        measured |= delta_follows(call, results.out[n].double(), delta_error, noise, true, n)
    return {**measured, "nonfinite": nonfinite.double().sum(-1)}


def over_sequences(of: Measures) -> Measures:
    """Return what measures [N, H] say of N sequences together, [H] each.

    Of ``score_max`` it is the largest, of an error of δ what :func:`of_errors` says, of the others the mean: of
    gradients and of ``delta_follows_out`` over the sequences that tell, NaN where none does.
    """
    found = {
        name: values.nanmean(0) if name.startswith("grad_") or name == "delta_follows_out" else values.mean(0)
        for name, values in of.items()
    }
    if "score_max" in of:
        found["score_max"] = of["score_max"].amax(0)
    for name in of:
        error, _, part = name.rpartition("_")
        if part == "bound":
            found |= of_errors(error, of)
    return found


def of_errors(name: str, of: Measures) -> Measures:
    """Return ``NAME_bias`` and the like of sequences together, [H] each, of what :func:`relative` says of each [N, H].

    The bias is the ratio of the sums of ε and of bounds: a mean of ratios would count a sequence without loss as one
    without bias. The noise is the root mean square, for which sequences weigh by their squared bounds.
    """
    noises, sums, bounds = (of[f"{name}_{part}"] for part in ("noise", "sum", "bound"))
    weights = bounds / bounds.square().sum(0).sqrt().clamp_min(1e-300)
    return {
        f"{name}_bias": sums.sum(0) / bounds.sum(0).clamp_min(1e-300),
        f"{name}_noise": (noises * weights).square().sum(0).sqrt(),
        f"{name}_sum": sums.sum(0),
        f"{name}_bound": bounds.sum(0),
    }


def finite_part(returned: Tensor) -> Tensor:
    """Return a result as float64, with 0 in the place of NaN and infinity."""
    return returned.double().nan_to_num(0.0, 0.0, 0.0)


def _of_keys(of_queries: Tensor, call: AttentionCall) -> Tensor:
    """Return the sums [H_kv, …] over the queries' heads [H, …] that share a head of keys."""
    return of_queries.unflatten(0, (-1, call.groups)).sum(1)


def delta_follows(call: AttentionCall, out: Tensor, error: Tensor, noise: Tensor, true: Exact, n: int) -> Measures:
    """Return those measures of :func:`of_results` that say whether δ takes the rounding of O, [H] each.

    Args:
        out: O [H, T, d] float64 as the attention returned it.
        error: of δ [H, T] float64.
        noise: what roundings by 1 add to each ``error``; infinite for rows of which it does not tell.
    """
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
        "delta_follows_out": torch.where(tells, (x * y).sum(-1) / left, torch.nan),
        "delta_rounding": (of_out.where(rows, 0.0).square().sum(-1) / bound.clamp_min(1e-300)).sqrt(),
    }


def _without(x: Tensor, other: Tensor) -> Tensor:
    """Return x [H, T] without its part along other [H, T]."""
    unit = other / other.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return x - (x * unit).sum(-1, keepdim=True) * unit


def noise_of_grad_q(true: Exact, scale: float) -> Tensor:
    """Return what roundings of dS and dQ by 1 add to the error of δ [H, T] that dQ tells of; infinite where PK is 0."""
    size = true.attended_keys.norm(dim=-1, keepdim=True)
    along = true.attended_keys / size.clamp_min(1e-300)
    of_grad_scores = (true.grad_scores * (along @ true.k.mT)).square().sum(-1)
    of_grad_q = (true.grad_q * along / scale).square().sum(-1)
    return torch.where(size[..., 0] > 0, (of_grad_scores + of_grad_q).sqrt() / size[..., 0], math.inf)


def out_of_rounded_probs(call: AttentionCall, n: int) -> Tensor:
    """Return O [H, T, d] float64 of FlashAttention-2 in which P̄ alone is rounded, to the inputs' dtype."""
    return _out_of(AttentionVariant(probs=_rounding(call), out=UNROUNDED), call, n)


def _rounding(call: AttentionCall) -> Rounding:
    """Return the rounding to nearest of the inputs' dtype."""
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(call.q.dtype)
    return UNROUNDED if bits is None else Rounding("nearest", bits)


def _out_of(variant: AttentionVariant, call: AttentionCall, n: int) -> Tensor:
    """Return O [H, T, d] float64 of a variant, by this package's reference."""
    k, v = (x[n : n + 1].repeat_interleave(call.groups, 1) for x in (call.k, call.v))
    heads = torch.arange(k.shape[1], device=k.device)
    noise = NoiseKey(torch.zeros(2, dtype=torch.int64, device=k.device), 1, heads, k.shape[1], 1)
    return flash_fwd(call.q[n : n + 1], k, v, variant, noise, call.is_causal, call.scale)[0][0].double()


def _expected(
    call: AttentionCall, n: int, true: Exact, dtype: torch.dtype, declared: AttentionVariant | None
) -> Measures:
    """Return the errors of FlashAttention-2 by this package's reference, which rounds O to the same dtype."""
    rounding = _rounding(call)
    coarser = AttentionVariant(scores=rounding, probs=rounding, out_unnormalized=rounding, out=UNROUNDED)
    outs = out_of_rounded_probs(call, n), _out_of(declared or coarser, call, n)
    expected, coarse = (out.to(dtype).double() for out in outs)
    size = true.out.norm(dim=(-2, -1)).clamp_min(1e-300)
    return {
        "length_error_expected": _length_error(expected, true),
        "out_error_expected": (expected - true.out).norm(dim=(-2, -1)) / size,
        "out_error_coarse": (coarse - true.out).norm(dim=(-2, -1)) / size,
    }


def _size(name: str, wanted: Tensor, call: AttentionCall, true: Exact) -> Tensor:
    """Return the length [heads] that a gradient's error counts against: FP64's, or what it would be made of.

    Rows with one key, or with keys that are all alike, have dQ and dK that cancel, of which a tenth counts. dV of a key
    that every query sees alone is the sum of their dO. It cancels where the training has moved V for long; what it
    would be is the sum's random walk.
    """
    least = torch.zeros((), dtype=wanted.dtype, device=wanted.device)
    if name == "grad_q":
        least = 0.1 * call.scale * (true.bound[..., None] * true.attended_keys).norm(dim=(-2, -1))
    elif name == "grad_k":
        attended = true.probs.mT @ (true.bound * true.q_norm)[..., None]
        least = 0.1 * call.scale * _of_keys(attended.norm(dim=(-2, -1)), call)
    elif name == "grad_v":
        walks = true.probs.square().sum(-1) * true.grad_out_norm.square()
        least = _of_keys(walks.sum(-1), call).sqrt()
    return torch.maximum(wanted.norm(dim=(-2, -1)), least)


def of_out(found: Tensor, true: Exact, grad_out: Tensor) -> Measures:
    """Return those measures of :func:`of_results` that a sequence's O [H, T, d] has beside FP64's, [H] each."""
    difference, size = found - true.out, true.out.norm(dim=-1).clamp_min(1e-300)
    error = (grad_out * difference).sum(-1)
    return {
        **_rows_off("out", difference.norm(dim=-1) / size),
        "dead_rows": _dead(found, true.out),
        "length_error": _length_error(found, true),
        "out_error": difference.norm(dim=(-2, -1)) / true.out.norm(dim=(-2, -1)).clamp_min(1e-300),
        **relative("delta", error, true.bound),
    }


def _dead(found: Tensor, true: Tensor) -> Tensor:
    """Return the share [H] of rows that are switched off: short, but along FP64's O as far as there is something left.

    Rows without an O do not count: V is 0 in a padded head, and before training where it is initialised so. It is NaN
    where FP64's O is no finite number.
    """
    length, size = found.norm(dim=-1), true.norm(dim=-1)
    counts = size > NO_ROW * size.square().mean(-1, keepdim=True).sqrt()
    cosine = (found * true).sum(-1) / (length * size).clamp_min(1e-300)
    dead = counts & (length < DEAD * size) & ((length < 1e-3 * size) | (cosine > 0.9))
    share = dead.double().sum(-1) / counts.double().sum(-1).clamp_min(1.0)
    return share.where(size.isfinite().all(-1), torch.nan)


def _length_error(found: Tensor, true: Exact) -> Tensor:
    """Return the standard deviation [H] over rows of the error of O along O, over |O|."""
    along = ((found - true.out) * true.out).sum(-1) / true.out.square().sum(-1).clamp_min(1e-300)
    return along[:, 1:].std(-1) if along.shape[-1] > 2 else along.new_zeros(len(along))


def delta_error_of(grad_q: Tensor, true: Exact, scale: float) -> Tensor:
    """Return the error of δ [H, T] that dQ's error along PK tells of."""
    pk = true.attended_keys
    return -((grad_q - true.grad_q) * pk).sum(-1) / (scale * pk.square().sum(-1).clamp_min(1e-300))


def _unexplained_grad_q(found: Tensor, true: Exact, scale: float) -> Tensor:
    """Return the length [H] of dQ's error without the part along PK, which an error of δ makes."""
    of_delta = -scale * delta_error_of(found, true, scale)[..., None] * true.attended_keys
    return (found - true.grad_q - of_delta).norm(dim=(-2, -1))


def of_grad_q(found: Tensor, true: Exact, scale: float) -> Measures:
    """Return those measures of :func:`of_results` that a sequence's dQ [H, T, d] has beside FP64's, [H] each."""
    difference = found - true.grad_q
    # A row whose own gradient is small has an error from δ all the same: the unit is the head's typical row at least.
    size = true.grad_q.norm(dim=-1)
    size = torch.maximum(size, size.square().mean(-1, keepdim=True).sqrt()).clamp_min(1e-300)
    error = delta_error_of(found, true, scale)
    mean_key = true.k.mean(-2, keepdim=True)
    unit = mean_key / mean_key.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    along = (difference * unit).sum(-1).square().sum(-1) / difference.square().sum((-2, -1)).clamp_min(1e-300)
    return {
        **_rows_off("grad_q", difference.norm(dim=-1) / size),
        **relative("grad_delta", error, true.bound),
        "along_mean_key": along,
    }


def of_fp16(call: AttentionCall, true: Exact, n: int) -> Measures:
    """Return what FP16 makes of a sequence's gradients, [H] each, however exact the sums are.

    ``grad_q_fp16``, ``grad_k_fp16``, ``grad_v_fp16``: errors, as ``grad_q_error``, of a backward pass that holds dP, dS
    and what it returns in FP16. ``grad_out_size``: the root mean square of dO over rows that are not 0.
    """
    v = call.v[n].double().repeat_interleave(call.groups, 0)
    delta = (true.grad_out * true.out).sum(-1, keepdim=True)
    grad_scores = _fp16(true.probs * (_fp16(true.grad_out @ v.mT) - delta))
    found = {
        "grad_q": _fp16(call.scale * (grad_scores @ true.k)),
        "grad_k": _fp16(_of_keys(call.scale * (grad_scores.mT @ true.q), call)),
        "grad_v": _fp16(_of_keys(true.grad_v, call)),
    }
    errors: Measures = {}
    for name, gradient in found.items():
        wanted, repeats = (true.grad_q, 1) if name == "grad_q" else (_of_keys(getattr(true, name), call), call.groups)
        error = (gradient - wanted).norm(dim=(-2, -1)) / _size(name, wanted, call, true)
        errors[f"{name}_fp16"] = error.repeat_interleave(repeats, 0)
    rows = (true.grad_out_norm > 0).sum(-1) * call.q.shape[-1]
    return {**errors, "grad_out_size": (true.grad_out_norm.square().sum(-1) / rows).sqrt()}


def _fp16(x: Tensor) -> Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).half().double()


def _rows_off(name: str, error: Tensor) -> Measures:
    """Return how many rows of [H, T] are off, the first and the last of them."""
    off = error > ROW_OFF
    places = torch.arange(off.shape[-1], device=off.device)
    some = off.any(-1)
    first, last = places.where(off, off.shape[-1]).amin(-1), places.where(off, -1).amax(-1)
    return {
        f"{name}_rows_off": off.double().sum(-1),
        f"{name}_rows_off_first": torch.where(some, first, -1).double(),
        f"{name}_rows_off_last": last.double(),
    }


def relative(name: str, error: Tensor, bound: Tensor) -> Measures:
    """Return the bias and noise [H] of errors of δ [H, T] in the unit of each row's bound, and sums of both, nats."""
    return {
        f"{name}_bias": error.sum(-1) / bound.sum(-1).clamp_min(1e-300),
        f"{name}_noise": (error.square().sum(-1) / bound.square().sum(-1).clamp_min(1e-300)).sqrt(),
        f"{name}_sum": error.sum(-1),
        f"{name}_bound": bound.sum(-1),
    }
