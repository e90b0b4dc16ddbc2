"""Baseline attention in FP64 of one sequence, and what a comparison needs. Shapes: :mod:`flashpoint.diagnosis.call`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall


@dataclass(frozen=True)
class Exact:
    """Forward and backward pass of one sequence, float64; keys and values as each query's head has them.

    Attributes:
        q, k, v, grad_out: [H, T, d].
        scale: α.
        scores, probs: S (−∞ where a query does not see the key), nats, and P [H, T, T]; beside a sink its rows sum to
            less than 1.
        grad_scores: dS [H, T, T].
        out, grad_q: [H, T, d].
        attended_keys: PK [H, T, d], which an error of δ adds to dQ, by −α.
        bound: |dO|₂·|O|₂ [H, T], the unit of δ's relative error; beside a gradient of L with its size.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    scale: float
    scores: Tensor
    probs: Tensor
    grad_scores: Tensor
    out: Tensor
    grad_q: Tensor
    attended_keys: Tensor
    bound: Tensor

    @cached_property
    def grad_k(self) -> Tensor:
        """dK of each query's head [H, T, d]: heads that share keys are not added up."""
        return self.scale * (self.grad_scores.mT @ self.q)

    @cached_property
    def grad_v(self) -> Tensor:
        """dV of each query's head [H, T, d]: heads that share values are not added up."""
        return self.probs.mT @ self.grad_out

    @cached_property
    def mass(self) -> Tensor:
        """Σⱼ Pᵢⱼ [H, T]: 1 without a sink."""
        return self.probs.sum(-1)

    @cached_property
    def q_norm(self) -> Tensor:
        """|q|₂ [H, T]."""
        return self.q.norm(dim=-1)

    @cached_property
    def grad_out_norm(self) -> Tensor:
        """|dO|₂ [H, T]."""
        return self.grad_out.norm(dim=-1)


def exact(call: AttentionCall, sequence: int) -> Exact:
    """Compute one sequence of a call from the definition of softmax attention, with its sink if it has one.

    A watched training waits for this: [H, T, T] is gone over as few times as can be.
    """
    q, grad_out = call.q[sequence].double(), call.grad_out[sequence].double()
    k, v = (x[sequence].double().repeat_interleave(call.groups, 0) for x in (call.k, call.v))
    scores = call.form.scale * q @ k.mT
    if call.form.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    probs = scores.softmax(-1)
    if call.form.sink is not None:
        probs *= torch.sigmoid(scores.logsumexp(-1) - call.form.sink[:, None])[..., None]
    out = probs @ v
    delta = (grad_out * out).sum(-1, keepdim=True)
    bound = grad_out.norm(dim=-1) * out.norm(dim=-1)
    if call.grad_logsumexp is not None:  # dL/dS is P
        of_rows = call.grad_logsumexp[sequence].double()
        delta, bound = delta - of_rows[..., None], bound + of_rows.abs()
    grad_scores = (grad_out @ v.mT).sub_(delta).mul_(probs)
    return Exact(
        q=q,
        k=k,
        v=v,
        grad_out=grad_out,
        scale=call.form.scale,
        scores=scores,
        probs=probs,
        grad_scores=grad_scores,
        out=out,
        grad_q=call.form.scale * (grad_scores @ k),
        attended_keys=probs @ k,
        bound=bound,
    )
