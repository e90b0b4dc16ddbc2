"""Metrics of a run at the steps at which all of them were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError, nearest
from flashpoint.runs.metrics import Series
from flashpoint.runs.run import Run

Head = tuple[int, int]
"""Layer and head, from 1."""


def metric_series(run: Run, name: str, head: Head | None) -> Series:
    """Return the steps [n] and values [n] of a metric of the run, or of one of heads with the head.

    Args:
        name: ``loss``, ``w_q_spectral_norm``, or with the layer and head of its own ``2/1/w_q_spectral_norm``.

    Raises:
        UserError: the run has not measured it, or has no such head.
    """
    own, head = _split(name, head)
    if own not in run.columns:
        known = sorted(known for known, (_, values) in run.columns.items() if head is None or values.ndim == 3)
        there = f"it has {', '.join(known)}" if known else "its metrics hold nothing"
        raise UserError(f"{run.where}: no metric {own}; {nearest(own, known)}{there}")
    steps, values = run.columns[own]
    if values.ndim == 1:
        return steps, values
    layers, heads, _ = values.shape
    if head is None or not (1 <= head[0] <= layers and 1 <= head[1] <= heads):
        raise UserError(f"{run.where}: {own} is of a head; give --head LAYER/HEAD, one of 1/1 to {layers}/{heads}")
    return steps, values[head[0] - 1, head[1] - 1]


def together(series: Sequence[Series], every: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps [n] and values [metrics, n] at the last step of each ``every`` that all have.

    Of a run that has every step these are the ``every``-th ones, and the last; one that is thinned may lack them.
    """
    common = series[0][0]
    for steps, _ in series[1:]:
        common = np.intersect1d(common, steps)
    chosen = common[np.diff(common // every, append=-1) != 0]
    return chosen, np.array([values[np.searchsorted(steps, chosen)] for steps, values in series])


def _split(name: str, head: Head | None) -> tuple[str, Head | None]:
    match name.split("/"):
        case [layer, number, own] if layer.isdecimal() and number.isdecimal():
            return own, (int(layer), int(number))
    return name, head
