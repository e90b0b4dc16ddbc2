"""What the figures share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import escaped
from flashpoint.files import atomic_write
from flashpoint.runs.metrics import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LARGEST = 1e100
"""No format of a training holds more, and Matplotlib scales no axis to much more."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure whole, in the format of the path's suffix; a link there is replaced, and not followed.

    Raises:
        OSError: it cannot be written.
    """
    kind = path.suffix[1:].lower()
    packed: dict[str, Any] = {}
    if kind == "png":
        packed["pil_kwargs"] = {"compress_level": 1}  # more hardly shrinks curves
    with atomic_write(path, durable=False) as partial, boxes_for_missing_glyphs():
        figure.savefig(partial, format=kind, **packed)


def drawable(series: Series) -> Series:
    """Return a series without sizes beyond :data:`LARGEST`, and with 0 for those below its inverse."""
    steps, values = series
    sizes = np.abs(values)
    return steps, np.where(sizes < 1 / LARGEST, 0.0, np.where(sizes < LARGEST, values, np.nan))


@contextlib.contextmanager
def boxes_for_missing_glyphs() -> Iterator[None]:
    """Draw a box for a character that the font lacks, as of a name in another script, and say nothing of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def literal(name: str) -> str:
    """Return text that Matplotlib draws as it stands: formulas are between dollars, and a legend leaves out what begins
    with an underscore. What does not print is escaped."""
    return f"{' ' if name.startswith('_') else ''}{escaped(name)}".replace("$", r"\$")


def draw_open_frame(panel: Axes) -> None:
    """Draw a faint grid, and no frame at the top and the right."""
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def set_log_scale(panel: Axes) -> None:
    """Logarithmic, unless :func:`log_scale` says otherwise."""
    lines = [line for line in panel.lines if line.get_transform() == panel.transData]  # that of an onset is none
    values = [np.asarray(line.get_ydata(orig=False), np.float64) for line in lines]
    if options := log_scale([of_line[np.isfinite(of_line)] for of_line in values]):
        panel.set_yscale(**options)


def log_scale(curves: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """Return the options of a logarithmic axis for the finite values of curves. There are none, which is linear, if no
    value is positive: such an axis cannot be drawn."""
    return {"value": "log"} if any((of_line > 0).any() for of_line in curves) else {}


def symlog_scale(curves: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """Return the options of an axis that is linear up to the median of the curves' largest sizes and logarithmic
    beyond, if one is over ten times the median: it leaves the others their room. Curves that are 0 do not count."""
    sizes = [size for of_line in curves if (size := np.abs(of_line).max(initial=0))]
    if sizes and max(sizes) > 10 * np.median(sizes):
        return {"value": "symlog", "linthresh": np.median(sizes)}
    return {}
