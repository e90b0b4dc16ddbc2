"""Attention as one call with one variant, and what else a variant computes.

Shapes: B sequences, H heads, T tokens, d features per head. ``layer`` counts from 1; ``seed_and_step`` [2] int64, on
the device of the tensors, is the key of stochastic rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.numerics import deltas, reference
from flashpoint.numerics.layout import Form, is_eager
from flashpoint.numerics.ops import flash_bwd_op, flash_fwd_op
from flashpoint.numerics.passes import Passes, index_of, kernels_for, noise_key, passes_of
from flashpoint.numerics.production import ScoreMod, production_attention, repeat_kv
from flashpoint.numerics.shared_graphs import name_for_op, name_for_output
from flashpoint.numerics.stabilizers import stabilized
from flashpoint.numerics.variant import AttentionVariant, in_front, kernel_in, variant_from_key


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor | None,
    causal: bool = True,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Compute self-attention with the numerics of ``variant``, by its ``kernel`` behind its stabilisers.

    Args:
        q: [B, H, T, d], bfloat16 or float32, any strides.
        k, v: [B, H_kv, T, d], H_kv divides H.
        variant: every numerical choice, and the layers and heads it holds for.
        seed_and_step: None for a variant that reads neither.
        causal: whether a query sees no later key; otherwise it sees all.
        scale: α; None is 1/√d.
        score_mod: what FlexAttention, and no other kernel, makes of the scores.

    Returns:
        O [B, H, T, d]; the inputs' dtype, or float32 if a selected variant's O does not fit BF16.
    """
    kernel, front = kernel_in(variant, layer), in_front(variant, layer)
    assert score_mod is None or (kernel == "flex" and front.delta == "out"), kernel

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kernel == "flash":
            k, v = repeat_kv(q, k), repeat_kv(q, v)
            alpha = q.shape[-1] ** -0.5 if scale is None else scale
            if is_eager(q, k, v):
                return called_directly(q, k, v, seed_and_step, direct_passes(q, variant.key, layer, causal, alpha))
            key = _no_key(q) if seed_and_step is None else seed_and_step
            return flash_fwd_op(q, k, v, key, name_for_output(variant.key), layer, causal, alpha)[0]
        if front.delta != "out":
            from flashpoint.numerics import outside_delta  # few variants ask for it

            bits, key = front.out_residual_bits, _no_key(q) if seed_and_step is None else seed_and_step
            return outside_delta.corrected(kernel, q, k, v, bits, key, is_causal=causal, scale=scale)
        return production_attention(kernel, q, k, v, is_causal=causal, scale=scale, score_mod=score_mod)

    return stabilized(plain, front.shift_keys, front.shift_values, front.fp16_inside)(q, k, v)


def _no_key(q: Tensor) -> Tensor:
    """Return a ``seed_and_step`` for variants that take none: zeros on the device of ``q``, which no kernel reads."""
    return torch.zeros(2, dtype=torch.int64, device=q.device)


@lru_cache(maxsize=64)
def _kept_key(device: torch.device) -> Tensor:
    """Return :func:`_no_key`, made once: of tensors that :func:`is_eager` holds for."""
    with torch.inference_mode(mode=False):  # else it could not be saved for a backward pass
        return torch.zeros(2, dtype=torch.int64, device=device)


def direct_passes(q: Tensor | Form, key: str, layer: int, causal: bool, scale: float) -> Passes:
    """Return the passes of a variant by its key on tensors like q [B, H, T, d]."""
    # Of the variant that the ops take, too: caches find it without a comparison.
    return passes_of(q, variant_from_key(key), layer, causal, scale)


def called_directly(q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor | None, passes: Passes) -> Tensor:
    """Return O [B, H, T, d] with its gradients, of tensors that :func:`is_eager` holds for. The same by an op takes the
    host twice as long."""
    if seed_and_step is None:
        seed_and_step = _kept_key(q.device)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # PyTorch's own method in Python looks for tensors of transforms that have ended. Transforms need it.
        apply = _Flash.apply if torch._C._are_functorch_transforms_active() else _apply
        out: Tensor = apply(q, k, v, seed_and_step, passes)
        return out
    return passes.forward(q, k, v, seed_and_step)[0]


