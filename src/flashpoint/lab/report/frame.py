"""The axes of a panel as lines and texts, in inches: Matplotlib says where its ticks are, and draws none itself."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICK, MINOR_TICK = 3.5 / 72, 2.0 / 72
"""Inches that a tick takes. As much again is free between it and its number."""
_X_LABEL = 0.29
"""Inches from an axis to the top of its label below."""
_DIGIT = 0.64
"""Of the size of a font, the width of a digit of Matplotlib's own."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


Line = list[tuple[float, float]]
"""Its two ends."""


def box(left: float, bottom: float, right: float, top: float) -> list[Line]:
    """Return four sides."""
    corners = [(left, bottom), (left, top), (right, top), (right, bottom), (left, bottom)]
    return [list(ends) for ends in pairwise(corners)]


def bare_axes(width: float, height: float) -> Axes:
    """Return axes of a size in inches, which nobody draws."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height)).add_axes((0, 0, 1, 1))


def write(figure: Figure, x: float, y: float, text: str, **look: Any) -> None:
    """Write at a place in inches; ``look`` has properties of :class:`matplotlib.text.Text`."""
    if text:
        figure.text(x, y, text, transform=figure.dpi_scale_trans, **look)


def _plain(label: str) -> str:
    r"""Return the label of a tick without a formula, of which Matplotlib takes milliseconds to read each:
    ``$\mathdefault{2\times10^{-1}}$`` is 2 × 10⁻¹."""
    label = re.sub(r"\$\\mathdefault\{(.*)\}\$", r"\1", label).replace(r"\times", " × ")
    label = re.sub(r"\^\{(-?\d+)\}", lambda power: power[1].translate(_SUPERSCRIPT), label)
    return label.replace("-", "−")


@dataclass
class Lines:
    """Lines of all panels, in inches."""

    grid: list[Line] = field(default_factory=list)
    ticks: list[Line] = field(default_factory=list)
    """With the axes themselves."""

    def add_to(self, figure: Figure) -> None:
        from matplotlib.collections import LineCollection

        shared: dict[str, Any] = {"transform": figure.dpi_scale_trans, "linewidth": 0.8}
        figure.add_artist(LineCollection(self.grid, color="#b0b0b0", alpha=0.25, zorder=1.5, **shared))
        figure.add_artist(LineCollection(self.ticks, color="black", zorder=2.5, capstyle="projecting", **shared))


@dataclass(frozen=True)
class Ticks:
    """Those of an axis, in inches from its beginning."""

    places: list[float]
    minor: list[float]
    numbers: list[tuple[float, str]]
    offset: str
    """What all numbers are to be multiplied by, or have to be added."""

    @classmethod
    def of(cls, axes: Axes, way: int, length: float) -> Ticks:
        """Return those of the x axis, which is way 0, or of the y axis, which is 1, of a length in inches."""
        axis = (axes.xaxis, axes.yaxis)[way]
        to_parts = axes.transScale + axes.transLimits
        low, high = sorted(axis.get_view_interval())
        corner = axes.get_xlim()[0], axes.get_ylim()[0]
        at: tuple[list[float], list[float]] = ([], [])
        numbers: list[tuple[float, str]] = []
        for minor, places in enumerate((axis.get_majorticklocs(), axis.get_minorticklocs())):
            formatter = axis.get_minor_formatter() if minor else axis.get_major_formatter()
            for place, text in zip(places, formatter.format_ticks([*places]), strict=True):
                if low <= place <= high:
                    point = (place, corner[1]) if way == 0 else (corner[0], place)
                    part = length * float(to_parts.transform(point)[way])
                    at[minor].append(part)
                    numbers += [(part, _plain(text))] if text else []
        return cls(*at, numbers if way else _apart(numbers), _plain(axis.get_major_formatter().get_offset()))


def _apart(numbers: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the numbers of an axis below a panel, or every second or third of them, so that none touches the next."""
    from matplotlib import rcParams

    if len(numbers) < 2:
        return numbers
    digit = _DIGIT * float(rcParams["font.size"]) / 72
    widest = (1 + max(len(text) for _, text in numbers)) * digit
    closest = min(abs(there - here) for (here, _), (there, _) in pairwise(numbers))
    return numbers[:: math.ceil(widest / closest)]


@dataclass(frozen=True)
class Frame:
    """The axes of a panel, its ticks and numbers."""

    x: Ticks
    y: Ticks
    width: float
    height: float
    """Of the panel, inches."""

    @classmethod
    def of(cls, axes: Axes, width: float, height: float) -> Frame:
        return cls(Ticks.of(axes, 0, width), Ticks.of(axes, 1, height), width, height)

    def draw(
        self, figure: Figure, lines: Lines, left: float, bottom: float, *, below: bool, beside: bool, boxed: bool
    ) -> None:
        """Draw it at a place in the figure.

        Args:
            lines: to which its lines are added.
            below: whether it has numbers and a label below.
            beside: whether it has numbers at the left.
            boxed: whether it has lines at all four sides, and no grid.
        """
        right, top = left + self.width, bottom + self.height
        if boxed:
            lines.ticks += box(left, bottom, right, top)
        else:
            lines.ticks += [[(left, bottom), (left, top)], [(left, bottom), (right, bottom)]]
            lines.grid += [[(left + at, bottom), (left + at, top)] for at in self.x.places]
            lines.grid += [[(left, bottom + at), (right, bottom + at)] for at in self.y.places]
        for length, x, y in ((TICK, self.x.places, self.y.places), (MINOR_TICK, self.x.minor, self.y.minor)):
            lines.ticks += [[(left + at, bottom - length), (left + at, bottom)] for at in x]
            lines.ticks += [[(left - length, bottom + at), (left, bottom + at)] for at in y]
        if below:
            for at, text in self.x.numbers:
                write(figure, left + at, bottom - 2 * TICK, text, ha="center", va="top")
            write(figure, left + self.width / 2, bottom - _X_LABEL, "optimiser step", ha="center", va="top")
            write(figure, right, bottom - _X_LABEL, self.x.offset, ha="right", va="top")
        if beside:
            for at, text in self.y.numbers:
                write(figure, left - 2 * TICK, bottom + at, text, ha="right", va="center_baseline")
            write(figure, left, top + TICK, self.y.offset, ha="left", va="bottom")
