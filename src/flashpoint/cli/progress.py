"""How far a run has come, from what it has written so far."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass

import numpy as np

from flashpoint.early_warning import HeadGrowth, warning_of
from flashpoint.errors import UserError
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import TOKENS_PER_SECOND, W_Q_NORM
from flashpoint.runs.run import Run

_RECENT_READINGS = 5
"""Readings of the rate whose median tells the time left."""
SILENT_SECONDS = 60
"""After which a run that has not written may have been killed."""


@dataclass(frozen=True)
class Progress:
    """A run under way, or one that has ended."""

    done: int
    """Optimiser steps in the metrics file."""
    steps: int | None
    """Optimiser steps that the run is to make; None of somebody's own loop that does not tell."""
    tokens_per_second: float | None
    """Median of the last readings; None before the first."""
    seconds_left: float | None
    """The time left at that rate, of somebody's own loop at its mean rate so far. None before the first reading, after
    the end, and where nobody knows how many steps there are."""
    silent_seconds: float
    """Since the run last wrote; 0 of a run that has ended."""
    warning: HeadGrowth | None
    """What the early warning says of the norms so far."""


def progress_of(run: Run, now: float | None = None) -> Progress:
    """Return how far a run in a folder has come. A run without metrics has done no step.

    Args:
        now: seconds since the epoch; None is the present.

    Raises:
        UserError: the configuration is missing, or the metrics are damaged.
    """
    steps = run.config.train.steps
    done = run.outcome.step if run.ended else run.logged_steps
    rate = None
    if TOKENS_PER_SECOND.name in run.columns:
        rate = float(np.median(run.columns[TOKENS_PER_SECOND.name][1][-_RECENT_READINGS:]))
    left = None
    if steps is not None and not run.ended and (seconds := _seconds_a_step(run, done, rate)) is not None:
        left = max(0, steps - done) * seconds
    silent = _silent_seconds(run.folder, now) if run.folder and not run.ended else 0.0
    warning = warning_of(run) if run.by_head(W_Q_NORM.name) else None
    return Progress(done, steps, rate, left, silent, warning)


def _silent_seconds(folder: RunFolder, now: float | None = None) -> float:
    written = folder.metrics if folder.metrics.exists() else folder.config
    return max(0.0, (time.time() if now is None else now) - written.stat().st_mtime)


def _seconds_a_step(run: Run, done: int, rate: float | None) -> float | None:
    """Return the time of a step: of somebody's own loop, whose tokens a step nobody knows, the mean so far."""
    if run.watched:
        if run.folder is None or not done:
            return None
        try:  # not the time of a file: manifest and configuration are written again when more is known
            began = datetime.datetime.fromisoformat(run.manifest.started).timestamp()
        except ValueError:
            return None
        seconds = run.folder.metrics.stat().st_mtime - began
        return seconds / (done - run.first_step) if seconds > 0 else None  # a copy's file can have any time
    tokens = run.batch_size * run.shape.context
    return tokens / rate if rate else None


def unended(run: Run) -> bool:
    """Whether the run has no verdict yet: a process writes it, or was killed.

    Raises:
        UserError: the run is in an evidence table, where every run has ended.
    """
    if run.folder is None:
        raise UserError(f"{run.where}: a run of the evidence tables is not under way; give a run's folder")
    return not run.ended


def cut_short(run: Run) -> bool:
    """Whether the run was killed: it has no verdict, no process is seen that trains it, and it has been silent for
    :data:`SILENT_SECONDS`. A process on a machine whose locks are not seen here writes, and one that is killed and
    started again at once may be back by then.

    Of somebody's own loop nobody knows: False.
    """
    # The lock first: a run that ends writes its verdict before it lets go.
    return (
        run.folder is not None and run.folder.let_go and not run.ended and _silent_seconds(run.folder) > SILENT_SECONDS
    )
