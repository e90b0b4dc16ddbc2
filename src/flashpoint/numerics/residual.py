"""O in two parts: as returned, and what it lacks of the unrounded O, the residual.

The two parts make an O of more mantissa bits for δ; the residual takes half a byte, one or two an element instead of
four. Its format is :class:`~flashpoint.numerics.choices.ResidualFormat`. Halves of a byte are uint8: the feature of an
even number, from 0, has the lower half, and the next one the upper.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.numerics.choices import ResidualFormat
from flashpoint.numerics.layout import by_token
from flashpoint.numerics.variant import AttentionVariant

_PAIRS = torch.uint8
_DTYPES = {4: _PAIRS, 8: torch.int8, 16: torch.int16}


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
    """Return the sum of O as returned [..., d] and of :func:`residual`, in any form, in float32; it is exact."""
    out = out.float()
    return out + unpacked(residuals, out.shape[-1]).float() * _unit(out, form)


def saved_like(q: Tensor, variants: Iterable[AttentionVariant]) -> Tensor:
    """Return an uninitialised tensor for what δ takes beside O, of variants that share a launch on ``q`` [B, H, T, d].

    It has the widest of their forms: [B, H, T, d] or, of halves of a byte, [B, H, T, ⌈d/2⌉]. It is empty if none of
    them saves any.
    """
    forms = [variant.out_residual for variant in variants if variant.saves_out_for_delta]
    if not forms:
        return q.new_empty(0, dtype=torch.float32)
    n_bits = max(form.n_bits if form else 32 for form in forms)
    return by_token(q, _DTYPES.get(n_bits, torch.float32), -(-q.shape[-1] * min(n_bits, 8) // 8))


def in_form_of(saved: Tensor, residuals: Tensor) -> Tensor:
    """Return residuals [..., d], whole numbers of any dtype or as saved in a form no wider, in the form of ``saved``;
    where that is not of halves of a byte, any tensor in its dtype."""
    if saved.dtype != _PAIRS:
        return unpacked(residuals, saved.shape[-1]).to(saved.dtype)
    if residuals.dtype == _PAIRS:
        return residuals
    halves = F.pad(residuals, (0, residuals.shape[-1] % 2)).to(torch.int8).view(_PAIRS)
    return halves[..., ::2] & 15 | halves[..., 1::2] << 4


def unpacked(residuals: Tensor, features: int) -> Tensor:
    """Return residuals with one element a feature, [..., d]."""
    if residuals.dtype != _PAIRS:
        return residuals
    halves = torch.stack([residuals << 4, residuals], -1).flatten(-2).view(torch.int8) >> 4
    return halves[..., :features]


def _unit(out: Tensor, form: ResidualFormat) -> Tensor:
    """Return 2^(e − mantissa), at least 2^-126, where O as returned has the exponent e."""
    exponent = out.contiguous().view(torch.int32) >> 23 & 0xFF
    return (exponent.clamp(min=form.mantissa + 1) - form.mantissa << 23).view(torch.float32)
