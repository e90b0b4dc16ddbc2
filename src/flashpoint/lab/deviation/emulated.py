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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.lab.deviation.arithmetic import EXACT, Arithmetic


@dataclass(frozen=True)
class Inputs:
    """Queries, keys, values and the gradient of the output: each [B, H, T, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    """dO."""
    scale: float | None = None
    """α; None is 1/√d."""

    @property
    def alpha(self) -> float:
        """The factor of the scores."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with each tensor changed."""
        return Inputs(change(self.q), change(self.k), change(self.v), change(self.grad_out), self.scale)


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
    return Results(_of_rows(inputs, slice(0, inputs.q.shape[-2]), compute, causal, backward))


def golden(inputs: Inputs, elements: int, *, causal: bool, backward: bool) -> Results:
    """Return :func:`baseline` in FP64 by blocks of rows, so that no [T, T] is held.

    Args:
        elements: scores that are held at a time, of one row at least.
    """
    count, heads, length, _ = inputs.q.shape
    whole: dict[str, Tensor] = {}
    for rows in _blocks(length, max(1, elements // (count * heads * length))):
        for name, part in _of_rows(inputs, rows, EXACT, causal, backward).items():
            if name in ("dK", "dV"):
                total = whole.setdefault(name, torch.zeros_like(inputs.k))
                total[..., : part.shape[-2], :] += part
            else:
                whole[name] = torch.cat([whole[name], part], 2) if name in whole else part
    return Results(whole)


def _of_rows(inputs: Inputs, rows: slice, compute: Arithmetic, causal: bool, backward: bool) -> dict[str, Tensor]:
    """Return what these queries give: of dK and dV their share, of the keys that they see."""
    keys = slice(0, rows.stop if causal else inputs.k.shape[-2])
    q, grad_out = inputs.q[..., rows, :], inputs.grad_out[..., rows, :]
    k, v = inputs.k[..., keys, :], inputs.v[..., keys, :]
    alpha = _alpha(inputs, compute)
    hidden = _hidden(rows, keys, q.device) if causal else None
    scores = _scores(q, k, alpha, hidden, compute)
    row_max = scores.amax(-1, keepdim=True)
    unnormalized = _exp(scores - row_max, hidden, compute)
    normalizer = compute.row_sum(unnormalized)[..., None]
    p = compute.round(unnormalized / normalizer)
    values = {"O": compute.product(p, v), "L": _logsumexp(row_max, normalizer, compute)}
    if not backward:
        return values
    grad_p = compute.product(grad_out, v.mT)
    delta = compute.row_sum(p, grad_p)
    grad_s = compute.round(p * compute.round(grad_p - delta[..., None]))
    return values | {
        "δ": delta,
        "dQ": compute.round(alpha * compute.product(grad_s, k)),
        "dK": compute.round(alpha * compute.product(grad_s.mT, q)),
        "dV": compute.product(p.mT, grad_out),
    }


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
    alpha, length = _alpha(inputs, compute), q.shape[-2]
    shape = (*q.shape[:-1], 1)
    row_max, normalizer, out = q.new_full(shape, -math.inf), q.new_zeros(shape), torch.zeros_like(q)
    rescalings = torch.zeros(shape, dtype=torch.int64, device=q.device)
    for keys in _blocks(length, block.keys):
        rows = slice(keys.start if causal else 0, length)
        hidden = _hidden(rows, keys, q.device) if causal else None
        scores = _scores(q[..., rows, :], k[..., keys, :], alpha, hidden, compute)
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
    alpha, length = _alpha(inputs, compute), q.shape[-2]
    delta = compute.row_sum(grad_out, out)
    grad_q, grad_k, grad_v = (torch.zeros_like(q) for _ in range(3))

    def of_tile(rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Return P and dS."""
        hidden = _hidden(rows, keys, q.device) if causal else None
        scores = _scores(q[..., rows, :], k[..., keys, :], alpha, hidden, compute)
        p = _exp(scores - logsumexp[..., rows, None], hidden, compute)
        grad_p = compute.product(grad_out[..., rows, :], v[..., keys, :].mT)
        return p, compute.round(p * compute.round(grad_p - delta[..., rows, None]))

    def add(total: Tensor, at: slice, a: Tensor, b: Tensor) -> None:
        total[..., at, :] = compute.keep(total[..., at, :] + compute.keep(compute.sum_of_products(a, b)))

    # A row of dQ adds one block of keys after another, a key's dK and dV one block of rows after another: all rows, and
    # then all keys, go together. With one pass over the tiles P would be computed once, but tile by tile.
    for keys in _blocks(length, block.keys):
        rows = slice(keys.start - keys.start % block.rows if causal else 0, length)
        add(grad_q, rows, of_tile(rows, keys)[1], k[..., keys, :])
    for rows in _blocks(length, block.rows):
        keys = slice(0, rows.stop if causal else length)
        p, grad_s = of_tile(rows, keys)
        add(grad_v, keys, p.mT, grad_out[..., rows, :])
        add(grad_k, keys, grad_s.mT, q[..., rows, :])
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


def _alpha(inputs: Inputs, compute: Arithmetic) -> Tensor:
    """Return α in the precision."""
    return compute.round(inputs.q.new_tensor(inputs.alpha))


def _scores(q: Tensor, k: Tensor, alpha: Tensor, hidden: Tensor | None, compute: Arithmetic) -> Tensor:
    """Return S [B, H, R, C], the product and its multiple by α rounded; −∞ where the key is hidden."""
    scores = compute.round(alpha * compute.product(q, k.mT))
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _exp(difference: Tensor, hidden: Tensor | None, compute: Arithmetic) -> Tensor:
    """Return exp of S minus a number of the row, 0 where the key is hidden."""
    p = compute.exp(difference)
    return p if hidden is None else p.masked_fill(hidden, 0.0)


def _logsumexp(row_max: Tensor, normalizer: Tensor, compute: Arithmetic) -> Tensor:
    """Return L [B, H, T] of m and ℓ [B, H, T, 1]."""
    return compute.keep(row_max + compute.keep(normalizer.log()))[..., 0]
