"""Runs under way as a terminal shows them: loss, gradient norm, the hottest heads, warnings, rate and time left."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashpoint.cli.progress import SILENT_SECONDS, Progress, progress_of
from flashpoint.errors import escaped, pip_install
from flashpoint.runs.metric_table import LOSS, TOKENS_PER_SECOND, W_Q_NORM
from flashpoint.runs.run import Run

HEADS = 4
"""Heads with the largest W_Q that are shown."""
Curves = Callable[[Sequence[Run], int, int], Sequence[RenderableType]]
"""Runs, and the characters and lines that there are, to drawings."""


class Terminal(Console):
    """Where frames are printed."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command what a reader that has gone means; Rich would end the process with status 1."""
        self.quiet = True
        raise BrokenPipeError


def frame(runs: Sequence[Run], width: int, height: int, curves: Curves | None) -> RenderableType:
    """Return what a terminal of that size in characters shows of the runs: one in detail, several in a table.

    Args:
        curves: draws them; None where the laboratory is not installed.

    Raises:
        UserError: a run's configuration is missing, or its metrics are damaged.
    """
    parts: list[RenderableType] = [_table(runs)]
    if len(runs) == 1:
        parts.insert(0, Text(escaped(runs[0].label), "bold", overflow="fold"))
    if curves is None:
        parts.append(Text(f"\nno curves: they need {pip_install('flashpoint[lab]')}", "dim"))
    else:
        parts += curves(runs, width, height - 2 * len(runs) - 2)
    return Group(*parts)


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False)
    named = ("run", "attention") if len(runs) > 1 else ()
    numbers = ("step", TOKENS_PER_SECOND.unit, "left")
    for column in (*named, "step", LOSS.label, "largest W_Q norms", TOKENS_PER_SECOND.unit, "left", "state"):
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for run in runs:
        progress = progress_of(run)
        rate = "" if progress.tokens_per_second is None else f"{progress.tokens_per_second:,.0f}"
        left = "" if progress.seconds_left is None else str(datetime.timedelta(seconds=round(progress.seconds_left)))
        names = (Text(escaped(run.name)), Text(escaped(run.title))) if named else ()
        table.add_row(*names, _steps(progress), _last(run, LOSS.name), _hottest(run), rate, left, _state(run, progress))
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
    return "  ".join(f"L{layer}H{head} {norms[-1]:.1f}" for layer, head, _, norms in hottest_heads(run)[:3])


def hottest_heads(run: Run) -> list[tuple[int, int, NDArray[np.int64], NDArray[np.float64]]]:
    """Return the layer, head (from 1), steps and W_Q norms of the heads whose norm is largest now, the largest
    first."""
    series = run.by_head(W_Q_NORM.name)
    if series is None:
        return []
    steps, norms = series
    order = np.argsort(norms[..., -1], axis=None)[::-1][:HEADS]
    places = zip(*np.unravel_index(order, norms.shape[:2]), strict=True)
    return [(int(layer) + 1, int(head) + 1, steps, norms[layer, head]) for layer, head in places]
