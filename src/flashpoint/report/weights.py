"""The figure of how far weights come apart: Golden et al.'s figures 7 and 8, with an interval over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashpoint.analysis.weights import Apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_weights(groups: Mapping[str, Sequence[Apart]]) -> Figure:
    """Draw the largest difference and W₁ over steps: a line for each run, a colour for each difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, name, title in zip(panels, ("largest", "wasserstein"), ("largest difference", "W₁"), strict=True):
        for number, (kind, members) in enumerate(groups.items()):
            for one in members:
                values = getattr(one, name)
                shown = np.where(np.isfinite(values) & (values > 0), values, np.nan)
                label = kind if one is members[0] and name == "largest" else None
                panel.plot(one.steps, shown, color=f"C{number % 10}", linewidth=1, alpha=0.8, label=label)
        panel.set_yscale("log")
        panel.set_xlabel("optimiser step")
        panel.set_ylabel(f"{title} of the weights")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, title="the two runs differ in", loc="outside lower center", ncols=3)
    return figure
