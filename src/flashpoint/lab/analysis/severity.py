"""How bad an explosion was: what it did to the validation loss, and how far W_Q had grown at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.runs.recovery import recovery
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Severity:
    """Of the runs of one attention."""

    rises: NDArray[np.float64]
    """Validation loss at the end less that before the onset, nats per token; of each run that exploded."""
    norms: NDArray[np.float64]
    """Largest spectral norm of W_Q over all heads, at the end of each run."""


def severity(runs: Sequence[Run]) -> Severity:
    """Return both; a run that has not measured one of them, or found no number, is left out there."""
    rises, norms = [], []
    for run in runs:
        if run.onset is not None:
            with suppress(UserError):
                rises.append(recovery(run).rise)
        with suppress(UserError):
            norms.append(float(run.measured_by_head(W_Q_NORM.name)[1][..., -1].max()))
    return Severity(*(found[np.isfinite(found)] for found in (np.array(rises), np.array(norms))))
