"""Attention in PyTorch with every choice of a variant: the oracle of the kernels, and a CPU's engine.

Dimensions: B sequences, H heads, T tokens, d features per head, R query rows and C keys of a block.
All arithmetic is FP32; a rounding point rounds to its format and stays in FP32. Only blocks [B, H, R, C]
are materialised, never [T, T]: R·C ≤ 128·T, or one block of queries by one of keys where ``grad_blocks`` rounds.

Equations: Dao, FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2; the shift of Qiu & Yao
(arXiv 2510.04212), Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.numerics.deltas import SavedForBackward, deltas_of, dtype_of_saved, residual
from flashpoint.numerics.key_blocks import Inputs, KeyBlock, exponential
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.codes import Stream


def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    noise: NoiseKey,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute self-attention.

    Args:
        q, k, v: [B, H, T, d] bfloat16 or float32.
        variant: every numerical choice.
        noise: source of random bits for stochastic rounding.
        causal: whether a query sees no later key; otherwise it sees all.
        scale: α; None is 1/√d.

    Returns:
        out: O [B, H, T, d], in the inputs' dtype, or float32 where O does not fit BF16.
        logsumexp: L [B, H, T] float32, of the centred scores where the variant centres keys.
        out_for_delta: the O that δ is of, where it is not the one returned; [B, H, T, d] float32, or empty. It has the
            same P̄, with Ō and O unrounded, or rounded with other random bits. With ``out_residual_bits`` what the one
            returned lacks of it, in units of :class:`~flashpoint.numerics.choices.ResidualFormat`, int8 or int16.
        centered: K − mean_T(K) in K's shape and dtype; empty unless the variant centres keys.
    """
    centered = k.new_empty(0)
    if variant.center_keys:
        k = centered = centered_keys(k)
    inputs = Inputs.of(q, k, v, variant, noise, causal, scale)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    saved = q.shape if variant.saved_out != "none" else 0
    out_for_delta = torch.empty(saved, dtype=dtype_of_saved([variant]), device=q.device)
    logsumexp = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for rows in inputs.row_chunks():
        result = _flash_fwd_rows(inputs, rows)
        out[..., rows, :], logsumexp[..., rows] = result.out, result.logsumexp
        if variant.out_residual:
            out_for_delta[..., rows, :] = residual(result.out_for_delta, result.out, variant.out_residual)
        elif variant.saved_out != "none":
            out_for_delta[..., rows, :] = result.out_for_delta
    return out.to(torch.float32 if variant.returns_fp32 else q.dtype), logsumexp, out_for_delta, centered


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, noise: NoiseKey
) -> tuple[Tensor, Tensor]:
    """Compute what decides the rounding of a row, in an extra forward pass; arguments as for :func:`flash_fwd`.

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    if variant.center_keys:
        k = centered_keys(k)
    inputs = Inputs.of(q, k, v, variant, noise)
    results = [_flash_fwd_rows(inputs, rows, counts_ones=True) for rows in inputs.row_chunks()]
    return torch.cat([result.shift for result in results], -1), torch.cat([result.ones for result in results], -1)


def whole_scores(q: Tensor, k: Tensor, variant: AttentionVariant, noise: NoiseKey) -> Tensor:
    """Return S [B, H, T, T] float32 as the forward pass rounds it, −∞ above the diagonal; for looking at, not for
    training."""
    inputs = Inputs.of(q, centered_keys(k) if variant.center_keys else k, k, variant, noise)
    every = slice(0, q.shape[-2])
    return inputs.scores(KeyBlock(every, every, 0))


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
    noise: NoiseKey,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`flash_fwd`.

    Args:
        grad_out: dO [B, H, T, d], any float dtype.
        q, k, v, variant, noise, causal, scale: as given to the forward pass.
        out, logsumexp, out_for_delta, centered: as returned by it.

    Returns:
        dQ, dK, dV: [B, H, T, d] in the inputs' dtype.
    """
    inputs = Inputs.of(q, centered if variant.center_keys else k, v, variant, noise, causal, scale)
    keys_of_grad_q = centered_keys(k).float() if variant.center_grad_q else inputs.k
    grad_out = grad_out.float()
    deltas = deltas_of(SavedForBackward(inputs, grad_out, out, logsumexp, out_for_delta))
    grad_q, grad_k, grad_v, attended_keys = (inputs.q.new_zeros(q.shape) for _ in range(4))
    for rows in inputs.row_blocks() if variant.grad_blocks.mode != "none" else inputs.row_chunks():
        of_rows = rows.start // variant.block_k if variant.block_k else 0
        for block in inputs.key_blocks(rows):
            p, p_fp32 = inputs.probs(block, logsumexp)
            grad_out_rows = grad_out[..., block.rows, :]
            of_keys = KeyBlock(block.keys, block.keys, of_rows)
            grad_v[..., block.keys, :] += inputs.round(
                "grad_blocks", p.mT @ grad_out_rows, of_keys, features=True, stream=Stream.GRAD_V_BLOCKS
            )
            grad_p = inputs.grad_probs(block, grad_out)
            grad_s = inputs.round("grad_scores", p_fp32 * (grad_p - deltas.of_q[..., block.rows, None]), block)
            grad_q[..., block.rows, :] += inputs.round(
                "grad_blocks", grad_s @ keys_of_grad_q[..., block.keys, :], block, features=True
            )
            if deltas.left_of_q is not None:
                attended_keys[..., block.rows, :] += p @ keys_of_grad_q[..., block.keys, :]
            if deltas.of_k is not deltas.of_q:
                grad_s = inputs.round("grad_scores", p_fp32 * (grad_p - deltas.of_k[..., block.rows, None]), block)
            grad_k[..., block.keys, :] += inputs.round(
                "grad_blocks",
                grad_s.mT @ inputs.q[..., block.rows, :],
                of_keys,
                features=True,
                stream=Stream.GRAD_K_BLOCKS,
            )
    if deltas.left_of_q is not None:
        grad_q -= deltas.left_of_q[..., None] * attended_keys
    grad_q, grad_k = grad_q * inputs.scale, grad_k * inputs.scale
    if variant.center_keys:
        grad_k = grad_k - grad_k.mean(-2, keepdim=True)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def block_shift(scores: Tensor, variant: AttentionVariant) -> Tensor:
    """Return the m that one block of keys asks for; the running m is the largest so far.

    Args:
        scores: [..., C] float32 as rounded, −inf where masked.

    Returns:
        [...] float32; −inf for a row that is masked whole.
    """
    row_max = scores.amax(-1)
    if variant.shift == "rowmax":
        return row_max
    if variant.shift == "offset":
        return row_max + variant.shift_offset
    maxima = (scores >= row_max.unsqueeze(-1) - variant.tie_tolerance).sum(-1)
    tied = (maxima > 1) & row_max.isfinite()
    shift = torch.where(tied & (row_max > 0), variant.beta * row_max, row_max)
    shift = torch.where(tied & (row_max < 0), variant.gamma * row_max if variant.gamma else 0.0, shift)
    return shift if variant.max_shift is None else torch.minimum(shift, row_max + variant.max_shift)


