"""Probes of the rounding of O, where it is biased and by which sign (Qiu & Yao, §3.3.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashpoint.lab.probes.attention import Probe, by_row
from flashpoint.lab.probes.observation import Observation
from flashpoint.runs.metric_table import (
    FEATURE_SIGN_AGREEMENT,
    FEATURE_V_SIGN_AGREEMENT,
    ONE_SIDED_TIED_OUT_BIAS,
    OUT_BIAS_LARGEST,
    OUT_BIAS_MEAN,
    TIE_MULTIPLICITY,
    TIED_OUT_BIAS,
    TIED_ROWS,
    TIES_ON_FIRST_KEYS,
    UNTIED_OUT_BIAS,
    V_SIGN,
)

SINK_POSITIONS = 4
"""Keys that count as the first positions, where attention sinks are."""


class Ties(Probe):
    """Rows in which several P̄ are exactly 1 as operands, the paper's trigger, and where those keys are. Whether the
    rounding of O points away from 0 in these rows, in the others, and in the tied rows' feature whose V is most of one
    sign (§3.3.2).

    Under the row's final maximum: a P̄ that was 1 until a later block of keys brought a larger score is none.
    """

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        ones = by_row(seen.ones)
        tied = ones >= 2
        rows = tied.sum(-1).clamp_min(1)
        # Where they are: of these keys, those whose score is the row's largest.
        maxima = (seen.scores == seen.scores.amax(-1, keepdim=True)) & (seen.ones >= 2)[..., None]
        by_position = maxima.sum((1, 3)).double()  # [L, H, T]
        error = by_row(seen.out_error).double()
        outward, size = error * by_row(seen.out_fp32).sign(), error.abs()
        one_sided = _one_sided(seen.v).argmax(-1)[..., None, None].expand(*tied.shape, 1)
        return {
            TIED_ROWS.name: tied.double().mean(-1),
            TIE_MULTIPLICITY.name: (ones * tied).sum(-1) / rows,
            TIES_ON_FIRST_KEYS.name: by_position[..., :SINK_POSITIONS].sum(-1) / by_position.sum(-1).clamp_min(1),
            TIED_OUT_BIAS.name: _ratio(outward, size, tied),
            UNTIED_OUT_BIAS.name: _ratio(outward, size, ~tied),
            ONE_SIDED_TIED_OUT_BIAS.name: _ratio(outward.gather(-1, one_sided), size.gather(-1, one_sided), tied),
        }


class OutBias(Probe):
    """Signs of V, of O_lp − O_hp and of dO, and the bias of O_lp − O_hp, by feature (§3.3.2).

    ``feature_`` are of the feature in which dO and O_lp − O_hp have one sign most often. The first half of the rows
    chooses it and the second half is measured: errors without a bias then agree in one half of these rows.
    """

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        error = by_row(seen.out_error).double()  # [L, H, N·T, d]
        bias = error.mean(2).abs() / error.abs().mean(2).clamp_min(1e-300)
        half = error.shape[2] // 2
        products = error.sign() * by_row(seen.grad_out).sign()
        feature = _share_above_zero(products[:, :, :half]).argmax(-1, keepdim=True)
        v_and_error = by_row(seen.v.float()) * error[:, :, half:].sum(2, keepdim=True).sign()
        shares = {
            FEATURE_SIGN_AGREEMENT.name: _share_above_zero(products[:, :, half:]),
            FEATURE_V_SIGN_AGREEMENT.name: _share_above_zero(v_and_error),
        }
        return {
            V_SIGN.name: _one_sided(seen.v).amax(-1),
            OUT_BIAS_LARGEST.name: bias.amax(-1),
            OUT_BIAS_MEAN.name: bias.mean(-1),
            **{name: share.gather(-1, feature)[..., 0] for name, share in shares.items()},
        }


def _one_sided(v: Tensor) -> Tensor:
    """Return of V [L, N, H, T, d] the share of keys with the more frequent sign, by feature: [L, H, d]."""
    positive = (v > 0).double().mean((1, 3))
    return torch.maximum(positive, 1 - positive)


def _share_above_zero(x: Tensor) -> Tensor:
    """Return the share of the values [L, H, N·T, d] other than 0 that are positive, by feature: [L, H, d]."""
    return (x > 0).double().sum(2) / (x != 0).sum(2).clamp_min(1)


def _ratio(outward: Tensor, size: Tensor, rows: Tensor) -> Tensor:
    """Return the quotient of the sums of two [L, H, N·T, d] over the rows [L, H, N·T] and features: [L, H]."""
    part, whole = ((x.sum(-1) * rows).sum(-1) for x in (outward, size))
    return part / whole.clamp_min(1e-300)
