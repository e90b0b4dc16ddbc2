"""Figures of the report: each answers one question, for one run or for several side by side.

:mod:`flashpoint.lab.report.panels` says which. One variant has one colour everywhere. Layers and heads count from 1.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.lab.report.axes import LARGEST, literal, log_scale, symlog_scale
from flashpoint.lab.report.colours import colour, layer_look
from flashpoint.lab.report.panel_grid import Cells, PanelGrid, Plot, Scale, panel_grid
from flashpoint.runs.metric_table import (
    DELTA_ERROR_CUMULATIVE,
    GRAD_NORM,
    LOSS,
    MAX_LOGIT,
    ROW_SUM,
    SCORE_MEAN,
    W_Q_NORM,
    Metric,
)
from flashpoint.runs.metrics import Series
from flashpoint.runs.run import Run, called

if TYPE_CHECKING:
    from matplotlib.lines import Line2D


_MARKERS = "os^Dv*PX"
"""Of the runs, in their order."""
_IN_HALF_A_LINE = 28
"""Letters for which half the width of a figure has room."""
_NAMES_IN_A_LINE = 3
"""Names of heads or layers for which the width of a panel has room."""
_PARTS = 800
"""Of a curve over the width of a panel that is alone in its row: it has 460 pixels."""
_LINE = 0.2
"""Inches that a line of a legend takes."""
_NAMED_HEADS, _LARGEST_HEADS = 8, 4
"""Heads of a layer that have a colour each; of a layer with more, those whose W_Q is largest."""


def _heading(run: Run, runs: Sequence[Run]) -> str:
    return textwrap.fill(literal(called(run, runs)), 60)  # a longer line leaves the panels no room


def _lines_of(shown: Iterable[Run], runs: Sequence[Run]) -> int:
    """Return the lines of the longest heading."""
    return max(_heading(run, runs).count("\n") + 1 for run in shown)


def draw_losses(runs: Sequence[Run]) -> PanelGrid:
    """Draw training loss and gradient norm of all runs over one another."""
    grid = panel_grid(2, 1, height=2.4, title_lines=0)
    losses, norms = grid.rows
    windows = set[int]()
    for number, run in enumerate(runs):
        line_colour = _colour(run, runs)
        if smoothed := run.smoothed(LOSS.name):
            windows.add(smoothed.steps)
            series = thinned(smoothed.series)
            losses.plots[0].draw(series, color=line_colour, **_marks(number, runs, series), label=_heading(run, runs))
        if GRAD_NORM.name in run.columns:
            series = thinned(run.columns[GRAD_NORM.name])
            marks = _marks(number, runs, series)
            norms.plots[0].draw(series, color=line_colour, **marks, linewidth=0.7, alpha=0.8)
        for row in grid.rows:
            _mark_onset(row.plots[0], run, line_colour)
    mean = " or ".join(f"{steps}" for steps in sorted(windows))
    losses.label = f"{LOSS.axis},\nmean of {mean} steps" if windows else LOSS.axis
    norms.label, norms.scale = GRAD_NORM.axis, log_scale
    longest = max((len(line) for run in runs for line in _heading(run, runs).splitlines()), default=0)
    # one too wide is cut off
    return _named_below(grid, losses.plots, columns=2 if longest <= _IN_HALF_A_LINE else 1)


def thinned(series: Series) -> Series:
    """Return a series of one value a step with no more points than its curve shows: of each part of a long one, which
    is narrower than a pixel, the first and the last point, the lowest and the highest."""
    steps, values = series
    each = -(-len(steps) // _PARTS)
    if each <= 4:
        return series
    parts = np.pad(values, (0, -len(values) % each), constant_values=np.nan).reshape(-1, each)
    first = each * np.arange(len(parts))
    low = np.where(np.isnan(parts), np.inf, parts).argmin(1) + first
    high = np.where(np.isnan(parts), -np.inf, parts).argmax(1) + first
    kept = np.unique(np.concatenate([first, first + each - 1, low, high, [len(steps) - 1]]))
    kept = kept[kept < len(steps)]
    return steps[kept], values[kept]


def _colour(run: Run, runs: Sequence[Run]) -> str:
    """Return the colour of the attention's file in ``configs/attn/``, also where a preset or a command line has changed
    the attention. It is another one where the file's own or another change of it stands beside it."""
    file = run.variant.split()[0]
    alike = {other.variant for other in runs if other.variant.split()[0] == file}
    return colour(run.variant if run.attention.injected or len(alike) > 1 else file)


