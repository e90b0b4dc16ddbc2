"""δ of the PyTorch attention, as every variant takes it, and what the forward pass saves for it beside O.

What O as returned lacks of the unrounded O is the residual. The two parts make an O of more mantissa bits for δ; the
residual takes a byte or two an element instead of four. Its format is
:class:`~flashpoint.numerics.choices.ResidualFormat`. Dimensions as in :mod:`flashpoint.numerics.reference`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.numerics.choices import DeltaError, ResidualFormat
from flashpoint.numerics.delta_rules import rule_of
from flashpoint.numerics.key_blocks import Inputs
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.codes import Stream

_DTYPES = {1: torch.int8, 2: torch.int16}


@dataclass(frozen=True)
class Deltas:
    """δ as a variant takes it, each [B, H, T] float32."""

    of_q: Tensor
    """Of the dS that makes dQ."""
    of_k: Tensor
    """Of dK; the same tensor where they do not differ."""
    left_of_q: Tensor | None = None
    """What dQ's δ is beyond ``of_q``, with exact row sums in one pass: PK takes it into dQ afterwards."""


@dataclass(frozen=True)
class SavedForBackward:
    """What the forward pass left for δ, as :class:`~flashpoint.numerics.delta_rules.rule.BackwardInputs`."""

    inputs: Inputs
    grad_out: Tensor
    """dO [B, H, T, d] float32."""
    returned: Tensor
    """O [B, H, T, d] as returned, in its dtype."""
    logsumexp: Tensor
    out_for_delta: Tensor
    """What was saved beside O, as :func:`flashpoint.numerics.reference.flash_fwd` returns it."""

    @property
    def out(self) -> Tensor:
        """O [B, H, T, d] float32."""
        return self.returned.float()

    @property
    def saved_out(self) -> Tensor:
        """The O [B, H, T, d] float32 that was saved, whole or as a residual."""
        return whole_saved_out(self.returned, self.out_for_delta, self.inputs.variant)

    def row_sums(self, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Σ_j P_ij(dP_ij − δ_i), without δ if there is none, and Σ_j P_ij, [B, H, T] each."""
        inputs, logsumexp = self.inputs, self.logsumexp
        total, mass = torch.zeros_like(logsumexp), torch.zeros_like(logsumexp)
        for block in (block for rows in inputs.row_chunks() for block in inputs.key_blocks(rows)):
            _, p = inputs.probs(block, logsumexp)
            grad_p = inputs.grad_probs(block, self.grad_out)
            grad_s = p * (grad_p if delta is None else grad_p - delta[..., block.rows, None])
            total[..., block.rows] += grad_s.sum(-1)
            mass[..., block.rows] += p.sum(-1)
        return total, mass


def deltas_of(saved: SavedForBackward) -> Deltas:
    """Return δ of dQ and of dK: by the variant's rule, corrected and with an injected error as the variant says."""
    variant = saved.inputs.variant
    if variant.exact_row_sum and not variant.corrects_in_one_pass:
        total, mass = saved.row_sums()
        delta = total / mass
    else:
        delta = rule_of(variant.delta).delta(saved)
    if not variant.corrects_in_one_pass:
        return Deltas(*_with_error(saved, delta))
    left, mass = saved.row_sums(delta)
    left_of_q, left_of_k = _with_error(saved, left / mass)
    return Deltas(delta, delta + left_of_k, left_of_q)


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


def _with_error(saved: SavedForBackward, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return δ of dQ and of dK with the injected error in those that take it; one tensor where there is none."""
    error = saved.inputs.variant.delta_error
    if error.kind == "none":
        return delta, delta
    erring = delta + delta_error(saved.grad_out, saved.returned, error, saved.inputs.noise)
    return erring if error.into != "grad_k" else delta, erring if error.into != "grad_q" else delta


def residual(unrounded: Tensor, out: Tensor, form: ResidualFormat) -> Tensor:
    """Return what ``out`` lacks of ``unrounded``, in units, to nearest even; 0 where the difference is not a number.

    Args:
        unrounded, out: O [..., d] float32, the second one rounded.

    Returns:
        Whole numbers [..., d] of at most ``form.largest`` with either sign, in float32.
    """
    units = ((unrounded - out) / _unit(out, form)).clamp(-form.largest, form.largest).round()
    return units.nan_to_num(0.0)


def two_parts(out: Tensor, residuals: Tensor, form: ResidualFormat) -> Tensor:
    """Return the sum of O as returned [..., d] and of :func:`residual`, of any dtype, in float32; it is exact."""
    out = out.float()
    return out + residuals.float() * _unit(out, form)


def whole_saved_out(out: Tensor, saved: Tensor, variant: AttentionVariant) -> Tensor:
    """Return the O [..., d] float32 that the forward pass saved for δ beside ``out``: as it is, or by its residual."""
    return two_parts(out, saved, variant.out_residual) if variant.out_residual else saved


def dtype_of_saved(variants: Iterable[AttentionVariant]) -> torch.dtype:
    """Return the dtype in which the variants that share a launch save what δ takes beside O: the widest of theirs."""
    dtypes = [
        _DTYPES[variant.out_residual.n_bytes] if variant.out_residual else torch.float32
        for variant in variants
        if variant.saved_out != "none"
    ]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _unit(out: Tensor, form: ResidualFormat) -> Tensor:
    """Return 2^(e − mantissa), at least 2^-126, where O as returned has the exponent e."""
    exponent = out.contiguous().view(torch.int32) >> 23 & 0xFF
    return (exponent.clamp(min=form.mantissa + 1) - form.mantissa << 23).view(torch.float32)
