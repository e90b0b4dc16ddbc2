"""Panels of many runs in one figure, as lines and texts at places in inches.

Matplotlib's own axes would measure every label of every panel, and each takes as long to make as all of its curves:
64 runs have more than a thousand. Here they find the limits and ticks of a row once. All of its panels have these, and
the lines and numbers are drawn without axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.lab.report.axes import drawable
from flashpoint.lab.report.frame import MINOR_TICK, TICK, Frame, Lines, Ticks, bare_axes, box, write
from flashpoint.runs.metrics import Series

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

ABREAST = 3
"""Runs whose panels have room side by side; the others' go on below."""
_DPI = 110
"""A figure of three columns has 1,386 pixels, and the page shows it at 1,120 at most."""
_LEFT, _RIGHT, _BETWEEN = 1.1, 0.15, 0.25
"""Inches: beside the first column with its numbers and label, beside the last one, and between two."""
_Y_LABEL = 0.82
"""Inches from an axis to the last line of its label at the left."""
_FURTHER_LINE = 0.12
"""Inches by which a label at the left stands nearer for each further line."""
_FOOT = 0.55
"""Inches below a panel with numbers and a label."""
_TITLE_LINE = 0.165
"""Inches that a line of a title takes."""
_ABOVE = 0.14
"""Inches around a title."""
_TITLE = 6 / 72
"""Inches from a panel to its title."""
_LEGEND = 5.5
"""Font sizes from a panel to the names below it."""
_BAR, _BAR_WIDTH, _BAR_LABEL = 1.2, 0.15, 0.92
"""Inches from the right edge of the figure to a bar of colours, its width, and from it to the end of its label."""
_TONES = 256

Scale = Callable[[Sequence[NDArray[np.float64]]], dict[str, Any]]
"""Makes of the finite values of all curves of a row the options of ``Axes.set_yscale``; none is linear."""


@dataclass(frozen=True)
class Cells:
    """Values [m, n] at n steps as colours, in rows from above."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    names: Sequence[tuple[float, str]]
    """Names of rows, which count from 1, and their places."""
    norm: Normalize
    """Logarithmic."""
    cmap: str


@dataclass
class Plot:
    """What one panel shows of a run."""

    title: str = ""
    curves: list[Line2D] = field(default_factory=list)
    cells: Cells | None = None
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Steps, and the colours of dashed lines there."""
    names_below: int = 0
    """Columns of the names of the curves, below the panel; 0 is none there."""

    def draw(self, series: Series, **look: Any) -> None:
        """Add a curve; ``look`` has properties of :class:`matplotlib.lines.Line2D`."""
        from matplotlib.lines import Line2D

        self.curves.append(Line2D(*drawable(series), **look))

    def corners(self) -> NDArray[np.float64]:
        """Return points [n, 2] that have the range of the values, and of the positive ones."""
        ranges: list[tuple[float, float]] = []
        for curve in self.curves:
            steps, values = (np.asarray(data, np.float64) for data in curve.get_data(orig=True))
            finite = np.isfinite(values)
            if finite.any():
                steps, values = steps[finite], values[finite]
                ranges += [(steps.min(), values.min()), (steps.max(), values.max())]
                if (positive := values > 0).any():
                    ranges.append((steps.max(), values[positive].min()))
        if self.cells:
            edges = _edges(self.cells.steps)
            ranges += [(edges[0], 0.5), (edges[-1], len(self.cells.values) + 0.5)]
        return np.array(ranges).reshape(-1, 2)


@dataclass
class Row:
    """A panel of each run, with one axis for all of them."""

    plots: list[Plot]
    label: str = ""
    """Of the values: of curves at the left, of cells beside their colours."""
    scale: Scale | None = None
    """None is linear."""
    limits: tuple[float, float] = (0.0, 1.0)
    """Of the values, as they are drawn."""


