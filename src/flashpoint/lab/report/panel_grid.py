"""Panels of many runs in one figure: their places in inches, and one frame for all that have the same axes.

Matplotlib's own layout measures every label of every panel, twice, and its shared axes look each other up: of 64 runs
that takes minutes. Here places are given by the lines of text that there are, and of the panels of a row the first one
alone has axes of Matplotlib's. The others have copies of their lines and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABREAST = 3
"""Runs whose panels have room side by side; the others' go on below."""
COLOUR_BAR = "<colorbar>"
"""The label of axes that are no panel."""
_DPI = 110
"""A figure of three columns has 1,386 pixels, and the page shows it at 1,120 at most."""
_LEFT, _RIGHT, _BETWEEN = 1.1, 0.15, 0.25
"""Inches: beside the first column with its numbers and label, beside the last one, and between two."""
_X_LABEL, _Y_LABEL = 0.29, 0.82
"""Inches from an axis to its label: below it the top, beside it the middle of one line."""
_FOOT = 0.55
"""Inches below a panel with numbers and a label."""
_TITLE_LINE = 0.165
"""Inches that a line of a title takes."""
_ABOVE = 0.14
"""Inches around a title."""
_TICK, _MINOR_TICK = 3.5 / 72, 2.0 / 72


@dataclass(frozen=True)
class PanelGrid:
    """A figure with panels [rows, count], a column for each run: :func:`_abreast` of them side by side, the next ones
    below."""

    figure: Figure
    panels: Any
    """An array of :class:`matplotlib.axes.Axes`."""
    columns: int
    height: float
    """Of a panel, inches."""
    title_lines: int
    """Of the titles of the first row, at most; those of the others have one."""
    between: float
    """Inches from column to column."""
    right: float
    """Inches that stay free at the right."""
    below: float
    """Inches that stay free below the last row of a run, and below its numbers and label."""

    def place(self, foot: float = 0.0) -> None:
        """Give all panels their places, and the figure its height.

        Args:
            foot: inches that stay free at the bottom.
        """
        rows, count = self.panels.shape
        first, other = (_ABOVE + _TITLE_LINE * lines for lines in (self.title_lines, 1 if self.title_lines else 0))
        of_run = first + (rows - 1) * other + rows * self.height + _FOOT + self.below
        whole = of_run * math.ceil(count / self.columns) + foot
        wide = self.figure.get_figwidth()
        width = (wide - _LEFT - self.right - (self.columns - 1) * self.between) / self.columns
        self.figure.set_figheight(whole)
        for (row, number), panel in np.ndenumerate(self.panels):
            down, across = divmod(number, self.columns)
            bottom = whole - down * of_run - first - row * (self.height + other) - self.height
            left = _LEFT + across * (width + self.between)
            panel.set_position((left / wide, bottom / whole, width / wide, self.height / whole))
            panel.xaxis.set_label_coords(0.5, -_X_LABEL / self.height)
            panel.yaxis.set_label_coords(-_Y_LABEL / width, 0.5)

    def share_steps(self) -> None:
        """Let all panels begin and end at the same steps."""
        first = self.panels[0, 0]
        for panel in self.panels.flat[1:]:
            first.update_datalim(_corners(panel), updatey=False)
        first.autoscale_view(scaley=False)
        for panel in self.panels.flat:
            panel.set_xlim(first.get_xlim())

    def share_axes(self) -> None:
        """Let the panels of a row have the axes of its first one, which then has room for all values, and all panels
        the same steps. Copies of its lines and numbers stand in the place of the others' own axes."""
        for first, *others in self.panels:
            for panel in others:
                first.update_datalim(_corners(panel))
            first.autoscale_view(scalex=False)
        self.share_steps()
        for row, (first, *others) in enumerate(self.panels):
            frame = _Frame.of(first, *self._size(first)) if others else None
            scale = first.yaxis.get_transform()
            options = {"linthresh": scale.linthresh} if first.get_yscale() == "symlog" else {}
            for number, panel in enumerate(others, 1):
                assert frame
                if first.get_yscale() != "linear":
                    panel.set_yscale(first.get_yscale(), **options)
                panel.set_ylim(first.get_ylim())
                frame.draw_in(panel, below=row == len(self.panels) - 1, left=number % self.columns == 0)

    def _size(self, panel: Axes) -> tuple[float, float]:
        place = panel.get_position()
        return place.width * self.figure.get_figwidth(), place.height * self.figure.get_figheight()


