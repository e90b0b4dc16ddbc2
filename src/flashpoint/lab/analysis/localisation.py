"""Quantities by layer, and whether the largest is of the layer that explodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.lab.analysis.bias import Relative, Sums, Window
from flashpoint.runs.metric_table import DELTA_ERROR, DELTA_ERROR_SUM
from flashpoint.runs.run import Run

SENSITIVITY = "sensitivity"
"""N·|dO_i|·|O_i|, the nats of the step's summed loss by which one row of O changes it, to first order."""


@dataclass(frozen=True)
class Localisation:
    """In how many of several explosions the quantity was largest in the layer that exploded."""

    right: int
    explosions: int
    layers: dict[int, int]
    """How many explosions each layer (from 1) had."""


def by_layer(quantity: str, run: Run, window: Window) -> NDArray[np.float64]:
    """Return the mean over heads and steps of each layer, [L]; the root mean square for :data:`SENSITIVITY`.

    Raises:
        UserError: the run has not measured it.
    """
    if quantity == SENSITIVITY:
        sums, relative = Sums.of(run, window), Relative.of(run, DELTA_ERROR, window)
        run.check_together(DELTA_ERROR_SUM.name, DELTA_ERROR.noise.name)
        # NaN where δ takes no part of O's error.
        return np.array([sums.sensitivity(relative, layer + 1) for layer in range(len(sums.by_step))])
    steps, values = run.measured_by_head(quantity)
    means: NDArray[np.float64] = values[..., window.of(run, steps)].mean((1, 2))
    return means


def localisation(verdicts: Sequence[Run], found: Sequence[NDArray[np.float64]]) -> Localisation:
    """Count over the runs that exploded and have a value in a layer.

    Args:
        verdicts: runs that know the onset and the hottest layer.
        found: values [L] of each.
    """
    exploding = [
        (verdict.hottest_layer, 1 + int(np.nanargmax(values)))
        for verdict, values in zip(verdicts, found, strict=True)
        if verdict.onset is not None and not np.isnan(values).all()
    ]
    layers = sorted(Counter(layer for layer, _ in exploding).items())
    return Localisation(sum(layer == largest for layer, largest in exploding), len(exploding), dict(layers))
