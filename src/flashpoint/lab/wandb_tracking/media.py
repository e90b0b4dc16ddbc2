"""What W&B shows of all layers and heads at once: histograms, and heat maps over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.runs.metric_table import VALIDATION_LOSS, W_Q_NORM

_LOW, _HIGH = 0.3, 300.0
"""W_Q norms at the ends of the colours: at initialisation, and well into an explosion."""
_WIDTH, _ROW = 720, 12
"""Pixels."""


class HeadMedia:
    """Takes the metrics of a run as they come."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._norms: list[NDArray[np.float64]] = []

    def of(self, step: int, metrics: Mapping[str, float | NDArray[np.floating]]) -> dict[str, Any]:
        """W&B's objects to log beside the metrics: of every metric of heads a histogram, and with each validation a
        heat map of W_Q's norms so far."""
        import wandb

        of_heads = {name: np.asarray(value) for name, value in metrics.items() if isinstance(value, np.ndarray)}
        finite = {name: values[np.isfinite(values)] for name, values in of_heads.items()}
        media: dict[str, Any] = {f"heads/{name}": wandb.Histogram(v.tolist()) for name, v in finite.items() if len(v)}
        if W_Q_NORM.name in of_heads:
            self._steps.append(step)
            self._norms.append(of_heads[W_Q_NORM.name])
        if VALIDATION_LOSS.name in metrics and self._steps:
            by_head = np.array(self._norms).reshape(len(self._norms), -1)
            media[f"heat_map/{W_Q_NORM.name}"] = wandb.Image(heat_map(by_head), caption=self._caption())
        return media

    def _caption(self) -> str:
        layers, heads = self._norms[0].shape
        return (
            f"{W_Q_NORM.axis}. Rows: layer 1, head 1 (top) to layer {layers}, head {heads}, {layers * heads} in all; "
            f"columns: steps {self._steps[0]:,} to {self._steps[-1]:,}; "
            f"colours: {_LOW:g} (black) to {_HIGH:g} (yellow), logarithmic"
        )


def heat_map(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the values [measurements, heads] as a picture [heads · 12, 720, 3], time from left to right; grey is no
    number."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    columns = np.arange(_WIDTH) * len(values) // _WIDTH
    share = LogNorm(_LOW, _HIGH, clip=True)(np.where(values > 0, values, _LOW))
    colours = colormaps["magma"](share, bytes=True)[..., :3]
    colours[~np.isfinite(values)] = 128
    picture: NDArray[np.uint8] = colours[columns].swapaxes(0, 1).repeat(_ROW, axis=0)
    return picture
