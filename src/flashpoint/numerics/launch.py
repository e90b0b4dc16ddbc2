"""Launches the Triton kernels: the same numerics as :mod:`flashpoint.numerics.reference`, all heads in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashpoint.hardware import capability, chip_of
from flashpoint.numerics.compile_time import compile_time_choices, launch_options
from flashpoint.numerics.deltas import dtype_of_saved
from flashpoint.numerics.layout import by_token
from flashpoint.numerics.variant import AttentionVariant, Groups
from flashpoint_kernels.center_keys import center_keys_kernel
from flashpoint_kernels.flash_bwd_dkdv import flash_bwd_dkdv_kernel
from flashpoint_kernels.flash_bwd_dq import flash_bwd_dq_kernel
from flashpoint_kernels.flash_fwd import flash_fwd_kernel
from flashpoint_kernels.rounding import INTERPRETED
from flashpoint_kernels.tile_sizes import FALLBACK, GROUP_BYTES, Tiles, tiles_of

PAIRS_FROM = 90
"""Compute capability from which the kernels take arithmetic on two BF16 values in a word."""
_CHUNK_ELEMENTS = 16_384
"""Elements of K that the centring pass reads at a time."""


def kernels_support(q: Tensor, variant: AttentionVariant) -> bool:
    """Whether the kernels compute ``variant`` on tensors like ``q`` [B, H, T, d]; the reference does all others.

    They take BF16, d ∈ {16, 32, 64, 128} and key blocks of whole tiles; where ``grad_blocks`` rounds, of whole tiles of
    the backward pass, 64 keys. ``variant.elsewhere`` is not looked at.
    """
    if q.dtype != torch.bfloat16 or q.shape[-1] not in FALLBACK:
        return False
    block = variant.block_k
    smallest = 16 if variant.grad_blocks.mode == "none" else 64
    return block is None or (block >= smallest and triton.next_power_of_2(block) == block)


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
    """Compute the attention of all heads.

    Args:
        q, k, v: [B, H, T, d] bfloat16, read in place where rows are contiguous and strides are multiples of 16 bytes.
        variant: every numerical choice, and the layers and heads it holds for.
        layer: from 1.
        seed_and_step: [2] int64, key of stochastic rounding.
        causal: whether a query sees no later key; otherwise it sees all.
        scale: α; None is 1/√d.

    Returns:
        O, L, what δ takes beside O, and the centred keys, as :func:`flashpoint.numerics.reference.flash_fwd` has them.
        The last two are empty where no variant asks. O lies in memory as [B, T, H, d].
    """
    nothing = q.new_empty(0, dtype=torch.int32)
    return _flash_fwd(q, k, v, variant, layer, seed_and_step, nothing, nothing, causal, scale)


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, *, layer: int, seed_and_step: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute what decides the rounding of a row, in an extra forward pass (:func:`flash_fwd`).

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    shift = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ones = torch.empty_like(shift, dtype=torch.int32)
    _flash_fwd(q, k, v, variant, layer, seed_and_step, shift, ones)
    return shift, ones


def _flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, layer: int, seed_and_step: Tensor, shift: Tensor,
    ones: Tensor, causal: bool = True, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, H, T, d = q.shape
    groups = variant.groups(layer, H)
    variants = [chosen for chosen, _ in groups]
    out = by_token(q, torch.float32 if any(chosen.returns_fp32 for chosen in variants) else q.dtype)
    saves_another, saved = any(chosen.saved_out != "none" for chosen in variants), dtype_of_saved(variants)
    out_for_delta = by_token(q, saved) if saves_another else q.new_empty(0, dtype=saved)
    logsumexp = q.new_empty((B, H, T), dtype=torch.float32)
    sizes = _tiles(q).forward
    blocks = [chosen.block_k or triton.next_power_of_2(T) for chosen in variants]
    bk = max(16, min(sizes.bk, *blocks))
    selected = _selected(groups, H, q.device)
    choices = _choices(groups, layer, d, causal, scale, [max(1, block // bk) for block in blocks])
    centered = q.new_empty(0)
    if any(chosen.center_keys for chosen in variants):
        k = centered = _center_keys(k, selected, *[chosen.center_keys for chosen in variants])
    flash_fwd_kernel[(triton.cdiv(T, sizes.bq) * B * H,)](
        _descriptor(q, sizes.bq), _descriptor(k, bk), _descriptor(v, bk), out, out_for_delta, logsumexp, shift, ones,
        seed_and_step, selected, B, H, T, layer, _heads_side_by_side(T, d),
        D=d, BQ=sizes.bq, BK=bk, **choices, PAIRS=_computes_on_pairs(q), STATISTICS=ones.numel() > 0,
        **launch_options(sizes),
    )  # fmt: skip
    return out, logsumexp, out_for_delta, centered


def flash_bwd(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of :func:`flash_fwd` from what it took and returned; each lies in memory as [B, T, H, d]."""
    k = centered if centered.numel() else k
    # An FP32 O hands back a gradient that autocast made from BF16: nothing is lost here.
    grad_out = grad_out.to(q.dtype)
    context: dict[str, Any] = {"layer": layer, "seed_and_step": seed_and_step, "causal": causal, "scale": scale}
    grad_q, rows, drift = flash_bwd_dq(grad_out, q, k, v, out, logsumexp, out_for_delta, variant, **context)
    grad_k, grad_v = flash_bwd_dkdv(grad_out, q, k, v, rows, drift, variant, **context)
    return grad_q, grad_k, grad_v


