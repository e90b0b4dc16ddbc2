"""Attention as one call with one variant, and the ``torch.library`` ops behind it.

The ops keep ``torch.compile`` from tracing into the reference, where its fusions would drop rounding points
(an FP32 → BF16 → FP32 cast pair counts as removable there).
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.attention import reference
from flashpoint.attention.layout import by_token
from flashpoint.attention.rounding import NoiseKey
from flashpoint.attention.variant import AttentionVariant, Groups, variant_from_key


def attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> Tensor:
    """Causal self-attention with the numerics of ``variant``.

    Args:
        q, k, v: [B, H, T, d], bfloat16 or float32, any strides.
        variant: every numerical choice, and the layers and heads it holds for.
        layer: number of the layer, from 1.
        seed_and_step: [2] int64 on the device of ``q``: key of stochastic rounding.

    Returns:
        O [B, H, T, d]; the inputs' dtype, or float32 if a selected variant's O does not fit BF16.
    """
    groups = variant.groups(layer, q.shape[1])
    if groups[0][0].kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out, *_ = flash_forward_op(q, k, v, seed_and_step, variant.key, layer)
    return out


def sdpa_operation(q: Tensor) -> str:
    """What PyTorch's ``scaled_dot_product_attention`` computes tensors like ``q`` [B, H, T, d] with, as things are set.

    Returns:
        ``ScaledDotProductFlashAttention`` or another fused operation by PyTorch's name; ``math`` where it is none.
    """
    q = torch.empty_like(q, requires_grad=True)
    node = F.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn
    name = node.name() if node else ""
    return name.removesuffix("Backward0") if name.startswith("ScaledDotProduct") else "math"


def _kernels(q: Tensor, groups: Groups) -> ModuleType | None:
    """The kernels' launcher on a GPU where they have every variant at hand; else the PyTorch attention computes."""
    if q.is_cuda:
        from flashpoint.attention import launch  # a CPU need not wait for Triton

        if all(launch.kernels_support(q, variant) for variant, _ in groups):
            return launch
    return None


def _groups(q: Tensor, variant: str, layer: int) -> Groups:
    return variant_from_key(variant).groups(layer, q.shape[1])


def _saved_like(q: Tensor, groups: Groups) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of the forward pass: O, L, and the O of δ and centred keys or nothing."""
    variants = [variant for variant, _ in groups]
    out = by_token(q, torch.float32 if any(variant.returns_fp32 for variant in variants) else q.dtype)
    saves_another = any(variant.saves_out_for_delta for variant in variants)
    return (
        out,
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        by_token(q, torch.float32) if saves_another else q.new_empty(0, dtype=torch.float32),
        by_token(q, q.dtype) if any(variant.center_keys for variant in variants) else q.new_empty(0),
    )


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> tuple[Tensor, Tensor]:
    """What decides the rounding of each row, from a forward pass of its own; arguments of :func:`attention`.

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    groups = variant.groups(layer, q.shape[1])
    if kernels := _kernels(q, groups):
        statistics: tuple[Tensor, Tensor] = kernels.row_statistics(q, k, v, groups, seed_and_step, layer)
        return statistics
    shift = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ones = torch.empty_like(shift, dtype=torch.int32)
    for choices, heads in groups:
        noise, chosen = _noise_key(q, seed_and_step, layer, heads), _index(heads, q)
        shift[:, chosen], ones[:, chosen] = reference.row_statistics(
            q[:, chosen], k[:, chosen], v[:, chosen], choices, noise
        )
    return shift, ones


def whole_scores(q: Tensor, k: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor) -> Tensor:
    """S [B, H, T, T] float32 as rounded, −∞ above the diagonal: T² of memory, for looking at a few sequences."""
    scores = q.new_empty((*q.shape[:-1], q.shape[-2]), dtype=torch.float32)
    for choices, heads in variant.groups(layer, q.shape[1]):
        noise, chosen = _noise_key(q, seed_and_step, layer, heads), _index(heads, q)
        scores[:, chosen] = reference.whole_scores(q[:, chosen], k[:, chosen], choices, noise)
    return scores