@dataclass(frozen=True)
class _RowResults:
    """One chunk of rows of the forward pass."""

    out: Tensor  # O [B, H, R, d]
    out_for_delta: Tensor  # of the unrounded Ō, or of other random bits
    logsumexp: Tensor  # L [B, H, R]
    shift: Tensor  # m
    ones: Tensor  # P̄ equal to 1 as operands under the final m, int32; 0 where they are not counted


def _flash_fwd_rows(inputs: Inputs, rows: slice, *, counts_ones: bool = False) -> _RowResults:
    variant = inputs.variant
    q = inputs.q[..., rows, :]
    shift = q.new_full(q.shape[:-1], -math.inf)  # m
    normalizer = torch.zeros_like(shift)  # ℓ
    ones = torch.zeros_like(shift, dtype=torch.int32)
    exact = torch.zeros_like(q)  # Ō, unrounded
    draws: dict[Stream, Stream] = {Stream.OUT_UNNORMALIZED: Stream.OUT}  # random bits of Ō and of O
    if variant.saved_out == "redrawn":
        draws[Stream.OUT_UNNORMALIZED_FOR_DELTA] = Stream.OUT_FOR_DELTA
    rounded = {stream: torch.zeros_like(q) for stream in draws}  # Ō
    when = variant.out_unnormalized_when
    before_product = variant.normalizer == "before_product"
    block = KeyBlock(rows, rows, 0)
    for block in inputs.key_blocks(rows):
        live = slice(block.rows.start - rows.start, None)
        s = inputs.scores(block)
        old_shift, shift[..., live] = (
            shift[..., live].clone(),
            torch.maximum(shift[..., live], block_shift(s, variant)),
        )
        p_fp32 = exponential(s, shift[..., live, None])
        mass = p_fp32.sum(-1)
        p = inputs.round("probs", p_fp32 / mass[..., None] if before_product else p_fp32, block)
        if counts_ones:  # a training does not ask
            under_this_shift = torch.where(shift[..., live] > old_shift, 0, ones[..., live])
            ones[..., live] = under_this_shift + (p == 1).sum(-1, dtype=torch.int32)
        if variant.normalizer == "rounded":
            mass = p.sum(-1)
        rescale = exponential(old_shift[..., None], shift[..., live, None])
        normalizer[..., live] = normalizer[..., live] * rescale[..., 0] + mass.clamp(min=variant.denominator_floor)
        product = p @ inputs.v[..., block.keys, :]
        exact[..., live, :] = exact[..., live, :] * rescale + product
        if when != "final":
            for stream, total in rounded.items():
                rescaled = total[..., live, :] * rescale
                added = product if when == "per_product" else rescaled + product
                added = inputs.round("out_unnormalized", added, block, features=True, stream=stream)
                total[..., live, :] = rescaled + added if when == "per_product" else added
    if variant.masked_blocks == "count" and inputs.causal:
        rescale = _count_masked_blocks(inputs, rows, shift, normalizer, ones)
        for total in (exact, *rounded.values()):
            total.mul_(rescale)
    last = KeyBlock(rows, block.keys, 0)
    if when == "final":
        for stream in draws:
            rounded[stream] = inputs.round("out_unnormalized", exact, last, features=True, stream=stream)
    denominator = inputs.round("denominator", normalizer[..., None], last, features=True)
    logsumexp = shift + denominator[..., 0].log()
    unrounded, divisor = normalizer[..., None], denominator
    if variant.out_divisor == "unrounded_in_first_block":
        in_first = torch.arange(rows.start, rows.stop, device=q.device)[:, None] < (variant.block_k or q.shape[-2])
        divisor = torch.where(in_first, unrounded, denominator)
    if before_product:  # P̄ has been divided
        unrounded = divisor = torch.ones_like(denominator)
    outs = [
        inputs.round("out", rounded[of_sum] / divisor, last, features=True, stream=of_out)
        for of_sum, of_out in draws.items()
    ]
    return _RowResults(outs[0], outs[1] if len(outs) > 1 else exact / unrounded, logsumexp, shift, ones)


