"""What the figures share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flashpoint.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure whole, in the format of the path's suffix; a link there is replaced, and not followed.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_write(path, durable=False) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower())


def literal(name: str) -> str:
    """Return text that Matplotlib draws as it stands: formulas are between dollars, and a legend leaves out what begins
    with an underscore."""
    return f"{' ' if name.startswith('_') else ''}{name}".replace("$", r"\$")


def set_log_scale(panel: Axes, *others: Axes) -> None:
    """Logarithmic, unless no line in it, or in others that will have its axis, has a positive value: such an axis
    cannot be drawn."""
    if any((of_line > 0).any() for one in (panel, *others) for of_line in _curves(one)):
        panel.set_yscale("log")


def set_symlog_scale(panel: Axes, *others: Axes) -> None:
    """Linear up to the median of the curves' largest sizes and logarithmic beyond, if one is over ten times the median:
    it leaves the others their room. Curves that are 0 do not count, and those of other panels that will have its axis
    do."""
    sizes = [np.abs(of_line).max(initial=0) for one in (panel, *others) for of_line in _curves(one)]
    sizes = [size for size in sizes if size]
    if sizes and max(sizes) > 10 * np.median(sizes):
        panel.set_yscale("symlog", linthresh=np.median(sizes))


def _curves(panel: Axes) -> list[NDArray[np.float64]]:
    """Return the finite values of each curve; the line of an onset is none."""
    lines = [line for line in panel.lines if line.get_transform() == panel.transData]
    values = [np.asarray(line.get_ydata(orig=False), np.float64) for line in lines]
    return [of_line[np.isfinite(of_line)] for of_line in values]
