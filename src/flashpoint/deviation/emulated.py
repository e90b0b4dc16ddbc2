"""Baseline attention and FlashAttention in an emulated precision, forward and backward.

B independent inputs, H heads, T tokens, d features per head; tensors are float64 [B, H, T, d] with numbers of the
precision. Both attentions have the same operations, as far as their algorithms allow (:class:`Arithmetic`):

    S = α·QKᵀ,  P̄ = exp(S − m),  ℓ = rowsum(P̄)
    baseline  P = P̄/ℓ,  O = PV;                 δ = rowsum(P∘dP)
    flash     Ō = P̄V by blocks of keys,  O = Ō/ℓ;  δ = rowsum(dO∘O),  P = exp(S − L)
    both      L = m + ln ℓ,  dV = PᵀdO,  dP = dO·Vᵀ,  dS = P∘(dP − δ),  dQ = α·dS·K,  dK = α·dSᵀQ

Flash is FlashAttention-2 (Dao, arXiv 2307.08691, Algorithms 1 and 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.deviation.arithmetic import Arithmetic


@dataclass(frozen=True)
class Inputs:
    """Queries, keys, values and the gradient of the output: each [B, H, T, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    """dO."""


@dataclass(frozen=True)
class Block:
    """Tiles of the flash attention: B_r rows of queries by B_c keys."""

    rows: int
    keys: int


@dataclass(frozen=True)
class Results:
    """What an attention computes, as float64."""

    values: dict[str, Tensor]
    """Quantities by symbol: O, dQ, dK, dV [B, H, T, d]; L, δ [B, H, T]."""
    rescalings: Tensor | None = None
    """[B, H, T]: how often a row's maximum rose after its first block of keys, so that Ō and ℓ were rescaled."""


def baseline(inputs: Inputs, compute: Arithmetic, *, causal: bool, backward: bool) -> Results:
    """Return the attention with S and P materialised [B, H, T, T]. The backward pass reads P."""
    q, k, v, grad_out = inputs.q, inputs.k, inputs.v, inputs.grad_out
    every = slice(0, q.shape[-2])
    hidden = _hidden(every, every, q.device) if causal else None
    scores = _scores(q, k, hidden, compute)
    row_max = scores.amax(-1, keepdim=True)
    unnormalized = _exp(scores - row_max, hidden, compute)
    normalizer = compute.row_sum(unnormalized)[..., None]
    p = compute.round(unnormalized / normalizer)
    values = {"O": compute.product(p, v), "L": _logsumexp(row_max, normalizer, compute)}
    if not backward:
        return Results(values)
    grad_p = compute.product(grad_out, v.mT)
    delta = compute.row_sum(p, grad_p)
    grad_s = compute.round(p * compute.round(grad_p - delta[..., None]))
    alpha = _alpha(q, compute)
    return Results(
        values
        | {
            "δ": delta,
            "dQ": compute.round(alpha * compute.product(grad_s, k)),
            "dK": compute.round(alpha * compute.product(grad_s.mT, q)),
            "dV": compute.product(p.mT, grad_out),
        }
    )


def flash(inputs: Inputs, compute: Arithmetic, block: Block, *, causal: bool, backward: bool) -> Results:
    """Return the attention by tiles with an online softmax. The backward pass computes P from L."""
    forward = _flash_forward(inputs, compute, block, causal)
    if not backward:
        return forward
    gradients = _flash_backward(inputs, compute, block, causal, forward.values["O"], forward.values["L"])
    return Results(forward.values | gradients, forward.rescalings)


def _flash_forward(inputs: Inputs, compute: Arithmetic, block: Block, causal: bool) -> Results:
    """Each row is independent of the others, so that all rows go together: B_r says nothing here."""
    q, k, v = inputs.q, inputs.k, inputs.v
    length = q.shape[-2]
    shape = (*q.shape[:-1], 1)
    row_max, normalizer, out = q.new_full(shape, -math.inf), q.new_zeros(shape), torch.zeros_like(q)
    rescalings = torch.zeros(shape, dtype=torch.int64, device=q.device)
    for keys in _blocks(length, block.keys):
        rows = slice(keys.start if causal else 0, length)
        hidden = _hidden(rows, keys, q.device) if causal else None
        scores = _scores(q[..., rows, :], k[..., keys, :], hidden, compute)
        old_max = row_max[..., rows, :]
        new_max = torch.maximum(old_max, scores.amax(-1, keepdim=True))
        p = _exp(scores - new_max, hidden, compute)
        mass, product = compute.row_sum(p)[..., None], compute.keep(compute.sum_of_products(p, v[..., keys, :]))
        if keys.start:
            factor = compute.exp(old_max - new_max)
            mass = compute.keep(compute.keep(normalizer[..., rows, :] * factor) + mass)
            product = compute.keep(compute.keep(out[..., rows, :] * factor) + product)
            rescalings[..., rows, :] += new_max > old_max
        row_max[..., rows, :], normalizer[..., rows, :], out[..., rows, :] = new_max, mass, product
    values = {"O": compute.round(out / normalizer), "L": _logsumexp(row_max, normalizer, compute)}
    return Results(values, rescalings[..., 0])


def _flash_backward(
    inputs: Inputs, compute: Arithmetic, block: Block, causal: bool, out: Tensor, logsumexp: Tensor
) -> dict[str, Tensor]:
    q, k, v, grad_out = inputs.q, inputs.k, inputs.v, inputs.grad_out
    delta = compute.row_sum(grad_out, out)
    grad_q, grad_k, grad_v = (torch.zeros_like(q) for _ in range(3))

    def add(total: Tensor, at: slice, a: Tensor, b: Tensor) -> None:
        total[..., at, :] = compute.keep(total[..., at, :] + compute.keep(compute.sum_of_products(a, b)))

    for rows in _blocks(q.shape[-2], block.rows):
        q_rows, grad_out_rows = q[..., rows, :], grad_out[..., rows, :]
        for keys in _blocks(rows.stop if causal else q.shape[-2], block.keys):
            hidden = _hidden(rows, keys, q.device) if causal else None
            scores = _scores(q_rows, k[..., keys, :], hidden, compute)
            p = _exp(scores - logsumexp[..., rows, None], hidden, compute)
            grad_p = compute.product(grad_out_rows, v[..., keys, :].mT)
            grad_s = compute.round(p * compute.round(grad_p - delta[..., rows, None]))
            add(grad_v, keys, p.mT, grad_out_rows)
            add(grad_q, rows, grad_s, k[..., keys, :])
            add(grad_k, keys, grad_s.mT, q_rows)
    alpha = _alpha(q, compute)
    return {
        "δ": delta,
        "dQ": compute.round(alpha * compute.round(grad_q)),
        "dK": compute.round(alpha * compute.round(grad_k)),
        "dV": compute.round(grad_v),
    }


def _blocks(length: int, size: int) -> Iterator[slice]:
    """Return the slices of this size that cover the length. The last one may be shorter."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _hidden(rows: slice, keys: slice, device: torch.device) -> Tensor:
    """Return where a key comes after the query: bool [R, C]."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(keys.start, keys.stop, device=device) > queries[:, None]


def _alpha(q: Tensor, compute: Arithmetic) -> Tensor:
    """Return 1/√d in the precision."""
    return compute.round(q.new_tensor(q.shape[-1] ** -0.5))


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, compute: Arithmetic) -> Tensor:
    """Return S [B, H, R, C], the product and its multiple by α rounded; −∞ where the key is hidden."""
    scores = compute.round(_alpha(q, compute) * compute.product(q, k.mT))
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _exp(difference: Tensor, hidden: Tensor | None, compute: Arithmetic) -> Tensor:
    """Return exp of S minus a number of the row, 0 where the key is hidden."""
    p = compute.exp(difference)
    return p if hidden is None else p.masked_fill(hidden, 0.0)


def _logsumexp(row_max: Tensor, normalizer: Tensor, compute: Arithmetic) -> Tensor:
    """Return L [B, H, T] of m and ℓ [B, H, T, 1]."""
    return compute.keep(row_max + compute.keep(normalizer.log()))[..., 0]
