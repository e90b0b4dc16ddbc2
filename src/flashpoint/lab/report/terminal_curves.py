"""Curves over steps as a terminal shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotille
from rich.console import Group, RenderableType
from rich.text import Text

from flashpoint.cli.live import hottest_heads
from flashpoint.errors import escaped
from flashpoint.runs.metric_table import GRAD_NORM, LOSS, VALIDATION_LOSS, W_Q_NORM
from flashpoint.runs.metrics import Series
from flashpoint.runs.run import Run

_COLOURS = ("red", "cyan", "yellow", "magenta", "green", "blue")
_TICKS = 9  # characters left of a drawing
_AROUND = 6  # lines of a drawing's title and axes
_POINTS = 400  # more do not show


def curves(runs: Sequence[Run], width: int, height: int) -> list[RenderableType]:
    """Return drawings of one run, or one of the losses of several, that fill so many characters and lines."""
    drawings = 3 if len(runs) == 1 else 1
    size = max(20, width - _TICKS - 14), max(3, height // drawings - _AROUND)
    if len(runs) > 1:
        return [_losses_of_all(runs, *size)]
    (run,) = runs
    return [_losses(run, *size), _grad_norm(run, *size), _norms(run, *size)]


def _losses(run: Run, width: int, height: int) -> RenderableType:
    lines: dict[str, Series] = {}
    if smoothed := run.smoothed(LOSS.name):
        lines[f"training, mean over {smoothed.steps} steps"] = smoothed.series
    if VALIDATION_LOSS.name in run.columns:
        lines["validation"] = run.columns[VALIDATION_LOSS.name]
    return _drawing(LOSS.axis, lines, run.first_step, width, height)


def _losses_of_all(runs: Sequence[Run], width: int, height: int) -> RenderableType:
    lines = {run.name: smoothed.series for run in runs if (smoothed := run.smoothed(LOSS.name))}
    return _drawing(f"training {LOSS.axis}", lines, min(run.first_step for run in runs), width, height)


def _grad_norm(run: Run, width: int, height: int) -> RenderableType:
    lines = {"before clipping": run.columns[GRAD_NORM.name]} if GRAD_NORM.name in run.columns else {}
    return _drawing(GRAD_NORM.axis, lines, run.first_step, width, height, log=True)


def _norms(run: Run, width: int, height: int) -> RenderableType:
    lines = {f"L{layer}H{head}": (steps, norms) for layer, head, steps, norms in hottest_heads(run)}
    return _drawing(f"{W_Q_NORM.axis}, the largest heads", lines, run.first_step, width, height, log=True)


def _drawing(
    title: str, lines: dict[str, Series], first_step: int, width: int, height: int, *, log: bool = False
) -> RenderableType:
    """Return the lines of steps [n] and values [n] under a title, each in its colour, on an axis that begins at a step.
    A logarithmic one leaves out values ≤ 0."""
    heading = Text(f"\n{title}", "bold")
    figure = plotille.Figure()
    figure.width, figure.height, figure.color_mode, figure.with_colors = width, height, "names", True
    figure.x_label, figure.y_label = "step", " "
    figure.x_ticks_fkt = lambda low, _high: f"{low:,.0f}"
    figure.y_ticks_fkt = lambda low, _high: f"{10**low if log else low:{_TICKS}.3g}"
    drawn, largest = 0, first_step + 1
    for number, (name, series) in enumerate(lines.items()):
        steps, values = _drawable(series, log)
        if not len(steps):
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        figure.plot(steps.tolist(), (np.log10(values) if log else values).tolist(), lc=colour)
        heading.append(f"   {escaped(name)}", colour)
        drawn, largest = drawn + 1, max(largest, int(steps[-1]))
    if not drawn:
        return Group(heading, Text("not measured yet", "dim"))
    figure.set_x_limits(first_step, largest)
    return Group(heading, Text.from_ansi(figure.show(), no_wrap=True))


def _drawable(series: Series, log: bool) -> Series:
    """Return what an axis can show, thinned to what a terminal can; the newest stays."""
    steps, values = series
    known = np.isfinite(values) & ((values > 0) | (not log))
    steps, values = steps[known], values[known]
    every = max(1, math.ceil(len(steps) / _POINTS))
    return steps[::-every][::-1], values[::-every][::-1]
