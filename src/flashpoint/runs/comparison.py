"""What two watched runs have in common: the batches and the losses that their loops handed over."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flashpoint.errors import UserError
from flashpoint.files import whole_lines
from flashpoint.runs.chain import LossDifferences
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import LOSS
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Compared:
    """What two watched runs have in common; steps count as each loop said where it begins."""

    steps: int
    """Of which both have a loss."""
    lengths: tuple[int, int]
    """Losses of each run."""
    with_batch: int
    """Of them, of which both have a batch's fingerprint."""
    batch: tuple[int, str, str] | None
    """The first step that trained on two batches, and their fingerprints."""
    loss: tuple[int, float, float] | None
    """The first step with two losses, and these, nats."""
    apart: LossDifferences

    @property
    def batches(self) -> Literal["unknown", "other", "same"]:
        """Whether they trained on the same batches; unknown where not both handed batches over."""
        if not self.with_batch:
            return "unknown"
        return "same" if self.batch is None else "other"


def compared(one: Run, other: Run) -> Compared:
    """Compare two watched runs.

    Raises:
        UserError: one of them is none, or has no losses; a file of it cannot be read.
    """
    for run in (one, other):
        if not run.watched:
            raise UserError(f"{run.where}: was not watched, and the other run was; give two of one kind")
        if LOSS.name not in run.columns:
            raise UserError(f"{run.where}: has no losses; give a run whose loop handed its loss to watched.step")
    (at, a), (at_other, b) = (run.columns[LOSS.name] for run in (one, other))
    steps, here, there = np.intersect1d(at, at_other, assume_unique=True, return_indices=True)
    if not len(steps):
        raise UserError(f"{one.where} and {other.where} have no step in common; give runs that were watched longer")
    a, b = a[here], b[there]
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    first = None if equal.all() else int(equal.argmin())
    known = [{} if run.folder is None else batches_of(run.folder) for run in (one, other)]
    shared = sorted(known[0].keys() & known[1].keys() & set(steps.tolist()))
    other_batches = [(step, known[0][step], known[1][step]) for step in shared if known[0][step] != known[1][step]]
    return Compared(
        len(steps),
        (len(at), len(at_other)),
        len(shared),
        other_batches[0] if other_batches else None,
        None if first is None else (int(steps[first]), float(a[first]), float(b[first])),
        LossDifferences.of(steps, a, b, equal),
    )


def batches_of(folder: RunFolder) -> dict[int, str]:
    """Return the batches' fingerprints by step, without a last row cut short; empty where the loop handed none.

    Raises:
        UserError: the file cannot be read, or a row is no step and fingerprint.
    """
    if not folder.batches.is_file():
        return {}
    rows = [line.decode(errors="replace").partition(",") for line in whole_lines(folder.batches, "make it readable")]
    for number, (step, _, fingerprint) in enumerate(rows, 1):
        if not step.isdecimal():
            raise UserError(f"{folder.batches}: line {number} begins with no step; restore the file, or watch again")
        if not re.fullmatch("[0-9a-f]{16}", fingerprint):
            raise UserError(f"{folder.batches}: line {number} has no fingerprint; restore the file, or watch again")
    return {int(step): fingerprint for step, _, fingerprint in rows}
