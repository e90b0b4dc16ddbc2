"""How fast runs trained: tokens per second, and the mean time of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.runs.metric_table import TOKENS_PER_SECOND
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Throughput:
    """Quartiles of a run's readings, tokens per second."""

    low: float
    median: float
    high: float
    readings: int
    """All of them; the first fifth, when code is compiled and caches fill, is not in the quartiles."""


def throughput(run: Run) -> Throughput:
    """Return a run's rates. Raises UserError if the run has no reading."""
    rates = _tokens_per_second(run)
    low, median, high = np.percentile(rates[int(len(rates) * 0.2) :], [25, 50, 75])
    return Throughput(float(low), float(median), float(high), len(rates))


def step_milliseconds(run: Run) -> float:
    """Return the mean time of a step over the second half of the run, without compilation and validation.

    A mean, not a median: what is done every 200 steps must show.

    Raises:
        UserError: the run has no reading.
    """
    rates = _tokens_per_second(run)
    tokens = run.batch_size * run.shape.context
    return float(1e3 * tokens * (1 / rates[int(len(rates) * 0.5) :]).mean())


def _tokens_per_second(run: Run) -> NDArray[np.float64]:
    """Return the readings of a run, [n]."""
    if TOKENS_PER_SECOND.name not in run.columns:
        why = "give a run of more steps" if run.folder else "this evidence keeps none"
        raise UserError(f"{run.where}: no reading of {TOKENS_PER_SECOND.name}; {why}")
    return run.columns[TOKENS_PER_SECOND.name][1]
