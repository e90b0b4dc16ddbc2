"""δ of another library's backward pass, made from outside that of the O before its rounding.

FlexAttention's and FlashAttention-4's backward passes take δ = rowsum(dO∘O) − dL, with dL the gradient of L. Here dL is
−rowsum(dO∘(Ô − O)), Ô being O before its rounding. So their δ is rowsum(dO∘Ô), and their kernels stay as they are. Ô is
that of a forward pass of this package, with FlashAttention-2's numerics.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpoint.numerics.choices import NEAREST, UNROUNDED, ResidualFormat
from flashpoint.numerics.deltas import two_parts
from flashpoint.numerics.layout import constant_where_traced
from flashpoint.numerics.ops import flash_fwd_op, op
from flashpoint.numerics.passes import has_triton
from flashpoint.numerics.production import fa4_backward, flex_with_logsumexp, repeat_kv
from flashpoint.numerics.shared_graphs import name_for_op
from flashpoint.numerics.variant import AttentionVariant

Ours = tuple[Tensor, Tensor, Tensor]
"""O as the kernels round it [B, H, T, d] bfloat16, L [B, H, T] float32, and what was saved for Ô [B, H, T, d]."""


def corrected(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: int | None,
    seed_and_step: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Compute attention whose backward pass is another library's, with δ of the O before its rounding.

    Args:
        kernel: whose backward pass: a name of :data:`CORRECTED`.
        q: [B, H, T, d] bfloat16.
        k, v: [B, H_kv, T, d] bfloat16, H_kv divides H.
        bits: mantissa bits of the residual that our forward pass saves; None for a second O in FP32.
        seed_and_step: [2] int64.
        scale: α; None is 1/√d.

    Returns:
        O [B, H, T, d] bfloat16.

    Raises:
        ValueError: the inputs have another dtype.
    """
    if q.dtype != torch.bfloat16:
        raise ValueError(
            f"attn.delta=out_fp32: with kernel={kernel} it takes bfloat16, not {str(q.dtype).removeprefix('torch.')}; "
            f"cast the inputs, or take attn={kernel}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ours = tuple(x.detach() for x in (q, repeat_kv(q, k), repeat_kv(q, v)))
    *parts, _ = flash_fwd_op(*ours, seed_and_step, name_for_op(_key_of_forward(bits)), 1, is_causal, scale)
    return CORRECTED[kernel](q, k, v, parts, bits, is_causal, scale)


def _flex(q: Tensor, k: Tensor, v: Tensor, ours: Ours, bits: int | None, is_causal: bool, scale: float) -> Tensor:
    # FlexAttention lends no backward pass without its forward pass: there are two, and ours is only for Ô.
    out, logsumexp = flex_with_logsumexp(q, k, v, is_causal, scale)
    lacking = (_whole(ours[0], ours[2], bits) - out.detach().float()).to(out.dtype)  # of 1 to 8 bits: a BF16 number
    corrected: Tensor = _GradientOfL.apply(out, logsumexp, lacking)
    return corrected


def _fa4(q: Tensor, k: Tensor, v: Tensor, ours: Ours, bits: int | None, is_causal: bool, scale: float) -> Tensor:
    # Its backward pass is a function of its own, which takes our O and L. So one forward pass is enough: with its O
    # there would be two, and the residual of its O would have the rounding of P̄ in ours.
    corrected: Tensor = _OfFA4.apply(q, k, v, *ours, bits, is_causal, scale)
    return corrected


CORRECTED: dict[str, Callable[[Tensor, Tensor, Tensor, Ours, int | None, bool, float], Tensor]] = {
    "flex": _flex,
    "fa4": _fa4,
}
"""By ``attn.kernel``."""


@constant_where_traced  # Dynamo cannot trace how a variant is made
def _key_of_forward(bits: int | None) -> str:
    return AttentionVariant(name="outside", delta="out_fp32", out_residual_bits=bits).key


def _format(bits: int) -> ResidualFormat:
    return ResidualFormat.of(UNROUNDED, NEAREST, bits)


def _whole(out: Tensor, saved: Tensor, bits: int | None) -> Tensor:
    """Return Ô [B, H, T, d] float32."""
    return saved if bits is None else two_parts(out, saved, _format(bits))


@op("grad_logsumexp")
def grad_logsumexp_op(grad_out: Tensor, out: Tensor, saved: Tensor, bits: int | None) -> Tensor:
    """Return dL = rowsum(dO∘(O − Ô)) [B, H, T] float32, given O of our forward pass and what it saved for Ô."""
    if out.is_cuda and has_triton() and out.shape[-1].bit_count() == 1:
        from flashpoint.numerics import grad_logsumexp_launch as launch  # a CPU need not wait for Triton

        return launch.grad_logsumexp(grad_out, out, saved, 0 if bits is None else _format(bits).mantissa)
    return (grad_out * (out.float() - _whole(out, saved, bits))).sum(-1)


@torch.library.register_fake("flashpoint::grad_logsumexp")
def _(grad_out: Tensor, out: Tensor, saved: Tensor, bits: int | None) -> Tensor:
    return out.new_empty(out.shape[:-1], dtype=torch.float32)


class _GradientOfL(torch.autograd.Function):
    """O as it is. Its gradient comes back as it is, too, and beside it one of L, which corrects δ."""

    @staticmethod
    def forward(out: Tensor, logsumexp: Tensor, lacking: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        (lacking,) = ctx.saved_tensors
        return grad_out, -(grad_out * lacking.float()).sum(-1), None


class _OfFA4(torch.autograd.Function):
    """O as it is. What comes back goes through FlashAttention-4's backward pass, with the gradient of L beside it."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        saved: Tensor,
        bits: int | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.bits, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, saved = ctx.saved_tensors
        grad_logsumexp = grad_logsumexp_op(grad_out, out, saved, ctx.bits)
        by_token = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
        grads = fa4_backward(*by_token, logsumexp, grad_logsumexp, ctx.is_causal, ctx.scale)
        return (*(x.transpose(1, 2) for x in grads), *[None] * 6)
