"""Attention of BF16 with its passes inside a block of ``flashpoint.stabilize``, and what FP64 finds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KNOWN = {"sdpa": F.scaled_dot_product_attention}  # where the function itself is not replaced
MODEL = nn.Linear(2, 2)


def inputs(scale: float = 1.0, heads_of_keys: int = 4) -> list[Tensor]:
    """Return q, k, v and dO [2, H, 32, 16] bfloat16; dO would vanish in FP16."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad_out = (
        torch.randn(2, heads, 32, 16, generator=generator) for heads in (4, heads_of_keys, heads_of_keys, 4)
    )
    return [(q * scale).bfloat16(), k.bfloat16(), v.bfloat16(), (grad_out * 1e-9).bfloat16()]


def passes(attend: Callable[..., Tensor], *learned: Tensor, given: list[Tensor] | None = None) -> list[Tensor]:
    """Return O, dQ, dK, dV and the gradients of what else is learned."""
    *qkv, grad_out = given or inputs()
    leaves = [x.detach().clone().requires_grad_() for x in (*qkv, *learned)]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def exact(bias: Tensor | None = None, causal: bool = True) -> list[Tensor]:
    *qkv, grad_out = (x.double() for x in inputs())
    leaves = [x.requires_grad_() for x in (*qkv, *([] if bias is None else [bias.detach().double()]))]
    q, k, v, *more = leaves
    scores = q @ k.mT / math.sqrt(16) + (more[0] if more else 0)
    if causal:
        scores = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), -math.inf)
    out = scores.softmax(-1) @ v
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