def _named_below(grid: PanelGrid, plots: Iterable[Plot], columns: int) -> PanelGrid:
    """Draw the panels, and name the curves of these ones once, below all, where no name lies on a curve."""
    named: dict[str, Line2D] = {}
    for curve in itertools.chain.from_iterable(plot.curves for plot in plots):
        named.setdefault(str(curve.get_label()), curve)
    names = [name for name in named if not name.startswith("_")]
    if names:
        handles = [named[name] for name in names]
        grid.figure.legend(handles, names, frameon=False, fontsize=9, ncols=columns, loc="lower left")
    # filled column by column: a row is as high as its highest name
    rows = math.ceil(len(names) / columns)
    lines = sum(max(name.count("\n") + 1 for name in names[row::rows]) for row in range(rows))
    return grid.finished(foot=_LINE * (lines + 1) if names else 0.0)


def _marks(number: int, runs: Sequence[Run], series: Series) -> dict[str, Any]:
    """Return how a curve is told from the others but by its colour; a run alone has no marks."""
    if len(runs) == 1:
        return {}
    every = max(1, len(series[0]) // 8)
    first = every * number // len(runs)  # so that the marks of curves that are one do not lie on one another
    return {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 5, "markevery": (first, every)}


def draw_layers(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw the largest W_Q spectral norm of each layer."""

    return _by_layer(runs, W_Q_NORM, f"{W_Q_NORM.axis}, largest head", lambda norms: norms.max(1), scale=log_scale)


def draw_bias(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw the bias of δ against the exact row sum by layer, in the unit |dO|·|O| of injected errors, summed over the
    steps."""
    bias = ROW_SUM.bias
    axis = f"cumulative {bias.label}, in {bias.unit}"
    return _by_layer(runs, bias, axis, lambda biases: biases.mean(1).cumsum(1), scale=symlog_scale)


def draw_heads(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw the W_Q spectral norm of each head of the hottest layer."""
    return _heads_of_hottest(runs, W_Q_NORM, scale=log_scale)


def draw_cumulative(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw Σ (δ_lp − δ_hp), summed over the observed steps."""
    return _heads_of_hottest(runs, DELTA_ERROR_CUMULATIVE)


def draw_scores(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw the mean |S| of each head of the hottest layer."""
    return _heads_of_hottest(runs, SCORE_MEAN, scale=log_scale)


def draw_max_logits(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw the largest |S| of each head of the hottest layer."""
    return _heads_of_hottest(runs, MAX_LOGIT, scale=log_scale)


def draw_heat_map(runs: Sequence[Run]) -> PanelGrid | None:
    """Draw the W_Q spectral norm of every head over steps."""
    from matplotlib.colors import LogNorm

    measured = [(run, series) for run in runs if (series := run.by_head(W_Q_NORM.name))]
    if not measured:
        return None
    lines = _lines_of((run for run, _ in measured), runs)
    grid = panel_grid(1, len(measured), height=2.6, title_lines=lines, between=0.75, right=1.35)
    largest = max(float(norms[np.isfinite(norms)].max(initial=1.0)) for _, (_, norms) in measured)
    colours = LogNorm(0.3, min(largest, LARGEST))
    grid.rows[0].label = W_Q_NORM.axis
    for plot, (run, (steps, norms)) in zip(grid.rows[0].plots, measured, strict=True):
        n_layer, n_head, _ = norms.shape
        names = [(layer * n_head + (n_head + 1) / 2, f"layer {layer + 1}") for layer in range(n_layer)]
        rows = np.maximum(norms.reshape(n_layer * n_head, -1), 0.1)
        plot.cells = Cells(steps, rows, names, colours, "magma")
        plot.title = _heading(run, runs)
        _mark_onset(plot, run, "white")
    return grid.finished()


def draw_metrics(runs: Sequence[Run], metrics: Sequence[Metric], share: Metric | None = None) -> PanelGrid | None:
    """Draw the hottest layer's heads: a row of panels for each metric that a run has measured, and a column for each
    run.

    ``share`` is one of the metrics, the share of rows that the others are of: where it is 0 these have no value.
    """
    measured = [run for run in runs if any(run.by_head(metric.name) for metric in metrics)]
    if not measured:
        return None
    metrics = [metric for metric in metrics if any(run.by_head(metric.name) for run in measured)]
    grid = panel_grid(len(metrics), len(measured), height=2.1, title_lines=_lines_of(measured, runs) + 1)
    for number, run in enumerate(measured):
        for row, metric in zip(grid.rows, metrics, strict=True):
            plot = row.plots[number]
            if series := run.by_head(metric.name):
                shares = run.by_head(share.name) if share and metric != share else None
                _draw_heads(plot, _where_some(shares, series), runs[0])
            _mark_onset(plot, run, "black")
            plot.title = f"{_heading(run, runs)}\n{metric.axis}" if row is grid.rows[0] else metric.axis
    return _named_below(grid, (plot for row in grid.rows for plot in row.plots), _NAMES_IN_A_LINE)


def _where_some(shares: Series | None, series: Series) -> Series:
    """Return the series without the values that are of no row."""
    steps, values = series
    if shares is None or not np.array_equal(shares[0], steps):
        return series
    return steps, np.where(shares[1] > 0, values, np.nan)


def _mark_onset(plot: Plot, run: Run, line_colour: str) -> None:
    if run.onset is not None:
        plot.marks.append((run.onset, line_colour))


def _side_by_side(
    runs: Sequence[Run],
    metric: Metric,
    axis: str,
    draw: Callable[[Plot, Run, Series], None],
    *,
    scale: Scale | None,
    below: float = 0.0,
) -> PanelGrid | None:
    measured = [(run, series) for run in runs if (series := run.by_head(metric.name))]
    if not measured:
        return None
    lines = _lines_of((run for run, _ in measured), runs)
    grid = panel_grid(1, len(measured), height=2.4, title_lines=lines, below=below)
    grid.rows[0].label, grid.rows[0].scale = axis, scale
    for plot, (run, series) in zip(grid.rows[0].plots, measured, strict=True):
        draw(plot, run, series)
        plot.title = _heading(run, runs)
        _mark_onset(plot, run, "black")
    return grid


def _by_layer(
    runs: Sequence[Run],
    metric: Metric,
    axis: str,
    of_layers: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    scale: Scale,
) -> PanelGrid | None:
    """``of_layers`` makes of values [n_layer, n_head, n] one curve a layer, [n_layer, n]."""

    def draw(plot: Plot, run: Run, series: Series) -> None:
        steps, values = series
        for layer, of_layer in enumerate(of_layers(values), 1):
            look = layer_look(layer, len(values), hottest=layer == run.hottest_layer)
            named = _named_to_its_end(f"layer {layer}", (steps, of_layer))
            plot.draw((steps, of_layer), **named, **look)
        plot.names_below = _NAMES_IN_A_LINE  # twelve names in the panel would lie on curves

    layers = max((len(series[1]) for run in runs if (series := run.by_head(metric.name))), default=0)
    below = _LINE * (1 + math.ceil(layers / _NAMES_IN_A_LINE))
    grid = _side_by_side(runs, metric, axis, draw, scale=scale, below=below)
    return grid.finished() if grid else None


def _named_to_its_end(name: str, series: Series) -> dict[str, Any]:
    """Return the label of a curve, and where it ends before its run the last step, with a cross there."""
    steps, values = series
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return {"label": f"{name}, no value"}
    last = int(known[-1])
    if last == len(values) - 1:
        return {"label": name}
    cross = {"marker": "x", "markevery": [last], "markersize": 7, "markeredgewidth": 2}
    return {"label": f"{name}, to {steps[last]:,}", **cross}


def _draw_heads(plot: Plot, series: Series, first: Run) -> None:
    """Draw the heads of the first run's hottest layer; a head has the same colour in every run."""
    steps, values = series
    layer = first.hottest_layer
    of_layer = values[layer - 1] if layer <= len(values) else values[:0, 0]
    colours, others = _colours_of_heads(first, len(of_layer)), False
    for head in sorted(range(1, len(of_layer) + 1), key=lambda head: head not in colours):  # the others' name is last
        of_head = of_layer[head - 1]
        if head in colours:
            look: dict[str, Any] = {"color": colours[head], "label": f"layer {layer}, head {head}", "zorder": 2.5}
        else:
            look = {"color": "0.8", "label": "_" if others else f"layer {layer}, other heads"}
            others = True
        # a value alone, or between two that are missing, has no line
        alone = "." if len(steps) == 1 or np.isnan(of_head).any() else None
        plot.draw((steps, of_head), linewidth=1.2, marker=alone, **look)


def _colours_of_heads(run: Run, n_head: int) -> dict[int, str]:
    """Return the colours of the heads, from 1, that have one in figures of the run's hottest layer."""
    from matplotlib import color_sequences
    from matplotlib.colors import to_hex

    heads = np.arange(n_head)
    if n_head > _NAMED_HEADS:
        norms = run.hottest_norms[run.hottest_layer - 1] if run.w_q_norms else -heads
        heads = np.sort(np.argsort(norms)[-_LARGEST_HEADS:])
    # told apart by colour-blind readers, too: Petroff, arXiv 2107.02270
    return {int(head) + 1: to_hex(tone) for head, tone in zip(heads, color_sequences["petroff8"], strict=False)}


def _heads_of_hottest(runs: Sequence[Run], metric: Metric, *, scale: Scale | None = None) -> PanelGrid | None:
    def draw(plot: Plot, _run: Run, series: Series) -> None:
        _draw_heads(plot, series, runs[0])

    grid = _side_by_side(runs, metric, metric.axis, draw, scale=scale)
    return _named_below(grid, grid.rows[0].plots, _NAMES_IN_A_LINE) if grid else None