class _Flash(torch.autograd.Function):
    """The op's forward and backward pass, of tensors that :func:`is_eager` holds for."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, passes: Passes) -> Tensor:
        saved = passes.forward(q, k, v, seed_and_step)
        ctx.save_for_backward(q, k, v, *saved, seed_and_step)
        ctx.passes = passes
        return saved[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved, seed_and_step = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_eager(grad_out):
            # To be traced, or with create_graph: the op refuses second derivatives.
            variant, *others = ctx.passes.call
            results = (q.new_empty(0) if x is None else x for x in saved)
            grads = flash_bwd_op(grad_out, q, k, v, *results, seed_and_step, name_for_op(variant.key), *others)
        else:
            grads = ctx.passes.backward(grad_out, q, k, v, saved, seed_and_step)
        return (*grads, None, None)


_apply = super(torch.autograd.Function, _Flash).apply


def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the forward pass and what the backward pass needs, by this package's kernels or reference.

    Arguments as for :func:`attention`, and as many heads of keys as of queries.

    Returns:
        O [B, H, T, d], which alone has gradients. L [B, H, T] float32. The O of δ, [B, H, T, d] float32. The centred
        keys [B, H, T, d], empty where none are centred. With ``out_residual_bits`` the third is what O lacks of it. The
        third is empty where it is O.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, logsumexp, out_for_delta, centered = flash_fwd_op(
        q, k, v, seed_and_step, name_for_op(variant.key), layer, causal, scale
    )
    return out, logsumexp, out_for_delta, centered


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute what decides the rounding of each row, in an extra forward pass; arguments as for :func:`attention`.

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    if kernels := kernels_for(q, variant, layer):
        statistics: tuple[Tensor, Tensor] = kernels.row_statistics(
            q, k, v, variant, layer=layer, seed_and_step=seed_and_step
        )
        return statistics
    shift = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ones = torch.empty_like(shift, dtype=torch.int32)
    for group, heads in variant.groups(layer, q.shape[1]):
        noise, at = noise_key(q, seed_and_step, layer, heads), index_of(heads, q)
        shift[:, at], ones[:, at] = reference.row_statistics(q[:, at], k[:, at], v[:, at], group, noise)
    return shift, ones


def whole_scores(q: Tensor, k: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor) -> Tensor:
    """Return S [B, H, T, T] float32 as rounded, −∞ above the diagonal. It takes T² of memory: for a few sequences."""
    scores = q.new_empty((*q.shape[:-1], q.shape[-2]), dtype=torch.float32)
    for group, heads in variant.groups(layer, q.shape[1]):
        noise, at = noise_key(q, seed_and_step, layer, heads), index_of(heads, q)
        scores[:, at] = reference.whole_scores(q[:, at], k[:, at], group, noise)
    return scores


def delta_error(
    grad_out: Tensor, out: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> Tensor:
    """Return the error [B, H, T] float32 that the variant injects into the δ of dQ; dO and O are [B, H, T, d]."""
    error = grad_out.new_zeros(grad_out.shape[:-1], dtype=torch.float32)
    for group, heads in variant.groups(layer, grad_out.shape[1]):
        if group.delta_error.into != "grad_k":
            noise, at = noise_key(grad_out, seed_and_step, layer, heads), index_of(heads, grad_out)
            error[:, at] = deltas.delta_error(grad_out[:, at], out[:, at], group.delta_error, noise)
    return error


def sdpa_operation(q: Tensor) -> str:
    """Return the kernel that PyTorch's ``scaled_dot_product_attention`` now takes for tensors like ``q`` [B, H, T, d].

    Returns:
        ``ScaledDotProductFlashAttention`` or another fused operation by PyTorch's name; ``math`` where it is none.
    """
    q = torch.empty_like(q, requires_grad=True)
    node = F.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn
    name = node.name() if node else ""
    return name.removesuffix("Backward0") if name.startswith("ScaledDotProduct") else "math"