@dataclass
class PanelGrid:
    """A figure of rows of panels, with a column for each run: up to :data:`ABREAST` of them side by side, the next ones
    below."""

    figure: Figure
    rows: list[Row]
    columns: int
    """Of panels side by side."""
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

    @property
    def width(self) -> float:
        """Of a panel, inches."""
        taken = _LEFT + self.right + (self.columns - 1) * self.between
        return (float(self.figure.get_figwidth()) - taken) / self.columns

    def finished(self, foot: float = 0.0) -> PanelGrid:
        """Give the figure its height, draw all panels in it, and return itself.

        Args:
            foot: inches that stay free at the bottom.
        """
        places = self._place(foot)
        corners = [[plot.corners() for plot in row.plots] for row in self.rows]
        marks = [float(step) for row in self.rows for plot in row.plots for step, _ in plot.marks]
        steps = [*marks, *np.concatenate([of_plot[:, 0] for of_row in corners for of_plot in of_row])]
        lines = Lines()
        axes = bare_axes(self.width, self.height)
        for row, of_row, of_panels in zip(self.rows, corners, places, strict=True):
            _set_axes(axes, row, steps, np.concatenate(of_row))
            row.limits = axes.get_ylim()
            frame = Frame.of(axes, self.width, self.height)
            for number, (plot, (left, bottom)) in enumerate(zip(row.plots, of_panels, strict=True)):
                if plot.cells:
                    axes.set_ylim(len(plot.cells.values) + 0.5, 0.5)
                    axes.set_yticks(*zip(*plot.cells.names, strict=True))
                    frame = Frame.of(axes, self.width, self.height)
                self._draw(plot, axes, left, bottom)
                first = number % self.columns == 0
                frame.draw(
                    self.figure, lines, left, bottom, below=row is self.rows[-1],
                    beside=first or plot.cells is not None, boxed=plot.cells is not None,
                )  # fmt: skip
                if first and not plot.cells:
                    self._write_beside(row.label, left, bottom)
            if row.plots[0].cells:
                self._add_colour_bar(lines, row.plots[0].cells, row.label, of_panels[-1][1], of_panels[0][1])
        lines.add_to(self.figure)
        return self

    def _place(self, foot: float) -> list[list[tuple[float, float]]]:
        """Give the figure its height, and return for each row where its panels begin, inches from the left and from
        below."""
        first, other = (_ABOVE + _TITLE_LINE * lines for lines in (self.title_lines, 1 if self.title_lines else 0))
        of_run = first + (len(self.rows) - 1) * other + len(self.rows) * self.height + _FOOT + self.below
        count = len(self.rows[0].plots)
        whole = of_run * math.ceil(count / self.columns) + foot
        self.figure.set_figheight(whole)
        return [
            [
                (
                    _LEFT + number % self.columns * (self.width + self.between),
                    whole - number // self.columns * of_run - first - row * (self.height + other) - self.height,
                )
                for number in range(count)
            ]
            for row in range(len(self.rows))
        ]

    def _draw(self, plot: Plot, axes: Axes, left: float, bottom: float) -> None:
        """Draw what stands in a panel, and its names, with the limits of the axes."""
        from matplotlib.lines import Line2D
        from matplotlib.transforms import Affine2D, Bbox, TransformedBbox

        inches = self.figure.dpi_scale_trans
        to_inches = Affine2D().scale(self.width, self.height).translate(left, bottom) + inches
        inside = TransformedBbox(Bbox.from_bounds(left, bottom, self.width, self.height), inches)
        to_parts: Any = (axes.transScale + axes.transLimits).frozen()  # the next row has the axes with other limits
        drawn: list[Artist] = [*plot.curves, *_cells(plot.cells)]
        for artist in drawn:
            artist.set_transform(to_parts + to_inches)
        low, high = axes.get_xlim()
        for step, colour in plot.marks:
            at = (step - low) / (high - low)
            drawn.append(Line2D([at, at], [0, 1], color=colour, linestyle="--", linewidth=1, transform=to_inches))
        for artist in drawn:
            artist.set_clip_box(inside)
            self.figure.add_artist(artist)
        if plot.title:
            place = (left + self.width / 2, bottom + self.height + _TITLE)
            write(self.figure, *place, plot.title, fontsize=9, ha="center", va="baseline")
        if plot.names_below:
            self.figure.legend(
                handles=plot.curves, frameon=False, fontsize=7, ncols=plot.names_below, loc="upper center",
                bbox_to_anchor=(left + self.width / 2, bottom), bbox_transform=inches, borderaxespad=_LEGEND,
                columnspacing=1.0, handlelength=1.8,
            )  # fmt: skip

    def _write_beside(self, label: str, left: float, bottom: float) -> None:
        """Write what the numbers at the left of a panel are; the first of two lines still stands in the figure."""
        x = left - _Y_LABEL + label.count("\n") * _FURTHER_LINE
        style: dict[str, Any] = {"rotation": "vertical", "rotation_mode": "anchor", "ha": "center", "va": "bottom"}
        write(self.figure, x, bottom + self.height / 2, label, **style)

    def _add_colour_bar(self, lines: Lines, cells: Cells, label: str, lowest: float, highest: float) -> None:
        """Say at the right what the colours mean, from the lowest panel, inches from below, to the highest."""
        left, height = float(self.figure.get_figwidth()) - _BAR, highest + self.height - lowest
        right, top = left + _BAR_WIDTH, lowest + height
        axes = bare_axes(_BAR_WIDTH, height)
        axes.set_yscale("log")
        axes.set_ylim(cells.norm.vmin, cells.norm.vmax)
        ticks = Ticks.of(axes, 1, height)
        tones = (np.arange(_TONES) + 0.5) / _TONES
        mesh = _mesh(np.array([left, right]), np.linspace(lowest, top, _TONES + 1), tones[:, None], None, cells.cmap)
        mesh.set_transform(self.figure.dpi_scale_trans)
        self.figure.add_artist(mesh)
        lines.ticks += box(left, lowest, right, top)
        for length, places in ((TICK, ticks.places), (MINOR_TICK, ticks.minor)):
            lines.ticks += [[(right, lowest + at), (right + length, lowest + at)] for at in places]
        for at, text in ticks.numbers:
            write(self.figure, right + 2 * TICK, lowest + at, text, ha="left", va="center_baseline")
        style: dict[str, Any] = {"rotation": "vertical", "ha": "right", "va": "center"}
        write(self.figure, right + _BAR_LABEL, lowest + height / 2, label, **style)