def delta_error(
    grad_out: Tensor, out: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> Tensor:
    """The error [B, H, T] float32 that the variant injects into the δ of dQ; dO and O are [B, H, T, d]."""
    error = grad_out.new_zeros(grad_out.shape[:-1], dtype=torch.float32)
    for choices, heads in variant.groups(layer, grad_out.shape[1]):
        if choices.delta_error.into != "grad_k":
            noise, chosen = _noise_key(grad_out, seed_and_step, layer, heads), _index(heads, grad_out)
            error[:, chosen] = reference.delta_error(grad_out[:, chosen], out[:, chosen], choices.delta_error, noise)
    return error


@torch.library.custom_op("flashpoint::flash_forward", mutates_args=())
def flash_forward_op(
    q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, variant: str, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, L, the O of δ and centred keys (:mod:`flashpoint.attention.reference`) of all heads; takes a variant's key."""
    groups = _groups(q, variant, layer)
    with torch.autocast(q.device.type, enabled=False):
        if kernels := _kernels(q, groups):
            results: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.flash_forward(
                q, k, v, groups, seed_and_step, layer
            )
            return results
        saved = _saved_like(q, groups)
        for choices, heads in groups:
            noise, chosen = _noise_key(q, seed_and_step, layer, heads), _index(heads, q)
            of_heads = reference.flash_forward(q[:, chosen], k[:, chosen], v[:, chosen], choices, noise)
            for whole, part in zip(saved, of_heads, strict=True):
                if part.numel():
                    whole[:, chosen] = part.to(whole.dtype)
        return saved


@torch.library.custom_op("flashpoint::flash_backward", mutates_args=())
def flash_backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    seed_and_step: Tensor,
    variant: str,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of :func:`flash_forward_op`."""
    groups = _groups(q, variant, layer)
    with torch.autocast(q.device.type, enabled=False):
        if kernels := _kernels(q, groups):
            results: tuple[Tensor, Tensor, Tensor] = kernels.flash_backward(
                grad_out, q, k, v, out, logsumexp, out_for_delta, centered, groups, seed_and_step, layer
            )
            return results
        grads = by_token(q, q.dtype), by_token(k, k.dtype), by_token(v, v.dtype)
        for choices, heads in groups:
            noise, chosen = _noise_key(q, seed_and_step, layer, heads), _index(heads, q)
            tensors = (grad_out, q, k, v, out, logsumexp, out_for_delta, centered)
            g, q_, k_, v_, o, lse, o_delta, keys = (x[:, chosen] if x.numel() else x for x in tensors)
            parts = reference.flash_backward(g, q_, k_, v_, o, lse, o_delta, keys, choices, noise)
            for whole, part in zip(grads, parts, strict=True):
                whole[:, chosen] = part
        return grads


def _noise_key(q: Tensor, seed_and_step: Tensor, layer: int, heads: tuple[int, ...]) -> NoiseKey:
    return NoiseKey(seed_and_step, layer, _on_device(heads, q.device), q.shape[1], q.shape[0])


def _index(heads: tuple[int, ...], q: Tensor) -> slice | Tensor:
    """All heads as a view, some as a copy."""
    return slice(None) if len(heads) == q.shape[1] else _on_device(heads, q.device)


@lru_cache(maxsize=256)
def _on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """[heads] int64; copied once, since a CUDA graph cannot record a copy from the host."""
    return torch.tensor(heads, device=device)


@flash_forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, variant: str, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _saved_like(q, _groups(q, variant, layer))


@flash_backward_op.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(q, q.dtype), by_token(k, k.dtype), by_token(v, v.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, seed_and_step, *ctx.choice = inputs
    ctx.save_for_backward(q, k, v, *output, seed_and_step)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return (*flash_backward_op(grad_out, *ctx.saved_tensors, *ctx.choice), None, None, None)


flash_forward_op.register_autograd(_backward, setup_context=_setup_context)
