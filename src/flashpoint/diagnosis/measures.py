"""What is measured of each head, and what several sequences say together.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall


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


def relative(name: str, error: Tensor, bound: Tensor) -> Measures:
    """Return the bias and noise [H] of errors of δ [H, T] in the unit of each row's bound, and sums of both, nats."""
    return {
        f"{name}_bias": error.sum(-1) / bound.sum(-1).clamp_min(1e-300),
        f"{name}_noise": (error.square().sum(-1) / bound.square().sum(-1).clamp_min(1e-300)).sqrt(),
        f"{name}_sum": error.sum(-1),
        f"{name}_bound": bound.sum(-1),
    }


def finite_part(returned: Tensor) -> Tensor:
    """Return a result as float64, with 0 in the place of NaN and infinity."""
    return returned.double().nan_to_num(0.0, 0.0, 0.0)
