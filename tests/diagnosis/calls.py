"""Calls of attentions that the tests of a diagnosis are about: their tensors, and attentions without a fault."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.probe import Function, results_of
from flashpoint.drop_in import attention
from flashpoint.numerics.variant import AttentionVariant

HEADS, LENGTH, SIZE = 4, 64, 32


def inputs(
    seed: int,
    factor: float = 1.0,
    heads_kv: int = HEADS,
    offset: float = 0.0,
    sequences: int = 6,
    length: int = LENGTH,
) -> list[Tensor]:
    """q, k, v and dO; every key has a part ``offset`` in common."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sequences, heads, length, SIZE) for heads in (HEADS, heads_kv, heads_kv, HEADS)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for shape in shapes)
    k[..., 0] += offset
    return [x.bfloat16() for x in (q * factor, k, v, grad_out)]


def call_of(function: Function, tensors: list[Tensor], scale: float = SIZE**-0.5) -> AttentionCall:
    q, k, v, grad_out = tensors
    call = AttentionCall(q, k, v, grad_out, Form(True, scale), 2, 7, "f")
    found = results_of(function, call)
    return dataclasses.replace(call, **vars(found))


def by_position(function: Callable[..., Tensor]) -> Function:
    return lambda q, k, v, is_causal, scale: function(q, k, v, is_causal=is_causal, scale=scale)


class _FusedExponent(torch.autograd.Function):
    """Causal FlashAttention-2 with exp2(fma(S, log2 e, −m·log2 e)), in which products are of BF16 and sums FP32."""

    @staticmethod
    def exponential(scores: Tensor, shift: Tensor) -> Tensor:
        """FP64 holds the product exactly; the last step alone rounds to FP32."""
        log2e = torch.tensor(math.log2(math.e), dtype=torch.float32)
        return torch.exp2((scores.double() * log2e.double() - (shift * log2e).double()).float())

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        scores = ((q.float() @ k.float().mT) * scale).masked_fill(~seen, -math.inf)
        shift = scores.amax(-1, keepdim=True)
        p = _FusedExponent.exponential(scores, shift)
        mass = p.sum(-1, keepdim=True)
        out = ((p.bfloat16().float() @ v.float()) / mass).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, scores, shift + mass.log())
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, scores, logsumexp = ctx.saved_tensors
        p, grad_out = _FusedExponent.exponential(scores, logsumexp), grad_out.float()
        delta = (grad_out * out.float()).sum(-1, keepdim=True)
        grad_s = (p * (grad_out @ v.float().mT - delta)).bfloat16().float()
        grad_q, grad_k = grad_s @ k.float() * ctx.scale, grad_s.mT @ q.float() * ctx.scale
        grad_v = p.bfloat16().float().mT @ grad_out
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def attention_with_fused_exponent(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Compute FlashAttention-2 as production kernels do: P̄ at the maximum need not be 1. A mask is always causal."""
    assert is_causal
    out: Tensor = _FusedExponent.apply(q, k, v, scale)
    return out


CLEAN: dict[str, Callable[..., Tensor]] = {
    "no fault": faulty_attention(Fault("none")),
    "sdpa": torch.nn.functional.scaled_dot_product_attention,
    "exact row sums": lambda *qkv, **options: attention(*qkv, variant=AttentionVariant(exact_row_sum=True), **options),
    "flash_fp32": lambda *qkv, **options: attention(*qkv, variant="flash_fp32", **options),
}
