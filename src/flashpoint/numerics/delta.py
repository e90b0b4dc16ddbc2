"""δ of the PyTorch attention, as every variant takes it. Dimensions as in :mod:`flashpoint.numerics.reference`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.numerics.choices import DeltaError
from flashpoint.numerics.key_blocks import Inputs
from flashpoint.numerics.residual import two_parts
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.codes import Stream


@dataclass(frozen=True)
class Deltas:
    """δ as a variant takes it, each [B, H, T] float32."""

    of_q: Tensor
    """Of the dS that makes dQ."""
    of_k: Tensor
    """Of dK; the same tensor where they do not differ."""
    left_of_q: Tensor | None = None
    """What dQ's δ is beyond ``of_q``, with exact row sums in one pass: PK takes it into dQ afterwards."""


def deltas_of(inputs: Inputs, grad_out: Tensor, out: Tensor, logsumexp: Tensor, out_for_delta: Tensor) -> Deltas:
    """Return δ from dO [B, H, T, d] float32 and what :func:`flash_fwd` returned."""
    variant = inputs.variant
    if variant.delta == "p_dp" or (variant.exact_row_sum and not variant.corrects_in_one_pass):
        delta, mass = row_sums(inputs, grad_out, logsumexp)
        delta = delta / mass if variant.exact_row_sum else delta
    else:
        delta = (grad_out * out_of_delta(variant, out, out_for_delta)).sum(-1)
    if not variant.corrects_in_one_pass:
        return Deltas(*_with_error(inputs, delta, grad_out, out))
    left, mass = row_sums(inputs, grad_out, logsumexp, delta)
    left_of_q, left_of_k = _with_error(inputs, left / mass, grad_out, out)
    return Deltas(delta, delta + left_of_k, left_of_q)


def out_of_delta(variant: AttentionVariant, out: Tensor, out_for_delta: Tensor) -> Tensor:
    """Return the O [B, H, T, d] float32 that δ is of, from what :func:`flash_fwd` returned."""
    if variant.out_residual:
        return two_parts(out, out_for_delta, variant.out_residual)
    return out_for_delta if variant.saves_out_for_delta else out.float()


def row_sums(inputs: Inputs, grad_out: Tensor, logsumexp: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return Σ_j P_ij(dP_ij − δ_i), without δ if there is none, and Σ_j P_ij, [B, H, T] each."""
    total, mass = torch.zeros_like(logsumexp), torch.zeros_like(logsumexp)
    for block in (block for rows in inputs.row_chunks() for block in inputs.key_blocks(rows)):
        _, p = inputs.probs(block, logsumexp)
        grad_p = inputs.grad_probs(block, grad_out)
        grad_s = p * (grad_p if delta is None else grad_p - delta[..., block.rows, None])
        total[..., block.rows] += grad_s.sum(-1)
        mass[..., block.rows] += p.sum(-1)
    return total, mass


def delta_error(grad_out: Tensor, out: Tensor, error: DeltaError, noise: NoiseKey) -> Tensor:
    """Return what is injected into δ: size·|dO|₂·|O|₂·z [B, H, T] float32, of dO and O [B, H, T, d]; see
    ``DeltaError``."""
    by_time = torch.tensor(error.sizes_in(noise.layer), device=out.device)
    number = (noise.seed_and_step[1] // error.interval).clamp(max=len(by_time) - 1)
    sizes = by_time[number] * grad_out.float().norm(dim=-1) * out.float().norm(dim=-1)
    if error.kind != "noise":
        return sizes
    rows = torch.arange(out.shape[-2], device=out.device)[:, None]
    negative = noise.words(Stream.DELTA_ERROR, rows, torch.zeros_like(rows)).squeeze(-1) >> 31 == 1
    return torch.where(negative, -sizes, sizes)


def _with_error(inputs: Inputs, delta: Tensor, grad_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return δ of dQ and of dK with the injected error in those that take it; one tensor where there is none."""
    error = inputs.variant.delta_error
    if error.kind == "none":
        return delta, delta
    erring = delta + delta_error(grad_out, out, error, inputs.noise)
    return erring if error.into != "grad_k" else delta, erring if error.into != "grad_q" else delta
