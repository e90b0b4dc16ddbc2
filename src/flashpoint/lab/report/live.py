"""Runs under way as a terminal shows them: loss, gradient norm, the hottest heads, warnings, rate and time left."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence

import numpy as np
import plotille
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashpoint.runs.metrics import Series
from flashpoint.runs.progress import SILENT_SECONDS, Progress, progress_of
from flashpoint.runs.run import Run

HEADS = 4
"""Heads with the largest W_Q that are drawn."""
_COLOURS = ("red", "cyan", "yellow", "magenta", "green", "blue")
_TICKS = 9  # characters left of a drawing
_AROUND = 6  # lines of a drawing's title and axes
_POINTS = 400  # more do not show


def frame(runs: Sequence[Run], width: int, height: int) -> RenderableType:
    """Return what a terminal of that size in characters shows of the runs: one in detail, several in a table.

    Raises:
        UserError: a run's configuration is missing, or its metrics are damaged.
    """
    parts: list[RenderableType] = [_table(runs)]
    if len(runs) == 1:
        parts.insert(0, Text(runs[0].label, "bold", overflow="fold"))
    drawings = 3 if len(runs) == 1 else 1
    rows = (height - 2 * len(runs) - 2) // drawings - _AROUND
    size = max(20, width - _TICKS - 14), max(3, rows)
    if len(runs) == 1:
        (run,) = runs
        parts += [_losses(run, *size), _grad_norm(run, *size), _norms(run, *size)]
    else:
        parts.append(_losses_of_all(runs, *size))
    return Group(*parts)


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False)
    named = ("run", "attention") if len(runs) > 1 else ()
    for column in (*named, "step", "loss", "largest W_Q norms", "tokens/s", "left", "state"):
        table.add_column(column, overflow="fold", justify="right" if column in ("step", "tokens/s", "left") else "left")
    for run in runs:
        progress = progress_of(run)
        rate = "" if progress.tokens_per_second is None else f"{progress.tokens_per_second:,.0f}"
        left = "" if progress.seconds_left is None else str(datetime.timedelta(seconds=round(progress.seconds_left)))
        names = (Text(run.name), Text(run.title)) if named else ()
        table.add_row(*names, _steps(progress), _last(run, "loss"), _hottest(run), rate, left, _state(run, progress))
    return table


def _steps(progress: Progress) -> str:
    return f"{progress.done:,}" if progress.steps is None else f"{progress.done:,} of {progress.steps:,}"


def _state(run: Run, progress: Progress) -> Text:
    if run.ended:
        return Text(run.verdict, {"stable": "bold green", "stopped": "bold yellow"}.get(run.ending, "bold red"))
    told = []
    if progress.warning:
        growth = progress.warning
        told.append(f"warning at step {growth.step:,}: layer {growth.layer}, head {growth.head}, ×{growth.growth:.1f}")
    if progress.silent_seconds > SILENT_SECONDS:
        told.append(f"nothing written for {datetime.timedelta(seconds=round(progress.silent_seconds))}")
    return Text("; ".join(told), "bold yellow") if told else Text("under way")


def _last(run: Run, name: str) -> str:
    return f"{run.columns[name][1][-1]:.3f}" if name in run.columns else ""


def _hottest(run: Run) -> str:
    return "  ".join(f"L{layer}H{head} {norms[-1]:.1f}" for layer, head, _, norms in _heads(run)[:3])


def _heads(run: Run) -> list[tuple[int, int, NDArray[np.int64], NDArray[np.float64]]]:
    """Return the layer, head (from 1), steps and W_Q norms of the heads whose norm is largest now, the largest
    first."""
    series = run.by_head("w_q_spectral_norm")
    if series is None:
        return []
    steps, norms = series
    order = np.argsort(norms[..., -1], axis=None)[::-1][:HEADS]
    places = zip(*np.unravel_index(order, norms.shape[:2]), strict=True)
    return [(int(layer) + 1, int(head) + 1, steps, norms[layer, head]) for layer, head in places]


def _losses(run: Run, width: int, height: int) -> RenderableType:
    lines: dict[str, Series] = {}
    if smoothed := run.smoothed("loss"):
        lines[f"training, mean over {smoothed.steps} steps"] = smoothed.series
    if "val_loss" in run.columns:
        lines["validation"] = run.columns["val_loss"]
    return _drawing("loss, nats per token", lines, run.first_step, width, height)


def _losses_of_all(runs: Sequence[Run], width: int, height: int) -> RenderableType:
    lines = {run.name: smoothed.series for run in runs if (smoothed := run.smoothed("loss"))}
    return _drawing("training loss, nats per token", lines, min(run.first_step for run in runs), width, height)


def _grad_norm(run: Run, width: int, height: int) -> RenderableType:
    lines = {"before clipping": run.columns["grad_norm"]} if "grad_norm" in run.columns else {}
    return _drawing("gradient norm", lines, run.first_step, width, height, log=True)


def _norms(run: Run, width: int, height: int) -> RenderableType:
    lines = {f"L{layer}H{head}": (steps, norms) for layer, head, steps, norms in _heads(run)}
    return _drawing("W_Q spectral norm, the largest heads", lines, run.first_step, width, height, log=True)


def _drawing(
    title: str, lines: dict[str, Series], first_step: int, width: int, height: int, *, log: bool = False
) -> RenderableType:
    """Return the lines of steps [n] and values [n] under a title, each in its colour, on an axis that begins at a step;
    a logarithmic one leaves out values ≤ 0."""
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
        heading.append(f"   {name}", colour)
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
