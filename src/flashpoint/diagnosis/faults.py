"""Attentions with a fault put in on purpose, to see whether a diagnosis names it.

Each is causal FlashAttention in PyTorch with BF16 operands and FP32 sums, tiles of :data:`BLOCK` queries by as many
keys, and δ from an FP32 O. Without its fault it has nothing to be found. Shapes: :mod:`flashpoint.diagnosis.call`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Queries and keys of a tile."""


@dataclass(frozen=True)
class Fault:
    """What is wrong.

    Attributes:
        kind: of :data:`KINDS`.
        head: from 0, the one that has it; None is every head.
        size: of the bias of δ, in |dO||O|, for ``delta_bias``; otherwise not looked at.
        block: of queries, for faults of one block.
        seed: of the row that ``random_row`` spoils.
    """

    kind: str
    head: int | None = None
    size: float = 1e-3
    block: int = 1
    seed: int = 0


KINDS = (
    "none", "delta_bias", "rounded_head", "logsumexp_block", "rounded_denominator", "stale_maximum", "dropped_tile",
    "random_row", "fp16_overflow",
)  # fmt: skip


def faulty_attention(fault: Fault) -> Callable[..., Tensor]:
    """Return an attention that takes q, k, v [N, H, T, d], is_causal and scale, with the fault."""

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, scale: float | None = None) -> Tensor:
        if not is_causal:
            raise ValueError("the attentions with faults are causal")
        out: Tensor = _Faulty.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, fault)
        return out

    return attention


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, fault: Fault) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
        chosen = torch.zeros(q.shape[1], 1, 1, dtype=torch.bool, device=q.device)
        chosen[slice(None) if fault.head is None else fault.head] = True
        with torch.autocast(q.device.type, enabled=False):  # which would round the operands of QKᵀ and S to BF16
            out, logsumexp = _forward(q.float(), keys, values, scale, fault, chosen)
        returned = out.to(q.dtype)
        # δ of what is returned is what FlashAttention has; of the faultless attention it is of the FP32 O.
        for_delta = torch.where(chosen, returned.float(), out) if fault.kind == "rounded_head" else out
        ctx.save_for_backward(q, k, v, for_delta, logsumexp, chosen)
        ctx.scale, ctx.fault = scale, fault
        return returned

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, chosen = ctx.saved_tensors
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
        grad_out = grad_out.float()
        scores = _masked(q.float() @ keys.mT * ctx.scale)
        p = (scores - logsumexp[..., None]).exp()
        delta = (grad_out * out).sum(-1)
        if ctx.fault.kind == "delta_bias":
            error = ctx.fault.size * grad_out.norm(dim=-1) * out.norm(dim=-1)
            delta = torch.where(chosen[..., 0], delta + error, delta)
        grad_s = _bf16(p * (grad_out @ values.mT - delta[..., None]))
        grad_q = grad_s @ keys * ctx.scale
        grad_k, grad_v = grad_s.mT @ q.float() * ctx.scale, _bf16(p).mT @ grad_out
        grad_k, grad_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (grad_k, grad_v))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, fault: Fault, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return O [N, H, T, d] before it is rounded to the inputs' dtype, and L [N, H, T]; both FP32."""
    scores = q @ k.mT * scale
    if fault.kind == "fp16_overflow":  # scores that are held in FP16 before the scale
        scores = torch.where(chosen, (q @ k.mT).half().float() * scale, scores)
    scores = _masked(scores)
    length = q.shape[-2]
    shift = q.new_full(q.shape[:-1], -math.inf)
    normalizer, out = torch.zeros_like(shift), torch.zeros_like(q)
    rows = torch.arange(length, device=q.device)
    for number, start in enumerate(range(0, length, BLOCK)):
        s = scores[..., start : start + BLOCK]
        if fault.kind == "dropped_tile":  # the diagonal tile of one block of queries, but for its first key
            dropped = (rows // BLOCK == fault.block) & (number == fault.block)
            later = torch.arange(s.shape[-1], device=q.device) > 0
            s = s.masked_fill(chosen & dropped[:, None] & later, -math.inf)
        new_shift = torch.maximum(shift, s.amax(-1))
        p = (s - new_shift[..., None]).exp().nan_to_num(0.0)  # rows above this block have no key in it
        rescale = (shift - new_shift).exp().nan_to_num(0.0)
        if fault.kind == "stale_maximum" and number == fault.block:
            stale = chosen[..., 0] & (shift > -math.inf)
            rescale = torch.where(stale, torch.ones_like(rescale), rescale)
        normalizer = normalizer * rescale + p.sum(-1)
        out = out * rescale[..., None] + _bf16(p) @ v[..., start : start + BLOCK, :]
        shift = new_shift
    if fault.kind == "rounded_denominator":
        normalizer = torch.where(chosen[..., 0], _bf16(normalizer), normalizer)
    out, logsumexp = out / normalizer[..., None], shift + normalizer.log()
    if fault.kind == "logsumexp_block":
        logsumexp = torch.where(chosen[..., 0] & (rows // BLOCK == fault.block), logsumexp + 0.1, logsumexp)
    if fault.kind == "random_row":  # another one at each call, as a race would spoil
        row = (fault.seed + _spoiled.setdefault(fault.seed, 0)) * 2_654_435_761 % length
        _spoiled[fault.seed] += 1
        out = torch.where(chosen & (rows == row)[:, None], out.roll(1, -1), out)
    return out, logsumexp


_spoiled: dict[int, int] = {}
"""Calls so far of ``random_row``, by seed."""


def _masked(scores: Tensor) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
