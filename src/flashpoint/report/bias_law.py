"""Several roundings on the same weights: is the bias of δ one factor times the square of its noise?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flashpoint.report.bias import Relative, Window
from flashpoint.report.figures import colour
from flashpoint.report.intervals import mean_interval
from flashpoint.report.series import RecordedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^P*X<>hp"


@dataclass(frozen=True)
class Point:
    """One run's hottest layer, in the unit of injected errors."""

    run: RecordedRun
    bias: float
    half: float
    """Half of the bias' 95 % interval over the observed steps, Student's t; 0 for one step."""
    variance: float
    """Square of the noise."""

    @classmethod
    def of(cls, run: RecordedRun, window: Window) -> Point:
        """Raises UserError where the run has not measured the error of δ."""
        one = Relative.of(run, "delta_error", window).layers([run.hottest_layer])
        bias, half = mean_interval(one.biases.mean((0, 1)))
        return cls(run, bias, half or 0.0, one.variance)

    @property
    def independent(self) -> bool:
        """Whether δ is independent of the error of the O that the loss sees, so that curvature expects no bias."""
        return self.run.attention.delta == "out_independent"

    @property
    def factor(self) -> float:
        """Bias / noise²."""
        return self.bias / self.variance


def by_weights(runs: Sequence[RecordedRun], window: Window) -> dict[str, list[Point]]:
    """Points of the runs that branched off at one step of one run, under these; others under their own names."""
    groups: dict[str, list[Point]] = {}
    for run in runs:
        name = f"step {run.origin[1]:,} of {Path(run.origin[0]).name}" if run.origin else run.name
        groups.setdefault(name, []).append(Point.of(run, window))
    return groups


def draw_law(groups: dict[str, list[Point]]) -> Figure:
    """Bias against noise² of each point, and for each set of weights the line of its mean factor.

    A bias whose interval reaches zero is a ▽ at the upper end of that.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    panel = figure.subplots()
    every = [point.variance for points in groups.values() for point in points]
    ends = np.array([min(every) / 2, max(every) * 2])
    for number, (weights, points) in enumerate(groups.items()):
        marker = _MARKERS[number % len(_MARKERS)]
        for point in points:
            line = colour(point.run.variant)
            if point.bias > point.half:
                panel.errorbar(
                    point.variance, point.bias, yerr=point.half, color=line, marker=marker, markersize=5, capsize=2
                )
            else:
                panel.plot(point.variance, point.bias + point.half, "v", color=line, fillstyle="none")
        if known := [point.factor for point in points if not point.independent]:
            factor = float(np.mean(known))
            panel.plot(ends, factor * ends, color="0.7", linewidth=1, zorder=0)
            panel.plot([], [], marker, color="0.4", label=f"{weights}: {factor:.1f} × noise²")
    for variant in dict.fromkeys(point.run.variant for points in groups.values() for point in points):
        panel.plot([], [], "s", color=colour(variant), label=variant)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("noise² of δ, in units of (|dO||O|)²")
    panel.set_ylabel("bias of δ, in units of |dO||O| (95 %)\n▽: upper end of an interval that includes 0")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    return figure