def panel_grid(
    rows: int,
    count: int,
    *,
    height: float,
    title_lines: int,
    between: float = _BETWEEN,
    right: float = _RIGHT,
    below: float = 0.0,
) -> PanelGrid:
    """Return empty panels [rows, count] in a new figure; the arguments are those of :class:`PanelGrid`."""
    from matplotlib.figure import Figure  # matplotlib takes half a second to import

    columns = _abreast(count)
    figure = Figure(figsize=(max(5.4, 4.2 * columns), height), dpi=_DPI)
    empty = [Row([Plot() for _ in range(count)]) for _ in range(rows)]
    return PanelGrid(figure, empty, columns, height, title_lines, between, right, below)


def _abreast(count: int) -> int:
    """Return how many of so many runs stand side by side: four as two and two, which leaves no gap."""
    return 2 if count == 4 else min(count, ABREAST)


def _set_axes(axes: Axes, row: Row, steps: Sequence[float], corners: NDArray[np.float64]) -> None:
    """Give axes the limits and ticks of a row, and all steps of the figure."""
    from matplotlib.transforms import Bbox

    axes.dataLim = Bbox.null()
    options = row.scale([*_values(row)]) if row.scale else {}
    axes.set_yscale(**(options or {"value": "linear"}))
    axes.margins(0 if any(plot.cells for plot in row.plots) else 0.05)
    if steps:
        axes.update_datalim([(step, 0.0) for step in (min(steps), max(steps))], updatey=False)
    if len(corners):
        axes.update_datalim(corners, updatex=False)
    axes.autoscale_view()


def _values(row: Row) -> Iterator[NDArray[np.float64]]:
    """Yield the finite values of each curve."""
    for plot in row.plots:
        for curve in plot.curves:
            values = np.asarray(curve.get_ydata(orig=True), np.float64)
            yield values[np.isfinite(values)]


def _edges(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the n + 1 edges of cells around n steps."""
    first, last = (np.diff(steps)[[0, -1]] if len(steps) > 1 else np.ones(2)) / 2
    return np.array([steps[0] - first, *(steps[:-1] + steps[1:]) / 2, steps[-1] + last], np.float64)


def _cells(cells: Cells | None) -> list[Artist]:
    if cells is None:
        return []
    edges = np.arange(len(cells.values) + 1) + 0.5
    return [_mesh(_edges(cells.steps), edges, cells.values, cells.norm, cells.cmap)]


def _mesh(
    x: NDArray[np.floating], y: NDArray[np.floating], values: NDArray[np.float64], norm: Normalize | None, cmap: str
) -> Artist:
    """Return cells [m, n] between edges x [n + 1] and y [m + 1]."""
    from matplotlib.collections import QuadMesh

    return QuadMesh(np.stack(np.meshgrid(x, y), -1), array=values, norm=norm, cmap=cmap)
