"""Spectral norms of the weights that make the queries and keys of each head, and the early warning by these.

Which weights they are, :mod:`flashpoint.watching.matrices` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from flashpoint.early_warning import LOOKBACK, Sentinel, largest_eigenvalue
from flashpoint.runs.metric_table import W_K_NORM, W_Q_NORM
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.events import CaptureWanted, Handler, Publish, StepEnded
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun


@dataclass(frozen=True)
class Projection:
    """The part of a weight that makes the queries, or keys, of one layer.

    Attributes:
        inputs: dimensions of the weight over which the product sums; all others are features.
        features: of each head, [H, f] int64, by number among all; heads of queries that share keys have the same ones.
            They lie beside the weight: to bring them there is to wait for the device.
        added: returns what an adapter adds to the weight; None for nothing.
    """

    weight: nn.Parameter
    inputs: tuple[int, ...]
    features: Tensor
    added: Callable[[], Tensor] | None = None

    def matrices(self) -> Tensor:
        """Return the matrix of each head, [H, f, C]."""
        weight = self.weight.detach() if self.added is None else self.weight.detach() + self.added().detach()
        by_feature = weight.movedim(self.inputs, [*range(-len(self.inputs), 0)]).flatten(-len(self.inputs))
        return by_feature.flatten(0, -2)[self.features.to(weight.device)]


Found = Mapping[str, tuple[Projection, ...] | str]
"""What makes q of a layer, and k, by metric: several where each makes other numbers of it. Or why that is not known."""
ByMetric = dict[str, list[tuple[Projection, ...]]]
"""What makes q, or k, of all layers, by metric; nothing of a layer whose W_Q is not known."""


def by_metric(layers: Sequence[Found]) -> ByMetric:
    """Return the projections of all layers by metric: of queries those that are known, of keys all of them or none."""
    found: ByMetric = {}
    for metric in (W_Q_NORM, W_K_NORM):
        of_layers = [layer.get(metric.name, ()) for layer in layers]
        found[metric.name] = [() if isinstance(of_layer, str) else of_layer for of_layer in of_layers]
    enough = {W_Q_NORM.name: any, W_K_NORM.name: all}
    return {name: of_layers for name, of_layers in found.items() if enough[name](of_layers)}


class ProjectedGradients:
    """The largest magnitudes of the gradients of W_Q and W_K by head, where all layers have one such matrix alike.

    Attributes:
        matrices: of q and k, by metric.
    """

    def __init__(self, matrices: Mapping[str, list[tuple[Projection, ...]]]) -> None:
        self.matrices = matrices
        self._weights: dict[str, list[Projection]] = {}
        self._features: dict[str, Tensor] = {}
        if any(len(layer) != 1 for layers in matrices.values() for layer in layers):
            return
        parts = {"dQ": [one for (one,) in matrices[W_Q_NORM.name]], "dK": [one for (one,) in matrices[W_K_NORM.name]]}
        for name, some in parts.items():
            if len({(one.weight.shape, one.features.shape, one.weight.device, one.inputs) for one in some}) == 1:
                self._weights[name] = some
                self._features[name] = torch.stack([one.features.to(one.weight.device) for one in some])
        if len(self._weights) == 2 and all(q.weight is k.weight for q, k in zip(*parts.values(), strict=True)):
            self._add_others(parts["dQ"])

    def _add_others(self, fused: list[Projection]) -> None:
        """Add the features of a fused weight that make neither q nor k: those of v, and of whatever is beside it."""
        count = fused[0].weight.numel() // math.prod(fused[0].weight.shape[dim] for dim in fused[0].inputs)
        known = torch.cat([self._features[name].flatten(1) for name in ("dQ", "dK")], 1).cpu()
        others = [sorted(set(range(count)) - set(row.tolist())) for row in known]
        if len(set(map(len, others))) == 1 and others[0]:
            self._weights["other"] = fused
            self._features["other"] = torch.tensor(others, device=fused[0].weight.device)[:, None]

    def largest(self) -> dict[str, Tensor]:
        """Return them for q and k, [layers, H] each, and for the other features of a fused weight, [layers, 1]; nothing
        of those that lack a gradient."""
        rows: dict[int, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, some in self._weights.items():
            for one in some:
                if one.weight.grad is None or one.weight.grad.layout != torch.strided:
                    return {}
                if id(one.weight) not in rows:
                    rows[id(one.weight)] = torch.linalg.vector_norm(one.weight.grad, math.inf, one.inputs).flatten()
            features = self._features[name]
            by_feature = torch.stack([rows[id(one.weight)] for one in some])
            found[name] = by_feature.gather(1, features.flatten(1)).view(features.shape).amax(-1)
        return found


@torch.no_grad()
def spectral_norms(layers: Sequence[Sequence[Projection]]) -> Tensor:
    """Return the largest singular value of each head's matrix, [layers, H] float32: of the largest one, where several
    matrices make a layer's. It is NaN behind the heads of a layer that has fewer, or where a layer has no matrix."""
    grams = [_gram(one.matrices()) for layer in layers for one in layer]
    alike = len({gram.shape for gram in grams}) == 1
    norms = iter(_roots(torch.stack(grams)) if alike else map(_roots, grams))  # one by one: many kernels on a GPU
    of_layers = [[next(norms) for _ in layer] for layer in layers]
    nothing = torch.full((1,), math.nan, device=grams[0].device)
    largest = [torch.stack(some).amax(0) if some else nothing for some in of_layers]
    return nn.utils.rnn.pad_sequence(largest, batch_first=True, padding_value=math.nan)


