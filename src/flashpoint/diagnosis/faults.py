"""Attentions with a fault put in on purpose, to see whether a diagnosis names it.

Each is FlashAttention of a form in PyTorch with BF16 operands and FP32 sums, tiles of :data:`BLOCK` queries by as many
keys, and δ from an FP32 O. Without its fault it has nothing to be found. Shapes: :mod:`flashpoint.diagnosis.call`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.form import CLOSED, Form

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
    "random_row", "fp16_overflow", "rounded_delta", "other_denominator",
)  # fmt: skip
BY_TENSORS = {kind: (kind,) for kind in KINDS} | {
    "logsumexp_block": ("gradients_off",),
    "stale_maximum": ("out_rows",),
    "dropped_tile": ("out_rows",),
    "random_row": ("out_rows",),
}
"""Kinds of findings that name a fault where the attention is not called anew."""


def faulty_attention(fault: Fault) -> Callable[..., Tensor]:
    """Return an attention with the fault, which takes q, k, v of the shapes of a call, is_causal and scale, or else a
    form; without one it is causal."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, scale: float | None = None, *, form: Form | None = None
    ) -> Tensor:
        form = form or Form(is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
        out: Tensor = _Faulty.apply(q, k, v, form, fault)
        return out

    return attention


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, form: Form, fault: Fault) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
        chosen = torch.zeros(q.shape[1], 1, 1, dtype=torch.bool, device=q.device)
        chosen[slice(None) if fault.head is None else fault.head] = True
        with torch.autocast(q.device.type, enabled=False):  # which would round the operands of QKᵀ and S to BF16
            out, logsumexp = _forward(q.float(), keys, values, form, fault, chosen)
        returned = out.to(q.dtype)
        # δ of what is returned is what FlashAttention has; of the faultless attention it is of the FP32 O.
        for_delta = torch.where(chosen, returned.float(), out) if fault.kind == "rounded_head" else out
        ctx.save_for_backward(q, k, v, for_delta, logsumexp, chosen)
        ctx.form, ctx.fault = form, fault
        return returned

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, chosen = ctx.saved_tensors
        form, groups = ctx.form, q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
        grad_out = grad_out.float()
        raw = q.float() @ keys.mT * form.scale
        p = (_scores(raw, form) - logsumexp[..., None]).exp()
        delta = (grad_out * out).sum(-1)
        if ctx.fault.kind == "delta_bias":
            error = ctx.fault.size * grad_out.norm(dim=-1) * out.norm(dim=-1)
            delta = torch.where(chosen[..., 0], delta + error, delta)
        if ctx.fault.kind == "rounded_delta":
            delta = torch.where(chosen[..., 0], _bf16(delta), delta)
        grad_s = p * (_kept(grad_out @ values.mT, form) / (1 - form.dropout) - delta[..., None])
        if form.softcap:
            grad_s = grad_s / torch.cosh(raw / form.softcap).square()
        grad_s = _bf16(grad_s)
        grad_q = grad_s @ keys * form.scale
        grad_k, grad_v = grad_s.mT @ q.float() * form.scale, _kept(_bf16(p), form).mT @ grad_out / (1 - form.dropout)
        grad_k, grad_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (grad_k, grad_v))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, form: Form, fault: Fault, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return O [N, H, T_q, d_v] before it is rounded to the inputs' dtype, and L [N, H, T_q]; both FP32."""
    scores = q @ k.mT * form.scale
    if fault.kind == "fp16_overflow":  # scores that are held in FP16 before the scale
        scores = torch.where(chosen, (q @ k.mT).half().float() * form.scale, scores)
    scores = _scores(scores, form)
    length = q.shape[-2]
    shift = q.new_full(q.shape[:-1], -math.inf)
    normalizer, out = torch.zeros_like(shift), q.new_zeros(*q.shape[:-1], v.shape[-1])
    rows = torch.arange(length, device=q.device)
    for number, start in enumerate(range(0, k.shape[-2], BLOCK)):
        s = scores[..., start : start + BLOCK]
        if fault.kind == "dropped_tile":  # the diagonal tile of a block of queries, but for the first key that is seen
            dropped = (rows // BLOCK == fault.block) & (number == fault.block)
            later = (s > -math.inf).cumsum(-1) > 1
            s = s.masked_fill(chosen & dropped[:, None] & later, -math.inf)
        new_shift = torch.maximum(shift, s.amax(-1))
        p = (s - new_shift[..., None]).exp().nan_to_num(0.0)  # rows that have seen no key yet
        rescale = (shift - new_shift).exp().nan_to_num(0.0)
        if fault.kind == "stale_maximum" and number == fault.block:
            stale = chosen[..., 0] & (shift > -math.inf)
            rescale = torch.where(stale, torch.ones_like(rescale), rescale)
        normalizer = normalizer * rescale + p.sum(-1)
        of_tile = _kept(_bf16(p), form, slice(start, start + BLOCK))
        out = out * rescale[..., None] + of_tile @ v[..., start : start + BLOCK, :]
        shift = new_shift
    if form.sink is not None:  # a row may have seen no key
        normalizer = normalizer + (form.sink.float()[:, None] - shift).exp().nan_to_num(0.0, 0.0, 0.0)
    if fault.kind == "other_denominator":  # one more key, whose score is the row's largest
        normalizer = torch.where(chosen[..., 0], normalizer + 1, normalizer)
    if fault.kind == "rounded_denominator":
        normalizer = torch.where(chosen[..., 0], _bf16(normalizer), normalizer)
    empty = (_scores(torch.zeros_like(scores), form) == -math.inf).all(-1)
    out = torch.where(empty[..., None], 0.0, out / (normalizer[..., None] * (1 - form.dropout)))
    logsumexp = torch.where(empty, 0.0, shift + normalizer.log())
    if fault.kind == "logsumexp_block":
        logsumexp = torch.where(chosen[..., 0] & (rows // BLOCK == fault.block), logsumexp + 0.1, logsumexp)
    if fault.kind == "random_row":  # another one at each call, as a race would spoil
        row = (fault.seed + _spoiled.setdefault(fault.seed, 0)) * 2_654_435_761 % length
        _spoiled[fault.seed] += 1
        out = torch.where(chosen & (rows == row)[:, None], out.roll(1, -1), out)
    return out, logsumexp


def _scores(scores: Tensor, form: Form) -> Tensor:
    """Return S [N, H, T_q, T_k] by α QKᵀ: what a diagnosis reads of a form is not asked."""
    if form.softcap:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    if form.bias is not None:
        scores = torch.where(form.bias > CLOSED, scores + form.bias.float(), -math.inf)
    if form.mask is not None:
        scores = torch.where(form.mask, scores, -math.inf)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf) if form.is_causal else scores


def _kept(weights: Tensor, form: Form, keys: slice = slice(None)) -> Tensor:
    return weights if form.kept is None else weights * form.kept[..., keys]


_spoiled: dict[int, int] = {}
"""Calls so far of ``random_row``, by seed."""


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
