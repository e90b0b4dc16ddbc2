"""O in two parts: as returned, and what it lacks of the unrounded O, the residual.

The two parts make an O of more mantissa bits for δ; the residual takes a byte or two an element instead of four. Its
format is :class:`~flashpoint.numerics.choices.ResidualFormat`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flashpoint.numerics.choices import ResidualFormat
from flashpoint.numerics.variant import AttentionVariant

_DTYPES = {1: torch.int8, 2: torch.int16}


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
