"""Figure of several roundings on the same weights: the bias of δ against the square of its noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashpoint.lab.analysis.bias_law import Point
from flashpoint.lab.report.axes import draw_open_frame, literal, set_log_scale
from flashpoint.lab.report.colours import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^P*X<>hp"


def draw_law(groups: dict[str, list[Point]]) -> Figure:
    """Draw the bias against noise² of each point, and for each set of weights the line of its mean factor.

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
        panel.plot([], [], "s", color=colour(variant), label=literal(variant))
    panel.set_xscale("log")
    set_log_scale(panel)
    panel.set_xlabel("noise² of δ, in units of (|dO||O|)²")
    panel.set_ylabel("bias of δ, in units of |dO||O| (95 %)\n▽: upper end of an interval that includes 0")
    draw_open_frame(panel)
    panel.legend(frameon=False, fontsize=8)
    return figure
