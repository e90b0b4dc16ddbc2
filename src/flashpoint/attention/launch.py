"""Launches the Triton kernels: the same numerics as :mod:`flashpoint.attention.reference`, all heads in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashpoint.attention.layout import by_token
from flashpoint.attention.variant import AttentionVariant, Groups
from flashpoint.kernels import backward, forward, table
from flashpoint.kernels.choices import Choices
from flashpoint.kernels.rounding import INTERPRETED
from flashpoint.kernels.table import Tiles

_ROUNDING = {"none": 0, "nearest": 1, "stochastic": 2}
_SHIFT = {"rowmax": 0, "offset": 1, "dynamic_max": 2}
_NORMALIZER = {"unrounded": 0, "rounded": 1, "before_product": 2}
_DELTA = {"out": 0, "out_fp32": 1, "p_dp": 2, "out_independent": 3}
_DELTA_ERROR = {"none": 0, "bias": 1, "noise": 2}
_INTO = {"both": 0, "grad_q": 1, "grad_k": 2}
_NO_GUARD = 3.0e38
_CHUNK_ELEMENTS = 16_384
"""Elements of K that the centring pass reads at a time."""


def kernels_support(q: Tensor, variant: AttentionVariant) -> bool:
    """Whether the kernels compute ``variant`` on tensors like ``q`` [B, H, T, d]; the reference does all others.

    They take BF16, d ∈ {16, 32, 64, 128} and key blocks of whole tiles.
    """
    size = q.shape[-1]
    if q.dtype != torch.bfloat16 or size not in table.FORWARD:
        return False
    block = variant.block_k
    return block is None or (block >= 16 and triton.next_power_of_2(block) == block)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, groups: Groups, seed_and_step: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of all heads.

    Args:
        q, k, v: [B, H, T, d] bfloat16, read in place where rows are contiguous and strides are multiples of 16 bytes.
        groups: one variant for all heads, or two with the heads (from 0) of each.
        seed_and_step: [2] int64, key of stochastic rounding.
        layer: from 1.

    Returns:
        O, L, the O of δ and the centred keys as :func:`flashpoint.attention.reference.flash_forward` has them, the
        last two empty where no variant asks; O lies in memory as [B, T, H, d].
    """
    nothing = q.new_empty(0, dtype=torch.int32)
    return _forward(q, k, v, groups, seed_and_step, layer, nothing, nothing)


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, groups: Groups, seed_and_step: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """What decides the rounding of a row, from a forward pass of its own (:func:`flash_forward`).

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    shift = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ones = torch.empty_like(shift, dtype=torch.int32)
    _forward(q, k, v, groups, seed_and_step, layer, shift, ones)
    return shift, ones


def _forward(
    q: Tensor, k: Tensor, v: Tensor, groups: Groups, seed_and_step: Tensor, layer: int, shift: Tensor, ones: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H, T, d = q.shape
    variants = [variant for variant, _ in groups]
    out = by_token(q, torch.float32 if any(variant.returns_fp32 for variant in variants) else q.dtype)
    saves_another = any(variant.saves_out_for_delta for variant in variants)
    out_for_delta = by_token(q, torch.float32) if saves_another else q.new_empty(0, dtype=torch.float32)
    logsumexp = q.new_empty((B, H, T), dtype=torch.float32)
    tiles = table.FORWARD[d]
    blocks = [variant.block_k or triton.next_power_of_2(T) for variant in variants]
    bk = max(16, min(tiles.bk, *blocks))
    selected = _selected(groups, H, q.device)
    chosen = _chosen(groups, layer, d, [max(1, block // bk) for block in blocks])
    centered = q.new_empty(0)
    if any(variant.center_keys for variant in variants):
        k = centered = _center_keys(k, selected, *[variant.center_keys for variant in variants])
    forward.flash_fwd_kernel[(triton.cdiv(T, tiles.bq) * B * H,)](
        _tiles(q, tiles.bq), _tiles(k, bk), _tiles(v, bk), out, out_for_delta, logsumexp, shift, ones, seed_and_step,
        selected, B, H, T, layer, _group(T, d),
        D=d, BQ=tiles.bq, BK=bk, **chosen, PAIRS=_computes_on_pairs(q.device), STATISTICS=ones.numel() > 0,
        **_options(tiles),
    )  # fmt: skip
    return out, logsumexp, out_for_delta, centered


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    groups: Groups,
    seed_and_step: Tensor,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of :func:`flash_forward` from what it took and returned; each lies in memory as [B, T, H, d]."""
    B, H, T, d = q.shape
    k = centered if centered.numel() else k
    # An FP32 O hands back a gradient that autocast made from BF16: nothing is lost here.
    grad_out = grad_out.to(q.dtype)
    grad_q, rows, drift = row_pass(grad_out, q, k, v, out, logsumexp, out_for_delta, groups, seed_and_step, layer)
    grad_k, grad_v = by_token(k, k.dtype), by_token(v, v.dtype)
    tiles = table.GRAD_KV[d]
    backward.flash_bwd_dkdv_kernel[(triton.cdiv(T, tiles.bk) * B * H,)](
        _tiles(q, tiles.bq), _tiles(k, tiles.bk), _tiles(v, tiles.bk), _tiles(grad_out, tiles.bq), rows, drift,
        grad_k, grad_v, seed_and_step, _selected(groups, H, q.device), B, H, T, rows.shape[-1], rows[0].numel(),
        triton.cdiv(T, table.GRAD_Q[d].bq), layer, _group(T, d),
        D=d, BQ=tiles.bq, BK=tiles.bk, **_chosen(groups, layer, d), **_options(tiles),
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _center_keys(k: Tensor, selected: Tensor, centers: bool, elsewhere: bool | None = None) -> Tensor:
    """K − mean_T(K) of all heads, or of the selected or the other ones and the others' K: a pass of its own over K."""
    B, H, T, d = k.shape
    k = _readable(k)
    centered = by_token(k, k.dtype)
    forward.center_keys_kernel[(B * H,)](
        k, centered, selected, *k.stride()[:3], H, T,
        D=d, BT=_CHUNK_ELEMENTS // d, CENTERS=centers, ELSEWHERE=elsewhere, enable_fp_fusion=False,
    )  # fmt: skip
    return centered


def row_pass(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    groups: Groups,
    seed_and_step: Tensor,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of :func:`flash_backward`; ``k`` centred where a variant centres keys.

    Returns:
        grad_q: dQ [B, H, T, d].
        rows: L and the δ of dK, [2, B·H, T'] float32, with T' the next multiple of a block of queries.
        drift: Σᵢ (Σⱼ dSᵢⱼ) qᵢ over each block of queries, [B·H, blocks, d] float32, α left out; empty unless K is
            centred.
    """
    B, H, T, d = q.shape
    tiles = table.GRAD_Q[d]
    blocks = triton.cdiv(T, tiles.bq)
    grad_q = by_token(q, q.dtype)
    rows = q.new_empty((2, B * H, blocks * tiles.bq), dtype=torch.float32)
    centers = any(variant.center_keys for variant, _ in groups)
    drift = q.new_empty((B * H, blocks, d) if centers else (0,), dtype=torch.float32)
    selected = _selected(groups, H, q.device)
    centers_grad_q = any(variant.center_grad_q for variant, _ in groups)
    centered = _center_keys(k, selected, True) if centers_grad_q else k
    backward.flash_bwd_dq_kernel[(blocks * B * H,)](
        _tiles(q, tiles.bq), _tiles(k, tiles.bk), _tiles(centered, tiles.bk), _tiles(v, tiles.bk),
        _tiles(grad_out, tiles.bq), out, out_for_delta, logsumexp, rows, drift, grad_q, seed_and_step, selected,
        B, H, T, rows.shape[-1], rows[0].numel(), layer, _group(T, d),
        D=d, BQ=tiles.bq, BK=tiles.bk, **_chosen(groups, layer, d), **_options(tiles),
    )  # fmt: skip
    return grad_q, rows, drift


def _chosen(groups: Groups, layer: int, size: int, tiles: Sequence[int] = (1, 1)) -> dict[str, Any]:
    """The compile-time choices of a launch; ``tiles`` in a block of keys, of each variant."""
    choices = [_choices(variant, layer, size, count) for (variant, _), count in zip(groups, tiles, strict=False)]
    return {"C": choices[0], "ELSEWHERE": choices[1] if len(choices) > 1 else None}


@lru_cache(maxsize=256)
def _choices(variant: AttentionVariant, layer: int, size: int, tiles: int) -> Choices:
    scale = size**-0.5
    exact = math.frexp(scale)[0] == 0.5  # a power of two scales without rounding
    unit = scale if exact else 1.0
    error_size = variant.delta_error.size_in(layer)
    return Choices(
        scores=_ROUNDING[variant.scores],
        scores_bits=variant.scores_bits,
        probs=_ROUNDING[variant.probs],
        probs_bits=variant.probs_bits,
        out_unnormalized=_ROUNDING[variant.out_unnormalized],
        out_unnormalized_bits=variant.out_unnormalized_bits,
        per_block=variant.out_unnormalized_when == "per_block",
        out=_ROUNDING[variant.out],
        out_bits=variant.out_bits,
        grad_scores=_ROUNDING[variant.grad_scores],
        grad_scores_bits=variant.grad_scores_bits,
        shift=_SHIFT[variant.shift],
        shift_offset=variant.shift_offset / unit,
        beta=variant.beta,
        tie_tolerance=variant.tie_tolerance / unit,
        max_shift=_NO_GUARD if variant.max_shift is None else variant.max_shift / unit,
        normalizer=_NORMALIZER[variant.normalizer],
        delta=_DELTA[variant.delta],
        delta_error=_DELTA_ERROR[variant.delta_error.kind if error_size else "none"],
        delta_error_size=error_size,
        delta_error_into=_INTO[variant.delta_error.into] if error_size else 0,
        exact_row_sum=variant.exact_row_sum,
        center_keys=variant.center_keys,
        center_grad_q=variant.center_grad_q,
        fused_exponent=variant.fused_exponent,
        tiles=tiles,
        prescale=1.0 if exact else scale,
        unit=unit,
    )


def _tiles(x: Tensor, tokens: int) -> TensorDescriptor:
    """Tiles of ``tokens`` rows of one head, for the GPU's copy engine."""
    x = _readable(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, x.shape[-1]])


def _readable(x: Tensor) -> Tensor:
    """``x`` itself where the copy engine takes it: rows contiguous, strides and address multiples of 16 bytes."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in strides):
        return x if len(strides) == x.dim() - 1 else x.as_strided(x.shape, _without_odd_strides(x))
    return x.contiguous()


def _without_odd_strides(x: Tensor) -> list[int]:
    """The strides of ``x``, those of dimensions of size 1, which mean nothing, replaced."""
    largest = max((size * stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1), default=8)
    rounded = -(-largest // 8) * 8
    return [rounded if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _options(tiles: Tiles) -> dict[str, Any]:
    """Contraction of a product and a sum is written out where it is meant, never left to the compiler."""
    return {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
        "enable_fp_fusion": False,
    }


def _group(length: int, size: int) -> int:
    return max(1, table.GROUP_BYTES // (4 * length * size))


@lru_cache(maxsize=256)
def _selection(heads: tuple[int, ...], n_head: int, device: torch.device) -> Tensor:
    """[H] int32; copied once, since a copy to a GPU waits for it."""
    return torch.tensor([int(head in heads) for head in range(n_head)], dtype=torch.int32, device=device)


def _selected(groups: Groups, n_head: int, device: torch.device) -> Tensor:
    return _selection(groups[0][1] if len(groups) > 1 else (), n_head, device)


@lru_cache(maxsize=8)
def _computes_on_pairs(device: torch.device) -> bool:
    """Whether arithmetic on two BF16 values in a word exists: from compute capability 9.0 on."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)
