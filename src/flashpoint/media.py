"""What W&B shows of all layers and heads at once: histograms, and heat maps over steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NORM = re.compile(r"layer/(\d+)/head/(\d+)/w_q_spectral_norm")
_LOW, _HIGH = 0.3, 300.0
"""W_Q norms at the ends of the colours: at initialisation, and well into an explosion."""
_WIDTH, _ROW = 720, 12
"""Pixels."""


class HeadMedia:
    """Takes the metrics of a run as they come."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._norms: list[list[float]] = []
        self._heads: list[tuple[int, int]] = []

    def of(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """W&B's objects to log beside the metrics: of every metric that each head has a histogram, and with each
        validation a heat map of W_Q's norms so far."""
        import wandb

        by_name: dict[str, list[float]] = {}
        for name, value in metrics.items():
            if name.startswith("layer/") and math.isfinite(value):
                by_name.setdefault(name.rpartition("/")[2], []).append(value)
        media: dict[str, Any] = {f"heads/{name}": wandb.Histogram(values) for name, values in by_name.items()}
        norms = {(int(m[1]), int(m[2])): value for name, value in metrics.items() if (m := _NORM.fullmatch(name))}
        if norms:
            self._steps.append(step)
            self._norms.append(list(norms.values()))
            self._heads = list(norms)
        if "val_loss" in metrics and self._steps:
            media["heat_map/w_q_spectral_norm"] = wandb.Image(heat_map(np.array(self._norms)), caption=self._caption())
        return media

    def _caption(self) -> str:
        (first, last), heads = (self._heads[0], self._heads[-1]), len(self._heads)
        return (
            f"W_Q spectral norm. Rows: layer {first[0]}, head {first[1]} (top) to layer {last[0]}, head {last[1]}, "
            f"{heads} in all; columns: steps {self._steps[0]:,} to {self._steps[-1]:,}; "
            f"colours: {_LOW:g} (black) to {_HIGH:g} (yellow), logarithmic"
        )


def heat_map(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Values [measurements, heads] as a picture [heads · 12, 720, 3], time from left to right; grey is no number."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    columns = np.arange(_WIDTH) * len(values) // _WIDTH
    share = LogNorm(_LOW, _HIGH, clip=True)(np.where(values > 0, values, _LOW))
    colours = colormaps["magma"](share, bytes=True)[..., :3]
    colours[~np.isfinite(values)] = 128
    picture: NDArray[np.uint8] = colours[columns].swapaxes(0, 1).repeat(_ROW, axis=0)
    return picture
