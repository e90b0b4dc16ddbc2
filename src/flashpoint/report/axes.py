"""What the figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def set_log_scale(panel: Axes) -> None:
    """Logarithmic, unless no line in it has a positive value: such an axis cannot be drawn."""
    values = [np.asarray(line.get_ydata(orig=False)) for line in panel.lines if line.get_transform() == panel.transData]
    if any((np.isfinite(of_line) & (of_line > 0)).any() for of_line in values):
        panel.set_yscale("log")
