"""Baseline attention in FP64 of one sequence, and what a comparison needs. Shapes: :mod:`flashpoint.diagnosis.call`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall


@dataclass(frozen=True)
class Exact:
    """Forward and backward pass of one sequence, float64; keys and values as each query's head has them.

    Attributes:
        scores, probs: S (−∞ where a query does not see the key), nats, and P [H, T, T].
        out, grad_q, grad_k, grad_v: [H, T, d]; the last two summed over no heads.
        attended_keys: PK [H, T, d], which an error of δ adds to dQ, by −α.
        bound: |dO|₂·|O|₂ [H, T], the unit of δ's relative error.
        k: [H, T, d].
        q_norm, grad_out_norm: |q|₂ and |dO|₂ [H, T].
    """

    scores: Tensor
    probs: Tensor
    out: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor
    attended_keys: Tensor
    bound: Tensor
    k: Tensor
    q_norm: Tensor
    grad_out_norm: Tensor


def exact(call: AttentionCall, sequence: int) -> Exact:
    """Compute one sequence of a call from the definition of softmax attention."""
    q, grad_out = call.q[sequence].double(), call.grad_out[sequence].double()
    k, v = (x[sequence].double().repeat_interleave(call.groups, 0) for x in (call.k, call.v))
    scores = q @ k.mT * call.scale
    if call.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    probs = scores.softmax(-1)
    out = probs @ v
    grad_probs = grad_out @ v.mT
    grad_scores = call.scale * probs * (grad_probs - (grad_out * out).sum(-1, keepdim=True))
    return Exact(
        scores=scores,
        probs=probs,
        out=out,
        grad_q=grad_scores @ k,
        grad_k=grad_scores.mT @ q,
        grad_v=probs.mT @ grad_out,
        attended_keys=probs @ k,
        bound=grad_out.norm(dim=-1) * out.norm(dim=-1),
        k=k,
        q_norm=q.norm(dim=-1),
        grad_out_norm=grad_out.norm(dim=-1),
    )
