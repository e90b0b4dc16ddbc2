"""What the early warning says of recorded runs: explosions foretold, and false alarms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashpoint.early_warning import HeadGrowth, Sentinel
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Foretold:
    """Warnings of several runs."""

    leads: tuple[int, ...]
    """Steps from the warning to the onset, of the explosions that were warned of before."""
    exploded: int
    false_alarms: int
    """Runs that held and were warned of."""
    held: int
    """Runs that ended without an explosion."""


def warning_of(run: Run) -> HeadGrowth | None:
    """Return the warning that the run's W_Q norms give, or None.

    Raises:
        UserError: the run has not measured them.
    """
    return sentinel_of(run).warning


def sentinel_of(run: Run, before: int | None = None) -> Sentinel:
    """Return what watches W_Q, after the run's norms of the steps before one, or of all.

    Raises:
        UserError: the run has not measured them.
    """
    steps, norms = run.measured_by_head("w_q_spectral_norm")
    sentinel = Sentinel(run.config["train"]["warmup_steps"])
    for step, norms_then in zip(steps, np.moveaxis(norms, -1, 0), strict=True):
        if before is None or step < before:
            sentinel.update(int(step), norms_then)
    return sentinel


def foretold(warnings: Sequence[tuple[Run, HeadGrowth | None]]) -> Foretold:
    """Count the warnings of these runs, of those under way none: what they were warned of may come."""
    ended = [(run.failed_at, warning) for run, warning in warnings if run.ended]
    exploded = [(onset, warning) for onset, warning in ended if onset is not None]
    held = [warning for onset, warning in ended if onset is None]
    leads = tuple(onset - warning.step for onset, warning in exploded if warning and warning.step < onset)
    return Foretold(leads, len(exploded), sum(warning is not None for warning in held), len(held))
