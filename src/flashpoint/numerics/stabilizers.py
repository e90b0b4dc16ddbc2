"""What is put in front of an attention that stays as it is, and exact arithmetic cannot see.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpoint.numerics.choices import Shift

FP16_MAX = 65_504.0
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, T, d], k and v [B, H_kv, T, d] to O [B, H, T, d]."""


def stabilized(attention: Attention, shift_keys: Shift, shift_values: Shift, fp16_inside: bool) -> Attention:
    """Return an attention with what stabilises it in front.

    Args:
        attention: of any library.
        shift_keys: K − c instead of K. Softmax does not see one vector c a head.
        shift_values: attention(q, k, v − c) + c: the rows of P sum to 1.
        fp16_inside: q, k, v and dO in FP16, dO scaled by a power of two, and O and the gradients back in the inputs'
            dtype. FP16 rounds O to 10 mantissa bits where BF16 has 7.
    """

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shift_keys != "none":
            k = (k.float() - center(k, shift_keys)).to(k.dtype)
        c = None if shift_values == "none" else center(v, shift_values)
        if c is not None:
            v = (v.float() - c).to(v.dtype)
        out = in_fp16(attention, q, k, v) if fp16_inside else attention(q, k, v)
        if c is None:
            return out
        return (out.float() + c.repeat_interleave(q.shape[1] // v.shape[1], 1)).to(out.dtype)

    return call


def center(x: Tensor, shift: Shift) -> Tensor:
    """Return c [B, H, 1, d] or [1, H, 1, d] float32 of K or V [B, H, T, d]."""
    x = x.float() if shift == "sequence" else x.detach().float()
    return x.mean((0, 2) if shift == "batch_detached" else 2, keepdim=True)


def in_fp16(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute an attention and its gradients on FP16 tensors; O has the dtype of q.

    What exceeds FP16's largest number in q, k and v takes that number. dO is multiplied by the power of two that keeps
    each sum of T of its elements below 2¹⁵, so that dV cannot overflow. The host waits for nothing.
    """
    scale = q.new_ones((), dtype=torch.float32)
    *inner, scale = _Enter.apply(q, k, v, scale)
    with torch.autocast(q.device.type, enabled=False):  # under which PyTorch's attention casts FP16 to BF16
        inside = attention(*inner)
    out: Tensor = _Leave.apply(inside, scale, q.dtype)
    return out


class _Enter(torch.autograd.Function):
    """Casts to FP16. The gradient of ``scale`` is the factor that :class:`_Leave` chose."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (*(x.float().clamp(-FP16_MAX, FP16_MAX).half() for x in (q, k, v)), scale.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[3]
        return (*((grad.float() / factor).to(ctx.dtype) for grad in grads[:3]), None)


class _Leave(torch.autograd.Function):
    """Casts O back; in the backward pass scales dO and casts it to FP16."""

    @staticmethod
    def forward(out: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return out.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        factor = power_of_two(grad_out)
        return (grad_out.float() * factor).to(ctx.dtype), factor, None


def power_of_two(grad_out: Tensor) -> Tensor:
    """Return the largest power of two [] float32, by which T·max|dO| stays below 2¹⁵; 1 where dO is 0 or not finite.

    Args:
        grad_out: dO [B, H, T, d].
    """
    largest = grad_out.detach().abs().amax().float() * grad_out.shape[2]
    exponent = (largest.view(torch.int32) >> 23) - 127  # 2^exponent ≤ largest < 2^(exponent + 1)
    wanted = (14 - exponent).clamp(-126, 126)
    factor = ((wanted + 127) << 23).view(torch.float32)
    return torch.where((largest > 0) & largest.isfinite(), factor, torch.ones_like(factor))