def _count_masked_blocks(inputs: Inputs, rows: slice, shift: Tensor, normalizer: Tensor, ones: Tensor) -> Tensor:
    """Count the blocks of keys after each query into m, ℓ and the P̄ that are 1, in place.

    Returns:
        The factor [B, H, R, 1] float32 by which Ō shrinks.
    """
    variant, length = inputs.variant, inputs.q.shape[-2]
    block = variant.block_k or length
    first_masked = torch.arange(rows.start, rows.stop, device=shift.device) // block + 1
    factor = torch.ones_like(shift)
    for number in range(-(-length // block)):
        masked = first_masked <= number
        new_shift = shift.clamp(min=0) if variant.shift == "dynamic_max" else shift
        rescale = torch.where(masked, exponential(shift, new_shift), 1.0)
        ones.masked_fill_(masked & (new_shift > shift), 0)
        shift.copy_(torch.where(masked, new_shift, shift))
        normalizer.mul_(rescale).add_(torch.where(masked, variant.denominator_floor, 0.0))
        factor *= rescale
    return factor[..., None]


def centered_keys(k: Tensor) -> Tensor:
    """Return K − mean_T(K) of K [B, H, T, d], in its dtype."""
    return (k.float() - k.float().mean(-2, keepdim=True)).to(k.dtype)
