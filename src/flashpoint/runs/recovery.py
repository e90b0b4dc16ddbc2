"""Whether the loss came back after an explosion."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from flashpoint.errors import UserError
from flashpoint.runs.metric_table import VALIDATION_LOSS
from flashpoint.runs.run import Run


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


def validations(run: Run) -> dict[int, float]:
    """Return the validation loss by the number of steps done."""
    steps, losses = run.columns.get(VALIDATION_LOSS.name, ([], []))
    found = {int(step) + 1: float(loss) for step, loss in zip(steps, losses, strict=True)}
    last = run.outcome
    if last.val_step is not None and last.val_loss is not None:
        found[last.val_step] = last.val_loss
    return found
