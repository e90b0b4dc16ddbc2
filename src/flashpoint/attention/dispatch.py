"""Attention as one call with one variant, and the ``torch.library`` ops behind it.

The ops keep ``torch.compile`` from tracing into the reference, where its fusions would drop rounding points
(an FP32 → BF16 → FP32 cast pair counts as removable there).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.attention import reference
from flashpoint.attention.rounding import NoiseKey
from flashpoint.attention.variant import AttentionVariant, variant_from_key


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
        O [B, H, T, d]; the inputs' dtype, or float32 if a selected variant has ``out=none``.
    """
    n_head = q.shape[1]
    groups = variant.groups(layer, n_head)
    if len(groups) == 1:
        return _attention_of_heads(q, k, v, groups[0][0], layer, groups[0][1], n_head, seed_and_step)
    outs = [
        _attention_of_heads(
            q[:, list(heads)],
            k[:, list(heads)],
            v[:, list(heads)],
            choices,
            layer,
            heads,
            n_head,
            seed_and_step,
        )
        for choices, heads in groups
    ]
    dtype = torch.promote_types(outs[0].dtype, outs[1].dtype)
    order = [head for _, heads in groups for head in heads]
    return torch.cat([out.to(dtype) for out in outs], dim=1)[:, [order.index(head) for head in range(n_head)]]


def _attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    layer: int,
    heads: Sequence[int],
    n_head: int,
    seed_and_step: Tensor,
) -> Tensor:
    if variant.kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out, _, _ = flash_forward_op(q, k, v, seed_and_step, variant.key, layer, list(heads), n_head)
    return out


def _engine(q: Tensor, variant: AttentionVariant) -> ModuleType:
    """The kernels on a GPU where they have the variant, else the PyTorch attention."""
    if q.is_cuda:
        from flashpoint.attention import launch  # a CPU need not wait for Triton

        if launch.kernels_support(q, variant):
            return launch
    return reference


def _noise_key(q: Tensor, seed_and_step: Tensor, layer: int, heads: list[int], n_head: int) -> NoiseKey:
    return NoiseKey(seed_and_step, layer, _on_device(tuple(heads), q.device), n_head, q.shape[0])


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64; copied once, since a copy to a GPU waits for it."""
    return torch.tensor(numbers, device=device)


@torch.library.custom_op("flashpoint::flash_forward", mutates_args=())
def flash_forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed_and_step: Tensor,
    variant: str,
    layer: int,
    heads: list[int],
    n_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`flashpoint.attention.reference.flash_forward` as an op, on the kernels where they can; takes a key."""
    with torch.autocast(q.device.type, enabled=False):
        noise = _noise_key(q, seed_and_step, layer, heads, n_head)
        choices = variant_from_key(variant)
        return _engine(q, choices).flash_forward(q, k, v, choices, noise)


@torch.library.custom_op("flashpoint::flash_backward", mutates_args=())
def flash_backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_fp32: Tensor,
    seed_and_step: Tensor,
    variant: str,
    layer: int,
    heads: list[int],
    n_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`flashpoint.attention.reference.flash_backward` as an op."""
    with torch.autocast(q.device.type, enabled=False):
        noise = _noise_key(q, seed_and_step, layer, heads, n_head)
        choices = variant_from_key(variant)
        engine = _engine(q, choices)
        return engine.flash_backward(grad_out, q, k, v, out, logsumexp, out_fp32, choices, noise)


@flash_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed_and_step: Tensor,
    variant: str,
    layer: int,
    heads: list[int],
    n_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    choices = variant_from_key(variant)
    out = q.new_empty(q.shape, dtype=torch.float32 if choices.out == "none" else q.dtype)
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    wants_fp32 = choices.delta == "out_fp32"
    return out, logsumexp, q.new_empty(q.shape if wants_fp32 else (0,), dtype=torch.float32)


@flash_backward_op.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, seed_and_step, *ctx.choice = inputs
    ctx.save_for_backward(q, k, v, *output, seed_and_step)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grads = flash_backward_op(grad_out, *ctx.saved_tensors, *ctx.choice)
    return (*grads, None, None, None, None, None)


flash_forward_op.register_autograd(_backward, setup_context=_setup_context)
