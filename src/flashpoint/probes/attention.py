"""Probes of the attention: each takes a layer's observation and gives numbers by head.

Notation of Qiu & Yao (arXiv 2510.04212); lp is the variant's own precision, hp the FP32 O of the same P̄. A probe of
your own is a subclass of :class:`Probe` in a file of yours, named in the configuration as ``FILE.py:CLASS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashpoint.probes.observation import LayerObservation

SINK_POSITIONS = 4
"""Keys that count as the first positions, where attention sinks are."""
_SAMPLED_TOKENS = 256


class Probe:
    """Measures one thing of every layer; made once a run."""

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        """Metrics of one layer by name, each [H] on any device; called for all layers of an observed step in turn."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on, as plain values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""


class DeltaError(Probe):
    """δ_lp − δ_hp, its sum over tokens and over the observed steps, and what it leaves of Σⱼ dSᵢⱼ = 0."""

    def __init__(self) -> None:
        self._cumulative: dict[int, Tensor] = {}

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        error = (seen.delta - seen.delta_fp32).double().transpose(0, 1).flatten(1)  # [H, N·T]
        total = error.sum(-1)
        before = self._cumulative.get(seen.layer, torch.zeros_like(total))
        self._cumulative[seen.layer] = before.to(total.device) + total
        row_sums = ((seen.probs * seen.grad_probs).sum(-1) - seen.delta * seen.probs.sum(-1)).transpose(0, 1).flatten(1)
        out_error = seen.out.float() - seen.out_fp32
        agreement = (seen.grad_out.sign() * out_error.sign()).transpose(0, 1).flatten(1)
        return {
            "delta_error_sum": total,
            "delta_error_cumulative": self._cumulative[seen.layer],
            "delta_error_abs_sum": error.abs().sum(-1),
            "delta_error_mean": error.mean(-1),
            "delta_error_variance": error.var(-1),
            "delta_abs_mean": seen.delta_fp32.abs().transpose(0, 1).flatten(1).mean(-1),
            "row_sum_mean": row_sums.mean(-1),
            "row_sum_abs_mean": row_sums.abs().mean(-1),
            "grad_out_error_sign_agreement": agreement.sum(-1) / agreement.abs().sum(-1).clamp_min(1),
        }

    def state(self) -> dict[str, Any]:
        return {str(layer): total.tolist() for layer, total in self._cumulative.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._cumulative = {int(layer): torch.tensor(total, dtype=torch.float64) for layer, total in state.items()}


class Ties(Probe):
    """Rows in which several P̄ are exactly 1, the paper's trigger, and where those keys are."""

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        ones = seen.ones.transpose(0, 1).flatten(1)  # [H, N·T]
        tied = ones >= 2
        rows = tied.sum(-1).clamp_min(1)
        # Which they are: the keys with the row's largest scores, as many as there are ones.
        maxima = (seen.scores == seen.scores.amax(-1, keepdim=True)) & (seen.ones >= 2)[..., None]
        by_position = maxima.sum((0, 2)).double()  # [H, T]
        return {
            "tied_rows": tied.double().mean(-1),
            "tie_multiplicity": (ones * tied).sum(-1) / rows,
            "ties_on_first_keys": by_position[:, :SINK_POSITIONS].sum(-1) / by_position.sum(-1).clamp_min(1),
        }


class Scores(Probe):
    """Size of the scores and entropy of the attention."""

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        seen_keys = seen.scores.isfinite()
        size = seen.scores.abs().masked_fill(~seen_keys, 0.0)
        # −Σ P ln P with ln P = S − L
        log_probs = (seen.scores - seen.logsumexp[..., None]).masked_fill(~seen_keys, 0.0)
        entropy = -(seen.probs * log_probs).sum(-1)
        return {
            "score_max": size.amax((0, 2, 3)),
            "score_mean": size.double().sum((0, 2, 3)) / seen_keys.double().sum((0, 2, 3)),
            "entropy": entropy.mean((0, 2)),
        }


class OutBias(Probe):
    """Signs of V, and the bias of O_lp − O_hp, by feature; of a head the most one-sided feature is told."""

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        positive = (seen.v > 0).double().mean((0, 2))  # [H, d]
        error = (seen.out.float() - seen.out_fp32).double()
        bias = error.mean((0, 2)).abs() / error.abs().mean((0, 2)).clamp_min(1e-300)
        return {
            "v_sign_max": torch.maximum(positive, 1 - positive).amax(-1),
            "out_error_bias_max": bias.amax(-1),
            "out_error_bias_mean": bias.mean(-1),
        }


class NullDirection(Probe):
    """Shares of ‖W_Q‖² and of its last update along the mean key and along the first token's key.

    Adding c·q to a row of scores changes no probability, so nothing in the loss holds W_Q along what all keys share.
    """

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        keys = seen.keys
        directions = {"mean_key": keys.mean((0, 2)), "first_key": keys[:, :, 0].mean(0)}  # [H, d]
        return {
            f"{name}_{direction}_share": _share(matrix, along)
            for direction, along in directions.items()
            for name, matrix in (("w_q", seen.w_q), ("w_q_update", seen.update))
        }


class Similarity(Probe):
    """Do the errors of all tokens push W_Q the same way? dW_Q,hp − dW_Q,lp = α Σ_T (δ_lp − δ_hp)[T] · (PK)[T]ᵀX[T].

    Cosine of the rank-1 matrices uxᵀ and u'x'ᵀ is (u·u')(x·x') / (|u||u'||x||x'|): no d × C matrix of a token is made.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def measure(self, seen: LayerObservation) -> Mapping[str, Tensor]:
        N, H, T, d = seen.q.shape
        chosen = torch.linspace(0, N * T - 1, min(_SAMPLED_TOKENS, N * T), device=seen.x.device).long()
        u = _unit(seen.attended_keys.transpose(0, 1).reshape(H, N * T, d)[:, chosen])  # [H, S, d]
        x = _unit(seen.x.flatten(0, 1)[chosen])  # [S, C]
        cosines = (u @ u.mT) * (x @ x.mT)
        count = len(chosen)
        among = (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / max(1, count * (count - 1))
        metrics = {"token_similarity": among, "w_q_error_effective_rank": _effective_rank(weight_gradient_error(seen))}
        if seen.layer in self._before:
            u_before, x_before = self._before[seen.layer]
            metrics["step_similarity"] = ((u @ u_before.mT) * (x @ x_before.mT)).mean((-2, -1))
        self._before[seen.layer] = u, x
        return metrics


BUILT_IN: dict[str, type[Probe]] = {
    "delta_error": DeltaError,
    "ties": Ties,
    "scores": Scores,
    "out_bias": OutBias,
    "null_direction": NullDirection,
    "similarity": Similarity,
}


def weight_gradient_error(seen: LayerObservation) -> Tensor:
    """dW_Q,hp − dW_Q,lp [H, d, C] = α Σ_T (δ_lp − δ_hp)[T] · (PK)[T]ᵀX[T] (Qiu & Yao)."""
    weighted = (seen.delta - seen.delta_fp32)[..., None] * seen.attended_keys
    return seen.scale * torch.einsum("nhtd,ntc->hdc", weighted, seen.x)


def _share(matrix: Tensor, along: Tensor) -> Tensor:
    """‖âᵀM‖² / ‖M‖² for [H, d, C] and [H, d]: [H]; 0 where M is."""
    part = torch.einsum("hd,hdc->hc", _unit(along), matrix.float()).square().sum(-1)
    return part / matrix.float().square().sum((-2, -1)).clamp_min(1e-30)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def _effective_rank(matrices: Tensor) -> Tensor:
    """(Σσ²)² / Σσ⁴ of [H, d, C], the participation ratio of the squared singular values: [H]; 0 for no matrix."""
    gram = matrices.double() @ matrices.double().mT
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / gram.square().sum((-2, -1)).clamp_min(1e-300)