def flash_bwd_dq(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first half of :func:`flash_bwd`: δ and dQ. ``k`` is centred if a variant centres keys.

    Returns:
        grad_q: dQ [B, H, T, d].
        rows: L and the δ of dK, [2, B·H, T'] float32, with T' the next multiple of a block of queries.
        drift: Σᵢ (Σⱼ dSᵢⱼ) qᵢ over each block of queries, [B·H, blocks, d] float32, α left out; empty unless K is
            centred.
    """
    B, H, T, d = q.shape
    groups, sizes = variant.groups(layer, H), _tiles(q).grad_q
    blocks = triton.cdiv(T, sizes.bq)
    grad_q = by_token(q, q.dtype)
    rows = q.new_empty((2, B * H, blocks * sizes.bq), dtype=torch.float32)
    variants = [chosen for chosen, _ in groups]
    centers = any(chosen.center_keys for chosen in variants)
    drift = q.new_empty((B * H, blocks, d) if centers else (0,), dtype=torch.float32)
    selected = _selected(groups, H, q.device)
    centers_grad_q = any(chosen.center_grad_q for chosen in variants)
    centered = _center_keys(k, selected, True) if centers_grad_q else k
    flash_bwd_dq_kernel[(blocks * B * H,)](
        _descriptor(q, sizes.bq), _descriptor(k, sizes.bk), _descriptor(centered, sizes.bk), _descriptor(v, sizes.bk),
        _descriptor(grad_out, sizes.bq), out, out_for_delta, logsumexp, rows, drift, grad_q, seed_and_step,
        _error_sizes(variants[0], layer, q.device), _error_sizes(variants[-1], layer, q.device), selected, B, H, T,
        rows.shape[-1], rows[0].numel(), layer, _heads_side_by_side(T, d),
        D=d, BQ=sizes.bq, BK=sizes.bk, **_choices(groups, layer, d, causal, scale),
        **launch_options(sizes, any(chosen.corrects_in_one_pass for chosen in variants)),
    )  # fmt: skip
    return grad_q, rows, drift


def flash_bwd_dkdv(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    drift: Tensor,
    variant: AttentionVariant,
    *,
    layer: int,
    seed_and_step: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the second half of :func:`flash_bwd`: dK and dV [B, H, T, d] from what :func:`flash_bwd_dq` returned."""
    B, H, T, d = q.shape
    groups, sizes = variant.groups(layer, H), _tiles(q).grad_kv
    grad_k, grad_v = by_token(k, k.dtype), by_token(v, v.dtype)
    flash_bwd_dkdv_kernel[(triton.cdiv(T, sizes.bk) * B * H,)](
        _descriptor(q, sizes.bq), _descriptor(k, sizes.bk), _descriptor(v, sizes.bk), _descriptor(grad_out, sizes.bq),
        rows, drift, grad_k, grad_v, seed_and_step, _selected(groups, H, q.device), B, H, T, rows.shape[-1],
        rows[0].numel(), triton.cdiv(T, _tiles(q).grad_q.bq), layer, _heads_side_by_side(T, d),
        D=d, BQ=sizes.bq, BK=sizes.bk, **_choices(groups, layer, d, causal, scale), **launch_options(sizes),
    )  # fmt: skip
    return grad_k, grad_v


def _center_keys(k: Tensor, selected: Tensor, centers: bool, elsewhere: bool | None = None) -> Tensor:
    """Compute K − mean_T(K) of the heads that centre keys, in a pass of its own; other heads keep K."""
    B, H, T, d = k.shape
    k = _readable(k)
    centered = by_token(k, k.dtype)
    center_keys_kernel[(B * H,)](
        k, centered, selected, *k.stride()[:3], H, T,
        D=d, BT=_CHUNK_ELEMENTS // d, CENTERS=centers, ELSEWHERE=elsewhere, enable_fp_fusion=False,
    )  # fmt: skip
    return centered


def _choices(
    groups: Groups,
    layer: int,
    head_size: int,
    causal: bool,
    scale: float | None,
    tiles_per_block: Sequence[int] = (1, 1),
) -> dict[str, Any]:
    """Return the compile-time choices of a launch: of all heads, or of the selected ones and of the others."""
    chosen = [
        compile_time_choices(variant, layer, head_size**-0.5 if scale is None else scale, causal, tiles)
        for (variant, _), tiles in zip(groups, tiles_per_block, strict=False)
    ]
    return {"C": chosen[0], "ELSEWHERE": chosen[1] if len(chosen) > 1 else None}


def _descriptor(x: Tensor, tokens: int) -> TensorDescriptor:
    """Return a descriptor with which the GPU's copy engine reads ``tokens`` rows of one head at a time."""
    x = _readable(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, x.shape[-1]])


def _readable(x: Tensor) -> Tensor:
    """Return ``x``, copied if its rows are not contiguous or strides and address no multiples of 16 bytes."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in strides):
        return x if len(strides) == x.dim() - 1 else x.as_strided(x.shape, _without_odd_strides(x))
    return x.contiguous()


def _without_odd_strides(x: Tensor) -> list[int]:
    """Return the strides of ``x`` with those of dimensions of size 1 replaced: these mean nothing."""
    largest = max((size * stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1), default=8)
    rounded = -(-largest // 8) * 8
    return [rounded if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _heads_side_by_side(length: int, head_size: int) -> int:
    """Return the heads whose K and V stay in L2 together."""
    return max(1, GROUP_BYTES // (4 * length * head_size))


@lru_cache(maxsize=256)
def _selection(heads: tuple[int, ...], n_head: int, device: torch.device) -> Tensor:
    """Return which heads are selected, [H] int32. It is copied once, because a copy to a GPU waits for the GPU."""
    return torch.tensor([int(head in heads) for head in range(n_head)], dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _error_sizes(variant: AttentionVariant, layer: int, device: torch.device) -> Tensor:
    """Return the sizes of the errors injected into δ, [sizes] float32. They are copied once, as the selection is."""
    return torch.tensor(variant.delta_error.sizes_in(layer), device=device)


def _selected(groups: Groups, n_head: int, device: torch.device) -> Tensor:
    return _selection(groups[0][1] if len(groups) > 1 else (), n_head, device)


def _tiles(q: Tensor) -> Tiles:
    return tiles_of(None if INTERPRETED else chip_of(q.device), q.shape[-1])


def _computes_on_pairs(q: Tensor) -> bool:
    return not INTERPRETED and capability(chip_of(q.device)) >= PAIRS_FROM
