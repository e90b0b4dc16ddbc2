"""The error of δ by head, by layer and by attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.bias import Relative, Sums, Window
from flashpoint.runs.metric_table import DELTA_ERROR, DELTA_ERROR_SUM, DeltaErrorMetrics
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Summed:
    """Σ (δ_lp − δ_hp) of one head over the tokens of all observed steps."""

    total: float
    standard_errors: float | None
    """The sum in its own standard errors, were the errors of all tokens independent with mean zero; None without any
    error."""
    positive: int
    """Observed steps at which the sum over the tokens was positive."""
    steps: int


@dataclass(frozen=True)
class HeadError:
    """One head; layer and head from 1."""

    layer: int
    head: int
    summed: Summed | None
    """None if the run has not measured the sum of this error."""
    biases: NDArray[np.float64] | None
    """[n] by step, in the unit of injected errors; None if fewer than two steps were measured."""
    noise: float | None
    """Root mean square, in the same unit."""


@dataclass(frozen=True)
class LayerErrors:
    """Each layer of one run [L]; NaN where δ takes no part of O's error."""

    run: Run
    z: NDArray[np.float64]
    """The sum over all heads in its own standard errors."""
    bias_over_noise2: NDArray[np.float64]
    sensitivity: NDArray[np.float64]
    """Nats: :meth:`~flashpoint.lab.analysis.bias.Sums.sensitivity`."""
    bias_over_variance: NDArray[np.float64]
    """The bias of N·error over its variance, a mean over the steps."""
    biases: NDArray[np.float64]
    """The bias of the hottest layer, [n] by step, in the unit of injected errors."""
    variance: float
    """Square of the hottest layer's noise."""
    biases_over_variance: NDArray[np.float64]
    """The bias over the variance of the hottest layer, [n] by step."""

    @property
    def hottest(self) -> int:
        """The hottest layer; layers count from 0."""
        return self.run.hottest_layer - 1


@dataclass(frozen=True)
class AttentionErrors:
    """Biases [runs] and squares of the noise [runs], means over steps, heads and layers."""

    title: str
    biases: NDArray[np.float64]
    variances: NDArray[np.float64]


def by_head(run: Run, error: DeltaErrorMetrics, layers: Sequence[int] | None, window: Window) -> list[HeadError]:
    """Return the error of each head of the given layers, or of the hottest layer.

    Args:
        error: one whose sum over tokens is not measured is told by bias and noise alone.

    Raises:
        UserError: the run has not measured it, or has no such layer.
    """
    sums = Sums.of(run, window) if error.sum else None
    measured = error.sum is None or run.by_head(error.bias.name)
    relative = Relative.of(run, error, window) if measured else None
    n_layer, n_head, _ = run.measured_by_head((error.sum or error.bias).name)[1].shape
    found = []
    for layer, head in product(_known(run, layers or [run.hottest_layer], n_layer), range(n_head)):
        biases = noise = None
        if relative and relative.biases.shape[-1] > 1:
            biases = relative.biases[layer - 1, head]
            noise = float(np.sqrt(np.square(relative.noises[layer - 1, head]).mean()))
        found.append(HeadError(layer, head + 1, _summed(sums, layer, head) if sums else None, biases, noise))
    return found


def _summed(sums: Sums, layer: int, head: int) -> Summed:
    heads = slice(head, head + 1)
    errors = sums.by_step[layer - 1, head]
    total, expected = sums.total(layer, heads), sums.expected(layer, heads)
    return Summed(total, total / expected if expected else None, int((errors > 0).sum()), len(errors))


def by_layer(run: Run, window: Window) -> LayerErrors:
    """Return the errors of each layer. Raises UserError if the run has not measured the error of δ."""
    sums, relative = Sums.of(run, window), Relative.of(run, DELTA_ERROR, window)
    run.check_together(DELTA_ERROR_SUM.name, DELTA_ERROR.noise.name)
    columns = np.full((4, len(sums.by_step)), np.nan)
    for layer in range(1, len(sums.by_step) + 1):
        if expected := sums.expected(layer):  # none, where δ takes no part of O's error
            one = relative.layers([layer])
            columns[:, layer - 1] = (
                sums.total(layer) / expected,
                one.bias / one.variance,
                sums.sensitivity(relative, layer),
                sums.bias_over_variance(layer).mean(),
            )
    hottest = relative.layers([run.hottest_layer])
    over_variance = sums.bias_over_variance(run.hottest_layer) if hottest.variance else np.array([])
    z, bias_over_noise2, sensitivity, bias_over_variance = columns
    return LayerErrors(
        run,
        z,
        bias_over_noise2,
        sensitivity,
        bias_over_variance,
        hottest.biases.mean((0, 1)),
        hottest.variance,
        over_variance,
    )


def by_attention(
    runs: Sequence[Run], error: DeltaErrorMetrics, layers: Sequence[int] | None, window: Window
) -> list[AttentionErrors]:
    """Return the errors of each attention, over the given layers or all, in the order of each attention's first run.

    Raises:
        UserError: a run has not measured it, or has no such layer.
    """
    groups: dict[str, list[Relative]] = {}
    for run in runs:
        relative = Relative.of(run, error, window)
        if layers:
            relative = relative.layers(_known(run, layers, len(relative.biases)))
        groups.setdefault(run.title, []).append(relative)
    return [
        AttentionErrors(title, np.array([one.bias for one in members]), np.array([one.variance for one in members]))
        for title, members in groups.items()
    ]


def _known(run: Run, layers: Sequence[int], count: int) -> Sequence[int]:
    if unknown := [layer for layer in layers if not 1 <= layer <= count]:
        raise UserError(f"{run.where}: --layers {unknown[0]}: it has layers 1 to {count}")
    return layers
