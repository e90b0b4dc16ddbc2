"""Whether the loss came back after an explosion: the two end points of a run, crossed and lasting.

A run *crossed* where the detector says that it exploded, or its numbers ceased to be finite. It *lasts* where the
validation loss is still :data:`RISE` above that before the onset after a tail that is common to runs of one size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from flashpoint.errors import UserError
from flashpoint.runs.metric_table import VALIDATION_LOSS
from flashpoint.runs.run import Run

RISE = 0.3
"""Nats per token above the validation loss before the onset, from which on an explosion lasts."""
SMALL = 50_000_000
"""Parameters below which a model has the longer tail."""


@dataclass(frozen=True)
class Recovery:
    """Validation losses of a run that exploded, nats per token."""

    before: float
    """At the last validation before the onset."""
    end: float
    """At the end of the run, ``detector.tail_steps`` after the verdict."""
    margin: float
    """``detector.margin``."""
    above_since: int | None
    """The step of the first validation from which on all are more than the margin above what the run had before; None
    where the last one is not."""

    @property
    def rise(self) -> float:
        return self.end - self.before

    @property
    def above(self) -> bool:
        """Whether the run ended more than the margin above what it had before."""
        return self.above_since is not None


def recovery(run: Run) -> Recovery:
    """Return the losses before and after the onset of a run that has one.

    Raises:
        UserError: the run was validated only after its onset, or not at its end.
    """
    known, end = validations(run), run.outcome.step
    before = [step for step in known if step <= (run.onset or 0)]
    if not before or end not in known:
        raise UserError(f"{run.where}: not validated both before its onset and at its end")
    loss_before, margin = known[max(before)], run.config.detector.margin
    latest_first = sorted(known, reverse=True)
    lasting = [*itertools.takewhile(lambda step: not known[step] - loss_before <= margin, latest_first)]  # or NaN
    return Recovery(loss_before, known[end], margin, lasting[-1] if lasting else None)


def common_tail(run: Run) -> int:
    """Return the steps after the onset at which :func:`lasting` looks: 5,000, or 1,000 of a large model."""
    return 5000 if (run.manifest.parameters or 0) < SMALL else 1000


def lasting(run: Run) -> bool | None:
    """Return whether a run that exploded has a lasting rise, at the first validation after the common tail.

    A run that ended with a NaN or an infinity has one. None: it cannot be told, because the run ended before, has no
    validation before its onset, or none after the tail.
    """
    if run.onset is None or run.outcome.outcome == "nonfinite":
        return True
    known = validations(run)
    before = [step for step in known if step <= run.onset]
    after = [step for step in known if step >= run.onset + common_tail(run)]
    if not before or not after:
        return None
    return not known[min(after)] - known[max(before)] <= RISE  # or NaN


def validations(run: Run) -> dict[int, float]:
    """Return the validation loss by the number of steps done."""
    steps, losses = run.columns.get(VALIDATION_LOSS.name, ([], []))
    found = {int(step) + 1: float(loss) for step, loss in zip(steps, losses, strict=True)}
    last = run.outcome
    if last.val_step is not None and last.val_loss is not None:
        found[last.val_step] = last.val_loss
    return found
