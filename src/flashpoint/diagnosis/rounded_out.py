"""O as FlashAttention's roundings alone make it, by this package's reference.

Shapes: N sequences, H heads, T tokens, d features per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.numerics.choices import UNROUNDED, Rounding
from flashpoint.numerics.reference import flash_fwd
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant


def out_of_rounded_probs(call: AttentionCall, n: int) -> Tensor:
    """Return O [H, T, d] float64 of FlashAttention-2 in which P̄ alone is rounded, to the inputs' dtype."""
    return out_of(AttentionVariant(probs=_rounding(call), out=UNROUNDED), call, n)


def out_of_rounded_scores(call: AttentionCall, n: int) -> Tensor:
    """Return O [H, T, d] float64 of FlashAttention-2 in which S, P̄ and Ō are rounded, to FP16 or else to BF16. An
    attention of FP32 tensors may hold them so."""
    rounding = Rounding("nearest", 7) if call.q.dtype == torch.float32 else _rounding(call)
    coarser = AttentionVariant(scores=rounding, probs=rounding, out_unnormalized=rounding, out=UNROUNDED)
    return out_of(coarser, call, n)


def out_of(variant: AttentionVariant, call: AttentionCall, n: int) -> Tensor:
    """Return O [H, T, d] float64 of a variant, by this package's reference, beside the call's sink if it has one."""
    k, v = (x[n : n + 1].repeat_interleave(call.groups, 1) for x in (call.k, call.v))
    heads = torch.arange(k.shape[1], device=k.device)
    noise = NoiseKey(torch.zeros(2, dtype=torch.int64, device=k.device), 1, heads, k.shape[1], 1)
    form = call.form
    found = flash_fwd(call.q[n : n + 1], k, v, variant, noise, form.is_causal, form.scale)[:2]
    out, logsumexp = (x[0].double() for x in found)
    return out if form.sink is None else out * torch.sigmoid(logsumexp - form.sink[:, None])[..., None]


def _rounding(call: AttentionCall) -> Rounding:
    """Return the rounding to nearest of the inputs' dtype."""
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(call.q.dtype)
    return UNROUNDED if bits is None else Rounding("nearest", bits)
