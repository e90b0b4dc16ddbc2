"""Launches the Triton kernels for a variant: the same calls as :mod:`flashpoint.attention.reference`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from flashpoint.attention.rounding import NoiseKey
from flashpoint.attention.variant import AttentionVariant
from flashpoint.kernels import backward, forward, table

_ROUNDING = {"none": 0, "nearest": 1, "stochastic": 2}
_SHIFT = {"rowmax": 0, "offset": 1, "dynamic_max": 2}
_NO_GUARD = 3.0e38


def kernels_support(q: Tensor, variant: AttentionVariant) -> bool:
    """Whether the kernels compute ``variant`` on tensors like ``q`` [B, H, T, d]; the reference does all others.

    They take BF16, d ∈ {16, 32, 64, 128}, key blocks of whole tiles, and no normalisation before the product.
    """
    size = q.shape[-1]
    if q.dtype != torch.bfloat16 or size not in table.FORWARD or variant.normalizer == "before_product":
        return False
    block = variant.block_k
    return block is None or (block >= 16 and triton.next_power_of_2(block) == block)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, noise: NoiseKey
) -> tuple[Tensor, Tensor, Tensor]:
    """O, L and O of the unrounded Ō, as :func:`flashpoint.attention.reference.flash_forward` documents them."""
    B, H, T, d = q.shape
    q, k, v = (_rows_contiguous(x) for x in (q, _keys(k, variant), v))
    out = q.new_empty((B, H, T, d), dtype=torch.float32 if variant.out == "none" else q.dtype)
    wants_fp32 = variant.delta == "out_fp32"
    out_fp32 = q.new_empty((B, H, T, d) if wants_fp32 else (0,), dtype=torch.float32)
    logsumexp = q.new_empty((B, H, T), dtype=torch.float32)
    tiles = table.FORWARD[d]
    block = variant.block_k or triton.next_power_of_2(T)
    bk = max(16, min(tiles.bk, block))
    forward.flash_fwd_kernel[(triton.cdiv(T, tiles.bq), B * H)](
        q, k, v, out, out_fp32, logsumexp, noise.seed_and_step, noise.heads,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        H, noise.n_head, T, noise.layer, d**-0.5, variant.beta, variant.tie_tolerance,
        _NO_GUARD if variant.max_shift is None else variant.max_shift, variant.shift_offset,
        D=d, BQ=tiles.bq, BK=bk, TILES=max(1, block // bk),
        SCORES=_ROUNDING[variant.scores], PROBS=_ROUNDING[variant.probs],
        OUT_UNNORMALIZED=_ROUNDING[variant.out_unnormalized],
        PER_BLOCK=variant.out_unnormalized_when == "per_block",
        OUT=_ROUNDING[variant.out], SHIFT=_SHIFT[variant.shift],
        ROUNDED_NORMALIZER=variant.normalizer == "rounded", FUSED=variant.fused_exponent,
        STORE_FP32=wants_fp32, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, logsumexp, out_fp32


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_fp32: Tensor,
    variant: AttentionVariant,
    noise: NoiseKey,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, as :func:`flashpoint.attention.reference.flash_backward` documents them."""
    B, H, T, d = q.shape
    # An FP32 O hands back a gradient that autocast made from BF16: nothing is lost here.
    grad_out = _rows_contiguous(grad_out.to(q.dtype))
    q, k, v = (_rows_contiguous(x) for x in (q, _keys(k, variant), v))
    delta = torch.empty_like(logsumexp)
    grad_q, grad_v = q.new_empty((B, H, T, d)), v.new_empty((B, H, T, d))
    # A centred K needs its gradient centred too, before it is rounded.
    grad_k = k.new_empty((B, H, T, d), dtype=torch.float32 if variant.center_keys else k.dtype)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3])
    sizes = (H, noise.n_head, T, noise.layer, d**-0.5)
    points = {"SCORES": _ROUNDING[variant.scores], "GRAD_SCORES": _ROUNDING[variant.grad_scores]}
    tiles = table.GRAD_Q[d]
    backward.flash_bwd_dq_kernel[(triton.cdiv(T, tiles.bq), B * H)](
        q, k, v, out_fp32 if variant.delta == "out_fp32" else out, grad_out, logsumexp, delta, grad_q,
        noise.seed_and_step, noise.heads, *strides, *sizes, D=d, BQ=tiles.bq, BK=tiles.bk, **points,
        DELTA=int(variant.delta == "p_dp"), EXACT_ROW_SUM=variant.exact_row_sum, FUSED=variant.fused_exponent,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    tiles = table.GRAD_KV[d]
    backward.flash_bwd_dkdv_kernel[(triton.cdiv(T, tiles.bk), B * H)](
        q, k, v, grad_out, logsumexp, delta, grad_k, grad_v,
        noise.seed_and_step, noise.heads, *strides, *sizes, D=d, BQ=tiles.bq, BK=tiles.bk, **points,
        PROBS=_ROUNDING[variant.probs], FUSED=variant.fused_exponent,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if variant.center_keys:
        grad_k = (grad_k - grad_k.mean(-2, keepdim=True)).to(k.dtype)
    return grad_q, grad_k, grad_v


def _keys(k: Tensor, variant: AttentionVariant) -> Tensor:
    return (k.float() - k.float().mean(-2, keepdim=True)).to(k.dtype) if variant.center_keys else k


def _rows_contiguous(x: Tensor) -> Tensor:
    """The kernels take any strides but the last, which is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
