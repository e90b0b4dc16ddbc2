"""Probes of the attention: each takes an observation and gives numbers by layer and head.

Notation of Qiu & Yao (arXiv 2510.04212); lp is the variant's own precision, hp the FP32 O of the same P̄. A probe of
your own is a subclass of :class:`Probe` in a file of yours, named in the configuration as ``FILE.py:CLASS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashpoint.lab.config import SIMILARITY_TOKENS
from flashpoint.lab.probes.observation import Observation
from flashpoint.runs import metric_table as table
from flashpoint.runs.metric_table import DeltaErrorMetrics, DeviationMetrics


class Probe:
    """Measures one thing. A run makes one object of each probe."""

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        """Return the metrics by name, each [L, H], of an observed step (shapes:
        :mod:`flashpoint.lab.probes.observation`)."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, as plain values; those of built-in probes may be tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""


class DeltaError(Probe):
    """δ_lp − δ_hp, its sum over tokens and over the observed steps, and what it leaves of Σⱼ dSᵢⱼ = 0.

    ``relative_bias`` and ``relative_noise`` are in the unit of the injected errors, |dO_i|₂·|O_i|₂. They are Σᵢ error
    over the sum of these bounds, and the root of Σᵢ error² over that of their squares. ``row_sum_relative_bias`` and
    ``_noise`` are the same of the error against rowsum(P∘dP) / rowsum(P), the δ that leaves nothing of Σⱼ dSᵢⱼ: it
    holds the rounding of P̄ too, which δ_hp shares.
    """

    def __init__(self) -> None:
        self._cumulative = torch.zeros(())

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        mass, products = seen.probs.sum(-1), (seen.probs * seen.grad_probs).sum(-1)
        error = by_row(seen.delta - seen.delta_fp32).double()
        row_error = by_row(seen.delta - products / mass).double()
        bound = by_row(seen.grad_out.norm(dim=-1) * seen.out.float().norm(dim=-1)).double()
        total = error.sum(-1)
        self._cumulative = self._cumulative.to(total) + total
        row_sums = by_row(products - seen.delta * mass)
        agreement = by_row((seen.grad_out.sign() * seen.out_error.sign()).sum(-1))
        compared = by_row(((seen.grad_out != 0) & (seen.out_error != 0)).sum(-1))
        return {
            table.DELTA_ERROR_SUM.name: total,
            table.DELTA_ERROR_CUMULATIVE.name: self._cumulative,
            table.DELTA_ERROR_VARIANCE.name: error.var(-1),
            **_relative(table.DELTA_ERROR, error, bound),
            **_relative(table.ROW_SUM, row_error, bound),
            table.DELTA_ABS_MEAN.name: by_row(seen.delta_fp32).abs().mean(-1),
            table.ROW_SUM_MEAN.name: row_sums.mean(-1),
            table.ROW_SUM_ABS_MEAN.name: row_sums.abs().mean(-1),
            table.SIGN_AGREEMENT.name: agreement.sum(-1) / compared.sum(-1).clamp_min(1),
        }

    def state(self) -> dict[str, Any]:
        return {"cumulative": self._cumulative.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._cumulative = torch.tensor(state["cumulative"], dtype=torch.float64)


def _relative(metrics: DeltaErrorMetrics, error: Tensor, bound: Tensor) -> dict[str, Tensor]:
    """Return the bias and noise [L, H] of errors [L, H, N·T] in the unit of the bounds of each."""
    return {
        metrics.bias.name: error.sum(-1) / bound.sum(-1).clamp_min(1e-300),
        metrics.noise.name: (error.square().sum(-1) / bound.square().sum(-1).clamp_min(1e-300)).sqrt(),
    }


class Scores(Probe):
    """Size of the scores and entropy of the attention."""

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        scores = seen.scores.masked_fill(seen.scores.isinf(), 0.0)
        count = scores.shape[1] * scores.shape[-1] * (scores.shape[-1] + 1) / 2  # of keys that their queries see
        # −Σ P ln P with ln P = S − L; P is 0 where it is masked
        entropy = -(scores - seen.logsumexp[..., None]).mul_(seen.probs).sum(-1)
        size = scores.abs_()
        return {
            table.SCORE_MAX.name: size.amax((1, 3, 4)),
            table.SCORE_MEAN.name: size.sum((1, 3, 4), dtype=torch.float64) / count,
            table.ENTROPY.name: by_row(entropy).mean(-1),
        }


class Rows(Probe):
    """Rows that an attention has switched off: their P sum to little, their O is short, or their dS are all 0.

    ``row_mass_mean`` is the mean of Σⱼ Pᵢⱼ, as the backward pass has P; 1 in exact arithmetic. The others are shares of
    the rows: those with less than half that mass, those whose |O|₂ is below half of exact attention's, and those whose
    dS are all 0. The first row, whose one dS is 0 in exact arithmetic, is not counted among the last.
    """

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        mass = by_row(seen.probs.sum(-1)).double()
        short = seen.out.float().norm(dim=-1) < 0.5 * seen.out_exact.norm(dim=-1)
        grad_scores = (seen.grad_probs - seen.delta[..., None]).mul_(seen.probs)
        silent = (grad_scores == 0).all(-1)[..., 1:]
        return {
            table.ROW_MASS.name: mass.mean(-1),
            table.HALF_MASS_ROWS.name: (mass < 0.5).double().mean(-1),
            table.HALF_NORM_ROWS.name: by_row(short).double().mean(-1),
            table.ZERO_GRAD_ROWS.name: by_row(silent).double().mean(-1),
        }


class Deviation(Probe):
    """How far O, δ and dQ are from attention in FP32 throughout, on the same Q, K, V and dO (arXiv 2405.02803).

    ``_max`` is the largest absolute difference and ``_rms`` the root mean square of the differences, over that of the
    FP32 values. ``_mean`` is their signed mean, in the same unit.
    """

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        delta_exact = (seen.grad_out * seen.out_exact).sum(-1)
        return {
            **_deviation(table.OUT_DEVIATION, seen.out.float(), seen.out_exact),
            **_deviation(table.DELTA_DEVIATION, seen.delta[..., None], delta_exact[..., None]),
            **_deviation(table.GRAD_Q_DEVIATION, seen.grad_q, seen.grad_q_exact),
        }


def _deviation(metrics: DeviationMetrics, found: Tensor, exact: Tensor) -> dict[str, Tensor]:
    """Return the differences of [L, N, H, T, d], by layer and head."""
    difference, size = (by_row(x).double().flatten(2) for x in (found - exact, exact))
    unit = size.square().mean(-1).sqrt().clamp_min(1e-300)
    return {
        metrics.largest.name: difference.abs().amax(-1),
        metrics.rms.name: difference.square().mean(-1).sqrt() / unit,
        metrics.mean.name: difference.mean(-1) / unit,
    }


class NullDirection(Probe):
    """Shares of ‖W_Q‖² and of its last update along the mean key and along the first token's key. And the cosine of the
    mean key with the mean PK of K as dQ takes it, which errors of δ push W_Q along.

    Adding c·q to a row of scores changes no probability, so nothing in the loss holds W_Q along what all keys share.
    With rotary positions or QK-norm another map lies between W_Q and q for each token. There the shares are left out.
    """

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        mean_key, first_key = seen.keys.mean((1, 3)), seen.keys[..., 0, :].mean(1)  # [L, H, d]
        attended = seen.attended_keys.mean((1, 3))
        cosine = {table.ATTENDED_KEY_COSINE.name: (_unit(attended) * _unit(mean_key)).sum(-1)}
        if seen.to_projection is not None:
            return cosine
        return {
            table.W_Q_MEAN_KEY.name: _share(seen.w_q, mean_key),
            table.W_Q_UPDATE_MEAN_KEY.name: _share(seen.update, mean_key),
            table.W_Q_FIRST_KEY.name: _share(seen.w_q, first_key),
            table.W_Q_UPDATE_FIRST_KEY.name: _share(seen.update, first_key),
            **cosine,
        }


class Similarity(Probe):
    """Do the errors of all tokens push W_Q the same way? dW_Q,hp − dW_Q,lp = α Σ_T (δ_lp − δ_hp)[T] · (PK)[T]ᵀX[T].

    Cosine of the rank-1 matrices uxᵀ and u'x'ᵀ is (u·u')(x·x') / (|u||u'||x||x'|): no d × C matrix of a token is made.
    Its factors tell where the common direction comes from: from what all keys share, or from what all inputs share.
    The PK are taken back to before norm and rotation of q.
    """

    def __init__(self) -> None:
        self._before: tuple[Tensor, Tensor] | None = None

    def measure(self, seen: Observation) -> Mapping[str, Tensor]:
        rows = seen.q.shape[1] * seen.q.shape[3]
        chosen = torch.linspace(0, rows - 1, min(SIMILARITY_TOKENS, rows), device=seen.x.device).long()
        u = _unit(by_row(seen.pushes)[:, :, chosen])  # [L, H, S, d]
        x = _unit(seen.x.flatten(1, 2)[:, None, chosen])  # [L, 1, S, C]
        of_keys, of_inputs = u @ u.mT, x @ x.mT
        metrics = {
            table.TOKEN_SIMILARITY.name: _mean_among(of_keys * of_inputs),
            table.ATTENDED_KEY_SIMILARITY.name: _mean_among(of_keys),
            table.INPUT_SIMILARITY.name: _mean_among(of_inputs).expand(-1, u.shape[1]),
            table.EFFECTIVE_RANK.name: _effective_rank(weight_gradient_error(seen)),
        }
        if self._before is not None:
            u_before, x_before = (one.to(u) for one in self._before)
            metrics[table.STEP_SIMILARITY.name] = ((u @ u_before.mT) * (x @ x_before.mT)).mean((-2, -1))
        self._before = u, x
        return metrics

    def state(self) -> dict[str, Any]:
        return {} if self._before is None else dict(zip(("attended_keys", "inputs"), self._before, strict=True))

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._before = state["attended_keys"], state["inputs"]


def weight_gradient_error(seen: Observation) -> Tensor:
    """Return dW_Q,hp − dW_Q,lp [L, H, d, C] = α Σ_T (δ_lp − δ_hp)[T] · (PK)[T]ᵀX[T] (Qiu & Yao)."""
    weighted = (seen.delta - seen.delta_fp32)[..., None] * seen.pushes  # linear in each row: the factor goes with it
    return seen.scale * torch.einsum("lnhtd,lntc->lhdc", weighted, seen.x)


def _mean_among(cosines: Tensor) -> Tensor:
    """Return the mean of [L, H, S, S] over pairs of different tokens: [L, H]."""
    count = cosines.shape[-1]
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / max(1, count * (count - 1))


def _share(matrix: Tensor, along: Tensor) -> Tensor:
    """Return ‖âᵀM‖² / ‖M‖² for [L, H, d, C] and [L, H, d]: [L, H]; 0 where M is."""
    part = torch.einsum("lhd,lhdc->lhc", _unit(along), matrix.float()).square().sum(-1)
    return part / matrix.float().square().sum((-2, -1)).clamp_min(1e-30)


def by_row(x: Tensor) -> Tensor:
    """Return values [L, N, H, T, …] as [L, H, N·T, …]."""
    return x.transpose(1, 2).flatten(2, 3)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def _effective_rank(matrices: Tensor) -> Tensor:
    """Return (Σσ²)² / Σσ⁴ of [L, H, d, C], the participation ratio of the squared singular values: [L, H]; 0 for no
    matrix."""
    gram = matrices.double() @ matrices.double().mT
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / gram.square().sum((-2, -1)).clamp_min(1e-300)
