"""What an attention call's results say of each head, against FP64 on the same Q, K, V and dO.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_measures import delta_error_of, delta_follows, noise_of_grad_q
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.factors import factor_of_grad_q, factors_of_scores, fitted_factor
from flashpoint.diagnosis.measures import Measures, Results, finite_part, relative

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant

OUT_OFF = 0.01
"""Relative error of O beyond which a factor of the scores may be far from 1; rounding P̄ and O to BF16 makes 0.003."""
ROW_OFF = 0.1
"""A row is off where its O or dQ is farther than this share of its length from FP64's; BF16's rounding is 0.004."""
DEAD = 0.5
"""A row is switched off where |O| is below this share of FP64's."""
NO_ROW = 2**-23
"""A row has no O to be switched off where FP64's |O| is not above this share of the head's root mean square."""
BF16 = 2**-9
"""The largest relative error of a number rounded to BF16."""
FP16_STEP = 2**-24
"""How far FP16's numbers lie apart below its smallest normal number, 2^-14."""
FP16_MAX = 65_504.0


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
    ``first_row_turned``: of O's first row the part across FP64's, over |O|. Under a causal mask the row has one key, so
    that O is along v whatever is done to the scores.
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
    ``grad_delta_rounding``: what roundings of dS and dQ to BF16 add to ``grad_delta_noise`` at most.
    ``score_factor``, ``grad_q_factor``: of :func:`.factors_of_scores` and :func:`.factor_of_grad_q`;
    ``score_factor_coarse``: of the O of ``out_error_coarse``. Where an O is off by more than :data:`OUT_OFF`,
    ``score_factor`` and ``score_factor_left`` are of :func:`.fitted_factor`; elsewhere the latter is 1.
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
            expected, coarse = _references(call, n, returned.dtype, declared)
            measured |= _expected(expected, coarse, true)
            measured["score_factor"], measured["score_factor_coarse"] = factors_of_scores((found, coarse), true)
            measured["score_factor_left"] = torch.ones_like(measured["out_error"])
            if (measured["out_error"] > OUT_OFF).any():
                fitted = fitted_factor(found, true, measured["score_factor"])
                measured["score_factor"], measured["score_factor_left"] = fitted
            continue
        wanted = _of_keys(getattr(true, name), call) if of_keys else true.grad_q
        size = _size(name, wanted, call, true)
        errors = {"error": (found - wanted).norm(dim=(-2, -1))}
        if name == "grad_q":
            measured |= {**of_grad_q(found, true, call.scale), "grad_q_factor": factor_of_grad_q(found, true)}
            errors["unexplained"] = _unexplained_grad_q(found, true, call.scale)
        if name == "grad_k" and delta_error is not None:
            of_delta = -call.scale * (true.probs.mT @ (delta_error[..., None] * call.q[n].double()))
            errors["unexplained"] = (found - wanted - _of_keys(of_delta, call)).norm(dim=(-2, -1))
        measured |= {f"{name}_{what}": (error / size).repeat_interleave(repeats, 0) for what, error in errors.items()}
    if call.q.dtype == call.grad_out.dtype == torch.float16:
        measured |= of_fp16(call, true, n)
    if delta_error is not None:
        noise = noise_of_grad_q(true, call.scale)
        measured["grad_delta_rounding"] = _rounding_of_grad_q(noise, true)
    if results.out is not None and delta_error is not None:
        measured |= delta_follows(call, results.out[n].double(), delta_error, noise, true, n)
    return {**measured, "nonfinite": nonfinite.double().sum(-1)}


def of_out(found: Tensor, true: Exact, grad_out: Tensor) -> Measures:
    """Return those measures of :func:`of_results` that a sequence's O [H, T, d] has beside FP64's, [H] each."""
    difference, size = found - true.out, true.out.norm(dim=-1).clamp_min(1e-300)
    error = (grad_out * difference).sum(-1)
    first, exact = found[:, 0], true.out[:, 0]
    along = (first * exact).sum(-1, keepdim=True) / exact.square().sum(-1, keepdim=True).clamp_min(1e-300)
    return {
        **_rows_off("out", difference.norm(dim=-1) / size),
        "first_row_turned": (first - along * exact).norm(dim=-1) / size[:, 0],
        "dead_rows": _dead(found, true.out),
        "length_error": _length_error(found, true),
        "out_error": difference.norm(dim=(-2, -1)) / true.out.norm(dim=(-2, -1)).clamp_min(1e-300),
        **relative("delta", error, true.bound),
    }


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


def _references(
    call: AttentionCall, n: int, dtype: torch.dtype, declared: AttentionVariant | None
) -> tuple[Tensor, Tensor]:
    """Return O [H, T, d] of FlashAttention-2, rounded to a dtype, and of what rounds more; by the reference."""
    # The reference: a loop that is watched does without.
    from flashpoint.diagnosis.rounded_out import out_of, out_of_rounded_probs, out_of_rounded_scores

    coarse = out_of(declared, call, n) if declared else out_of_rounded_scores(call, n)
    return out_of_rounded_probs(call, n).to(dtype).double(), coarse.to(dtype).double()


def _expected(expected: Tensor, coarse: Tensor, true: Exact) -> Measures:
    """Return the errors of the O that :func:`_references` returns."""
    size = true.out.norm(dim=(-2, -1)).clamp_min(1e-300)
    return {
        "length_error_expected": _length_error(expected, true),
        "out_error_expected": (expected - true.out).norm(dim=(-2, -1)) / size,
        "out_error_coarse": (coarse - true.out).norm(dim=(-2, -1)) / size,
    }


def _length_error(found: Tensor, true: Exact) -> Tensor:
    """Return the standard deviation [H] over rows of the error of O along O, over |O|."""
    along = ((found - true.out) * true.out).sum(-1) / true.out.square().sum(-1).clamp_min(1e-300)
    return along[:, 1:].std(-1) if along.shape[-1] > 2 else along.new_zeros(len(along))


def _unexplained_grad_q(found: Tensor, true: Exact, scale: float) -> Tensor:
    """Return the length [H] of dQ's error without the part along PK, which an error of δ makes."""
    of_delta = -scale * delta_error_of(found, true, scale)[..., None] * true.attended_keys
    return (found - true.grad_q - of_delta).norm(dim=(-2, -1))


def _rounding_of_grad_q(noise: Tensor, true: Exact) -> Tensor:
    """Return what roundings to BF16 add to the error of δ [H] that dQ tells of; ``noise`` [H, T] is of those by 1."""
    added = BF16 * noise.where(noise.isfinite(), 0.0)
    return (added.square().sum(-1) / true.bound.square().sum(-1).clamp_min(1e-300)).sqrt()


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


def _of_keys(of_queries: Tensor, call: AttentionCall) -> Tensor:
    """Return the sums [H_kv, …] over the queries' heads [H, …] that share a head of keys."""
    return of_queries.unflatten(0, (-1, call.groups)).sum(1)


def _fp16(x: Tensor) -> Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).half().double()
