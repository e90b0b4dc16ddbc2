"""The bias of δ over time, layer by layer, in the unit of injected errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.runs.metric_table import DeltaErrorMetrics
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Trajectory:
    """The runs that have no onset yet, as long as they are no fewer than those that have one."""

    interval: int
    """Steps."""
    values: list[NDArray[np.float64]]
    """One [runs, layers] for each interval of time: Σ error / Σ |dO|·|O|, a mean over heads and observed steps."""

    @property
    def biases(self) -> NDArray[np.float64]:
        """Means over the runs, [layers, intervals]."""
        return np.array([of_interval.mean(0) for of_interval in self.values]).T

    def variant(self, name: str) -> dict[str, Any]:
        """Return, as plain values, ``flash_exact_rowsum`` with these biases injected into δ."""
        factors = [[float(f"{value:.4g}") for value in of_layer] for of_layer in self.biases]
        return {
            "name": name,
            "scores": {"mode": "nearest"},
            "out_unnormalized": {"mode": "nearest"},
            "exact_row_sum": True,
            "delta_error": {"kind": "bias", "size": 1.0, "interval": self.interval, "trajectory": factors},
        }


def trajectory(runs: Sequence[Run], error: DeltaErrorMetrics, interval: int) -> Trajectory:
    """Measure a trajectory.

    Args:
        runs: of one model.
        error: of δ, against which exact one.
        interval: steps of one value.

    Raises:
        UserError: a run has not measured the error, observed too seldom for the interval, or has another model.
    """
    of_runs = [_of_run(run, error, interval) for run in runs]
    layers = {len(of_run) for of_run in of_runs}
    if len(layers) > 1:
        raise UserError(f"runs of {' and '.join(map(str, sorted(layers)))} layers: name runs of one model")
    with_onset = [of_run for run, of_run in zip(runs, of_runs, strict=True) if run.onset is not None]
    values: list[NDArray[np.float64]] = []
    for number in range(max(of_run.shape[1] for of_run in of_runs)):
        present = [of_run[:, number] for of_run in of_runs if number < of_run.shape[1]]
        if len(present) < sum(number >= of_run.shape[1] for of_run in with_onset):
            break
        values.append(np.array(present))
    if not values:
        raise UserError("most runs have their onset in the first interval: give a smaller --every")
    return Trajectory(interval, values)


def _of_run(run: Run, error: DeltaErrorMetrics, interval: int) -> NDArray[np.float64]:
    """Return the means over heads and observed steps [L, n] of a run, up to its onset."""
    steps, biases = run.measured_by_head(error.bias.name)
    if run.onset is not None:
        biases, steps = biases[..., steps < run.onset], steps[steps < run.onset]
    of_layers = biases.mean(1)
    numbers = steps // interval
    count = int(numbers[-1]) + 1 if len(numbers) else 0
    if missing := [number for number in range(count) if number not in numbers]:
        raise UserError(
            f"{run.where}: no observed step from {missing[0] * interval:,} to {(missing[0] + 1) * interval:,}; "
            "give a larger --every"
        )
    means = [of_layers[:, numbers == number].mean(1) for number in range(count)]
    return np.array(means).T if means else np.empty((len(of_layers), 0))
