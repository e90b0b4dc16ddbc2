"""What leaves the stable twin first: runs that exploded beside the runs of the same seed and data that did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.lifetimes import pairing
from flashpoint.runs.metrics import Series
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Departure:
    """One metric over all pairs."""

    metric: str
    pairs: int
    leads: tuple[int, ...]
    """Steps from the departure to the onset, of the pairs that have one; below 0 it came after."""


def twins(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair each run that has an onset with the stable run of the same seed, data and experiment.

    Raises:
        UserError: a run has no such twin, or several.
    """
    pairs = []
    for run in runs:
        if run.onset is None:
            continue
        stable = [other for other in runs if other.failed_at is None and pairing(other) == pairing(run)]
        if len(stable) != 1:
            named = ", ".join(other.name for other in stable) or "none"
            raise UserError(f"{run.where}: needs one stable run of its seed and data beside it; given: {named}")
        pairs.append((run, stable[0]))
    if not pairs:
        raise UserError("none of these runs exploded; give exploding runs and their stable twins")
    return pairs


def departure(metric: str, pairs: Sequence[tuple[Run, Run]], hottest_head: bool) -> Departure:
    """Return when the metric leaves, for good, the range that it has in the twin after the warm-up.

    No threshold is chosen: the departure is the first observation from which on all, to the onset and after it, are
    above the twin's largest, or all below its smallest.

    Args:
        hottest_head: instead of the largest over all heads, take the one whose W_Q is highest at the onset in the run
            that exploded, and the same one of the twin.

    Raises:
        UserError: a run has not measured it, a twin not after its warm-up, or as NaN there.
    """
    leads = []
    for run, twin in pairs:
        head = run.hottest_head if hottest_head else None
        (steps, values), (_, usual) = _after_warmup(metric, run, head), _after_warmup(metric, twin, head)
        if not len(usual):
            raise UserError(f"{twin.where}: {metric} was not measured after the warm-up; give a longer run")
        if unknown := int(np.isnan(usual).sum()):
            told = f"{metric} is NaN in {unknown} of {len(usual)} observations after the warm-up"
            raise UserError(f"{twin.where}: {told}, so that it has no range to leave; give another metric or twin")
        # A value that is no number is outside, too.
        first = min(_for_good(~(values <= usual.max())), _for_good(~(values >= usual.min())))
        if first < len(steps):
            assert run.onset is not None
            leads.append(run.onset - int(steps[first]))
    return Departure(metric, len(pairs), tuple(leads))


def _for_good(outside: NDArray[np.bool_]) -> int:
    """Return the index from which on all values are outside, or the number of values if the last is inside."""
    inside = np.flatnonzero(~outside)
    return int(inside[-1]) + 1 if len(inside) else 0


def _after_warmup(metric: str, run: Run, head: tuple[int, int] | None) -> Series:
    """Return the metric of one head, or its largest value over all heads, after the warm-up."""
    steps, values = run.measured_by_head(metric)
    later = steps >= run.config.train.warmup_steps
    one = values.max(axis=(0, 1)) if head is None else values[head[0] - 1, head[1] - 1]
    return steps[later], one[later]