def panel_grid(
    rows: int,
    count: int,
    *,
    height: float,
    title_lines: int = 1,
    between: float = _BETWEEN,
    right: float = _RIGHT,
    below: float = 0.0,
) -> PanelGrid:
    """Return panels [rows, count] in a new figure; the arguments are those of :class:`PanelGrid`."""
    from matplotlib.figure import Figure  # matplotlib takes half a second to import

    columns = _abreast(count)
    figure = Figure(figsize=(max(5.4, 4.2 * columns), height), dpi=_DPI)
    panels = np.array([[figure.add_axes((0, 0, 1, 1), label=f"{row} {number}") for number in range(count)]
                       for row in range(rows)])  # fmt: skip
    grid = PanelGrid(figure, panels, columns, height, title_lines, between, right, below)
    grid.place()
    return grid


def columns_of(figure: Figure) -> int:
    """Return how many panels stand side by side."""
    return len({round(panel.get_position().x0, 6) for panel in figure.axes if panel.get_label() != COLOUR_BAR})


def _abreast(count: int) -> int:
    """Return how many of so many runs stand side by side: four as two and two, which leaves no gap."""
    return 2 if count == 4 else min(count, ABREAST)


def _corners(panel: Axes) -> NDArray[np.float64]:
    """Return points [n, 2] that have the range of a panel's values, and of the positive ones."""
    limits = panel.dataLim
    points = np.array([limits.p0, limits.p1, (limits.minposx, limits.minposy)])
    return points[np.isfinite(points).all(1)]


_Line = list[tuple[float, float]]
"""Its two ends."""


@dataclass(frozen=True)
class _Frame:
    """The grid, ticks and numbers of a panel, in parts of its width and height."""

    grid: list[_Line]
    ticks: list[_Line]
    """The two axes and their ticks."""
    x_numbers: Sequence[tuple[float, str]]
    y_numbers: Sequence[tuple[float, str]]
    width: float
    height: float
    """Of the panel, inches."""

    @classmethod
    def of(cls, panel: Axes, width: float, height: float) -> _Frame:
        to_parts = panel.transScale + panel.transLimits
        grid, ticks = list[_Line](), list[_Line]([[(0.0, 0.0), (0.0, 1.0)], [(0.0, 0.0), (1.0, 0.0)]])
        numbers: list[list[tuple[float, str]]] = [[], []]
        for way, axis in enumerate((panel.xaxis, panel.yaxis)):
            low, high = sorted(axis.get_view_interval())
            for minor, length in ((False, _TICK), (True, _MINOR_TICK)):
                places = [float(place) for place in (axis.get_minorticklocs() if minor else axis.get_majorticklocs())]
                formatter = axis.get_minor_formatter() if minor else axis.get_major_formatter()
                for place, text in zip(places, formatter.format_ticks(places), strict=True):
                    if not low <= place <= high:
                        continue
                    at = [panel.get_xlim()[0], panel.get_ylim()[0]]
                    at[way] = place
                    part = float(to_parts.transform(at)[way])
                    if way == 0:
                        whole, tick = [(part, 0.0), (part, 1.0)], [(part, -length / height), (part, 0.0)]
                    else:
                        whole, tick = [(0.0, part), (1.0, part)], [(-length / width, part), (0.0, part)]
                    ticks.append(tick)
                    grid += [] if minor else [whole]
                    numbers[way] += [(part, text)] if text else []
            if offset := axis.get_major_formatter().get_offset():
                numbers[way].append((1.0 + 0.1 * way, offset))
        return cls(grid, ticks, numbers[0], numbers[1], width, height)

    def draw_in(self, panel: Axes, *, below: bool, left: bool) -> None:
        """Give a panel without axes of its own the lines; numbers and label where it is the lowest of its run, or the
        first at the left."""
        from matplotlib.collections import LineCollection

        panel.set_axis_off()
        shared: dict[str, Any] = {"transform": panel.transAxes, "linewidth": 0.8}
        panel.add_collection(LineCollection(self.grid, color="#b0b0b0", alpha=0.25, zorder=1.5, **shared), False)
        panel.add_collection(LineCollection(self.ticks, color="black", clip_on=False, **shared), False)
        if below:
            for part, text in self.x_numbers:
                panel.text(part, -2 * _TICK / self.height, text, transform=panel.transAxes, ha="center", va="top")
            at = (0.5, -_X_LABEL / self.height)
            panel.text(*at, panel.get_xlabel(), transform=panel.transAxes, ha="center", va="top")
        if left:
            for part, text in self.y_numbers:
                panel.text(-2 * _TICK / self.width, part, text, transform=panel.transAxes, ha="right", va="center")
            at = (-_Y_LABEL / self.width, 0.5)
            style: dict[str, Any] = {"rotation": "vertical", "rotation_mode": "anchor", "ha": "center", "va": "bottom"}
            panel.text(*at, panel.get_ylabel(), transform=panel.transAxes, **style)
