"""Attention in FP64 of one sequence, and what a comparison needs. Shapes: :mod:`flashpoint.diagnosis.call`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall


@dataclass(frozen=True)
class Exact:
    """Forward and backward pass of one sequence, float64; keys and values as each query's head has them.

    A row that sees no key has no weights: P, O and its gradients are 0 there.

    Attributes:
        q: [H, T_q, d].
        k, v: [H, T_k, d] and [H, T_k, d_v].
        grad_out: [H, T_q, d_v].
        scale: α.
        softcap: c, 0 without.
        raw: α QKᵀ [H, T_q, T_k], nats. It is ``scores`` itself without a soft cap and a bias.
        scores: S as the softmax takes it (−∞ where a query does not see the key), nats, [H, T_q, T_k].
        probs: P [H, T_q, T_k]; beside a sink its rows sum to less than 1.
        weights: P∘D [H, T_q, T_k], of which O is made; ``probs`` itself without dropout.
        slopes: P∘J [H, T_q, T_k], with J the soft cap's derivative; ``probs`` itself without a cap.
        bias: that was added [H or 1, T_q or 1, T_k], None without.
        dropped: D, None without dropout.
        grad_scores: the gradient by α QKᵀ, [H, T_q, T_k].
        out, grad_q: [H, T_q, d_v] and [H, T_q, d].
        attended_keys: (P∘J) K [H, T_q, d], which an error of δ adds to dQ, by −α.
        bound: |dO|₂·|O|₂ [H, T_q], the unit of δ's relative error; beside a gradient of L with its size.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    scale: float
    softcap: float
    raw: Tensor
    scores: Tensor
    probs: Tensor
    weights: Tensor
    slopes: Tensor
    bias: Tensor | None
    dropped: Tensor | None
    grad_scores: Tensor
    out: Tensor
    grad_q: Tensor
    attended_keys: Tensor
    bound: Tensor

    @cached_property
    def grad_k(self) -> Tensor:
        """dK of each query's head [H, T_k, d]: heads that share keys are not added up."""
        return self.scale * (self.grad_scores.mT @ self.q)

    @cached_property
    def grad_v(self) -> Tensor:
        """dV of each query's head [H, T_k, d_v]: heads that share values are not added up."""
        return self.weights.mT @ self.grad_out

    @cached_property
    def mass(self) -> Tensor:
        """Σⱼ Pᵢⱼ [H, T_q]: 1 without a sink, and 0 of a row that sees no key."""
        return self.probs.sum(-1)

    @cached_property
    def q_norm(self) -> Tensor:
        """|q|₂ [H, T_q]."""
        return self.q.norm(dim=-1)

    @cached_property
    def grad_out_norm(self) -> Tensor:
        """|dO|₂ [H, T_q]."""
        return self.grad_out.norm(dim=-1)

    @cached_property
    def seen(self) -> Tensor:
        """Whether a query sees a key, by a finite score [H, T_q, T_k] bool."""
        return self.scores.isfinite()

    @cached_property
    def seen_raw(self) -> Tensor:
        """α QKᵀ [H, T_q, T_k], and 0 where a query does not see the key."""
        return self.raw.masked_fill(~self.seen, 0.0)

    @cached_property
    def squared_grads(self) -> Tensor:
        """Σⱼ (P∘J∘dP)ᵢⱼ² [H, T_q], of dS before δ is subtracted."""
        delta = (self.grad_out * self.out).sum(-1, keepdim=True)
        return (self.grad_scores + self.slopes * delta).square().sum(-1)

    def of_heads(self, heads: Tensor) -> Exact:
        """Return that of some heads; ``heads`` [H] bool is True there."""
        held: dict[str, Any] = {
            name: x[heads]
            for name in (field.name for field in dataclasses.fields(self))
            if isinstance(x := getattr(self, name), Tensor) and len(x) == len(heads)
        }
        return dataclasses.replace(self, **held)

    def grad_scores_of(self, grad_probs: Tensor, delta: Tensor) -> Tensor:
        """Return the gradient by α QKᵀ [H, T_q, T_k].

        Args:
            grad_probs: dO Vᵀ, which may be changed.
            delta: δ [H, T_q, 1].
        """
        return _grad_scores(grad_probs, delta, self.slopes, self.dropped)


def exact(call: AttentionCall, sequence: int) -> Exact:
    """Compute one sequence of a call from the definition of softmax attention, in the call's form.

    A watched training waits for this: [H, T_q, T_k] is gone over as few times as can be.
    """
    form = call.form
    q, grad_out = call.q[sequence].double(), call.grad_out[sequence].double()
    k, v = (x[sequence].double().repeat_interleave(call.groups, 0) for x in (call.k, call.v))
    raw = form.scale * q @ k.mT
    scores = form.scores(raw, sequence)
    probs = scores.softmax(-1)
    if form.sink is not None:
        probs *= torch.sigmoid(scores.logsumexp(-1) - form.sink[:, None])[..., None]
    if form.can_close_rows:
        probs.masked_fill_((scores == -math.inf).all(-1, keepdim=True), 0.0)
    cap_slope, dropped = form.cap_slope(raw), form.dropped(sequence)
    slopes, weights = (probs if by is None else probs * by for by in (cap_slope, dropped))
    out = weights @ v
    delta = (grad_out * out).sum(-1, keepdim=True)
    bound = grad_out.norm(dim=-1) * out.norm(dim=-1)
    if call.grad_logsumexp is not None:  # dL/dS is P
        of_rows = call.grad_logsumexp[sequence].double()
        delta, bound = delta - of_rows[..., None], bound + of_rows.abs()
    grad_scores = _grad_scores(grad_out @ v.mT, delta, slopes, dropped)
    return Exact(
        q=q,
        k=k,
        v=v,
        grad_out=grad_out,
        scale=form.scale,
        softcap=form.softcap,
        raw=raw,
        scores=scores,
        probs=probs,
        weights=weights,
        slopes=slopes,
        bias=form.added(sequence),
        dropped=dropped,
        grad_scores=grad_scores,
        out=out,
        grad_q=form.scale * (grad_scores @ k),
        attended_keys=slopes @ k,
        bound=bound,
    )


def with_scale_of_dropout(call: AttentionCall, out: Tensor) -> AttentionCall:
    """Return the call with the scale of kept weights that O [N, H, T_q, d_v] has, of two that PyTorch computes with.

    PyTorch's dropout multiplies by 1/(1 − p), which it rounds to the dtype of the weights on a CPU: 1.1094 for 1.1111.
    """
    form = call.form
    if not form.dropout or call.q.dtype not in (torch.bfloat16, torch.float16):
        return call
    rounded = torch.tensor(1 / (1 - form.dropout), dtype=call.q.dtype)
    other = dataclasses.replace(call, form=dataclasses.replace(form, dropout=1 - 1 / rounded.item()))
    found = out[0].double()
    errors = [float((found - exact(one, 0).out).norm()) for one in (call, other)]
    return other if errors[1] < errors[0] else call


def _grad_scores(grad_probs: Tensor, delta: Tensor, slopes: Tensor, dropped: Tensor | None) -> Tensor:
    return (grad_probs if dropped is None else grad_probs.mul_(dropped)).sub_(delta).mul_(slopes)