def _gram(matrices: Tensor) -> Tensor:
    """Return the smaller one of M·Mᵀ and Mᵀ·M of each matrix, float64."""
    double = matrices.double()
    return double @ double.mT if double.shape[-2] <= double.shape[-1] else double.mT @ double


def _roots(grams: Tensor) -> Tensor:
    """Return the square root of each matrix's largest eigenvalue, float32."""
    return largest_eigenvalue(grams, torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)).sqrt().float()


@dataclass(frozen=True, slots=True)
class _NormsArrived:
    """Norms of a step can be read: of each metric [layers, H] float32.

    Attributes:
        alike: whether all layers have norms, of as many heads.
    """

    step: int
    names: Sequence[str]
    alike: bool
    numbers: Sequence[Number]


class WeightNorms:
    """Logs the spectral norms of W_Q and W_K at an interval, and has a head captured that grows as before an explosion.

    Args:
        found: returns the matrices by metric, once a step has shown them.
        sentinel: judges the norms.
    """

    def __init__(
        self,
        found: Callable[[], ByMetric | None],
        interval: int,
        run: WatchedRun,
        sentinel: Sentinel,
        arrivals: Arrivals,
        publish: Publish,
        notices: Notices,
    ) -> None:
        self._found, self._interval, self._run = found, interval, run
        self._sentinel, self._arrivals, self._publish, self._notices = sentinel, arrivals, publish, notices

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "measuring W_Q and W_K"
        return Handler(StepEnded, what, self._measure), Handler(_NormsArrived, what, self._log)

    def _measure(self, event: StepEnded) -> None:
        projections = self._found()
        if projections and (event.step + 1) % self._interval == 0:
            norms = [spectral_norms(some) for some in projections.values()]
            layers = [layer for of_layers in projections.values() for layer in of_layers]
            alike = all(layers) and len({len(one.features) for layer in layers for one in layer}) == 1
            self._arrivals.ask(_NormsArrived(event.step, tuple(projections), alike, norms))

    def _log(self, event: _NormsArrived) -> None:
        read = zip(event.names, event.numbers, strict=True)
        norms = {name: cast(Tensor, one).cpu().double().numpy() for name, one in read}
        if event.alike:
            self._run.log(event.step, norms)
        else:
            self._notices.warn("layers have different numbers of heads, or some have no W_Q that is known: norms of "
                       "W_Q and W_K are judged for the early warning, and not logged")  # fmt: skip
        if W_Q_NORM.name in norms and (warning := self._sentinel.update(event.step, norms[W_Q_NORM.name])):
            where = f"{self._run.layer_told(warning.layer)}, head {warning.head}"
            reason = (
                f"W_Q of {where} has grown ×{warning.growth:.1f} in {LOOKBACK} steps, to {warning.norm:.1f}: an "
                "explosion may follow"
            )
            self._publish(CaptureWanted(reason, warning.layer))
