"""What the evidence says to a claim: the value, its interval and the verdict, computed from the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.claims_file import Claim, Deviates, Differs, Explodes, Holds, Interval, Layer, Onset
from flashpoint.lab.analysis.intervals import mean_interval, ratio_interval
from flashpoint.lab.analysis.lifetimes import Lasting, lasting_of, lifetimes
from flashpoint.lab.analysis.quantities import QUANTITIES, of_one_attention
from flashpoint.lab.analysis.ratios import OnsetRatio, onset_ratios, pairs
from flashpoint.quantiles import clopper_pearson
from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.runs.run import Run

HALF = 0.5
"""A share is a majority above it."""


class Verdict(StrEnum):
    """What the evidence says to a claim, at the scale of its runs."""

    REPLICATES = "replicates"
    FAILS = "does not replicate"
    UNDECIDED = "undecided"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Finding:
    """What the runs of a claim say."""

    verdict: Verdict
    n: int = 0
    """Runs, pairs, or seeds with one or more sets of weights behind the value."""
    count: int | None = None
    """How many of the n are as the claim says; None where the value is a mean."""
    value: float | None = None
    """The share, or the mean in the unit of the quantity; None without any n."""
    low: float | None = None
    """Lower end of the 95 % interval; None for the mean of one value."""
    high: float | None = None
    """Upper end of the 95 % interval; None for the mean of one value."""
    left_out: int = 0
    """Runs that could not say: too short, tied with their pair, without an explosion, or without a value."""
    alone: Alone | None = None
    """Pairs in which one alone exploded; None of a claim without a control."""
    lasting: Lasting | None = None
    """The second end point of the runs that exploded; None of a criterion that counts no explosions."""


@dataclass(frozen=True)
class Tally:
    """How many runs are as a claim says."""

    count: int
    total: int
    """The runs that could say."""
    left_out: int
    """The runs that could not."""


@dataclass(frozen=True)
class Alone:
    """Pairs of one seed in which one of the two exploded."""

    control: int
    """Those in which only the control did."""
    run: int
    """Those in which only the run did."""

    @property
    def p(self) -> float:
        """The two-sided p of the exact test of McNemar: of the sign test on these pairs."""
        total, least = self.control + self.run, min(self.control, self.run)
        return min(1.0, 2 * sum(comb(total, count) for count in range(least + 1)) / 2**total)

    @property
    def verdict(self) -> Verdict:
        """``replicates`` where the control explodes without the run more often than by chance, at 5 %."""
        return majority(self.control, total) if (total := self.control + self.run) else Verdict.UNDECIDED


def majority(count: int, total: int) -> Verdict:
    """Judge a share by its 95 % Clopper–Pearson interval.

    Returns:
        ``replicates`` for an interval above one half, ``does not replicate`` for one below, or else ``undecided``;
        ``not tested`` without any run. For pairs this is the two-sided sign test at 5 %.
    """
    if not total:
        return Verdict.NOT_TESTED
    return within(*clopper_pearson(count, total), above=HALF)


def within(low: float, high: float, above: float | None = None, below: float | None = None) -> Verdict:
    """Judge an interval from ``low`` to ``high`` by bounds.

    Returns:
        ``replicates`` for an interval inside the bounds, ``does not replicate`` for one wholly outside, or else
        ``undecided``.
    """
    floor, ceiling = -np.inf if above is None else above, np.inf if below is None else below
    if floor < low and high < ceiling:
        return Verdict.REPLICATES
    return Verdict.FAILS if high < floor or ceiling < low else Verdict.UNDECIDED


def exploded(runs: Sequence[Run], steps: int | None = None) -> Tally:
    """Count the runs that exploded within ``steps`` steps, or within their own length.

    A run that exploded later is one that did not. A stable run of fewer steps is left out.

    Raises:
        UserError: two runs are one experiment, a run is a branch, or the runs have several attentions.
    """
    of_one_attention(runs)
    lifetimes(runs[0].title, "", runs)  # refuses what is no life of its own
    horizon = np.inf if steps is None else steps
    failed = [run.failed_at for run in runs]
    count = sum(at is not None and at < horizon for at in failed)
    short = sum(at is None and run.outcome.step < (steps or 0) for at, run in zip(failed, runs, strict=True))
    return Tally(count, len(runs) - short, short)


def held(runs: Sequence[Run], steps: int) -> Tally:
    """Count the runs that did not explode within ``steps`` steps. A stable run of fewer steps is left out.

    Raises:
        UserError: as :func:`exploded`.
    """
    tally = exploded(runs, steps)
    return Tally(tally.total - tally.count, tally.total, tally.left_out)


def alone(runs: Sequence[Run], controls: Sequence[Run], steps: int) -> Alone:
    """Count the pairs in which one alone exploded within ``steps`` steps, and the other held as long.

    A run whose seed no control has is left out.

    Raises:
        UserError: as :func:`.pairs`, or the controls have several attentions.
    """
    of_one_attention(controls)
    seeds = {control.seed for control in controls}
    found = pairs([run for run in runs if run.seed in seeds], controls)
    told = [tuple(_exploded_by(steps, run) for run in pair) for members in found.values() for pair in members.values()]
    return Alone(told.count((False, True)), told.count((True, False)))


def _exploded_by(steps: int, run: Run) -> bool | None:
    """Return whether a run exploded within so many steps; None of a stable one that is shorter."""
    if run.failed_at is None:
        return None if run.outcome.step < steps else False
    return run.failed_at < steps


def compared(ratios: Sequence[OnsetRatio], kind: Literal["earlier", "later"]) -> Tally:
    """Count the runs whose onset is earlier, or later, than their pair's.

    A run that held beyond its pair's onset is later, one whose pair held beyond its own is earlier. Pairs that cannot
    say are left out (:attr:`.OnsetRatio.later`).
    """
    found = [one.later for one in ratios]
    total = len(found) - found.count(None)
    return Tally(found.count(kind == "later"), total, len(found) - total)


def in_layer(runs: Sequence[Run], layer: int) -> Tally:
    """Count the explosions whose W_Q is largest in this layer (from 1), by the last measurement before the onset.

    Runs without an explosion, or without such a measurement, are left out.

    Raises:
        UserError: a run has not measured the norm of W_Q, or as :func:`exploded`.
    """
    of_one_attention(runs)
    lifetimes(runs[0].title, "", runs)  # refuses what is no life of its own
    layers = [found for run in runs if run.onset is not None and (found := _hottest_layer_before(run.onset, run))]
    return Tally(layers.count(layer), len(layers), len(runs) - len(layers))


def _hottest_layer_before(step: int, run: Run) -> int | None:
    run.measured_by_head(W_Q_NORM.name)  # refuses a run without it
    steps, norms = run.w_q_norms or (np.empty(0), np.empty((0, 0, 0)))
    before = norms[..., steps < step]
    return int(before[..., -1].max(-1).argmax()) + 1 if before.size else None


def judge(claim: Claim, runs: Sequence[Run], against: Sequence[Run] = ()) -> Finding:
    """Judge a claim by its runs, or by a computation that needs none.

    Args:
        claim: the claim.
        runs: the runs that ``claim.runs`` names.
        against: the runs that ``claim.against`` names.

    Returns:
        The finding. Where it needs runs, and has none or none that could say, its verdict is ``not tested``.

    Raises:
        UserError: the runs are not of the form that the criterion needs, or have not measured what it asks.
    """
    if not runs and not isinstance(claim.criterion, Deviates | Differs):
        return Finding(Verdict.NOT_TESTED)
    match claim.criterion:
        case Explodes(steps=steps):
            finding = replace(_counted(exploded(runs, steps)), lasting=lasting_of(runs))
        case Holds(steps=steps):
            finding = _held(held(runs, steps), alone(runs, against, steps) if against else None)
            finding = replace(finding, lasting=lasting_of(runs))
        case Onset(kind=kind):
            finding = _counted(compared(_ratios(runs, against), kind))
        case Layer(layer=layer):
            finding = _counted(in_layer(runs, layer))
        case Interval() as asked:
            quantity = QUANTITIES[asked.quantity]
            values = quantity.values(runs, against, asked)
            left_out = 0 if quantity.by_seed else len(runs) - len(values)
            finding = _averaged(values, asked, quantity.ratio, left_out)
        case Deviates() as asked:
            from flashpoint.lab.analysis.isolated import distances_over_baseline  # which imports PyTorch

            finding = _averaged(distances_over_baseline(asked), asked, ratio=True)
        case Differs() as asked:
            from flashpoint.lab.analysis.isolated import differences_over_others

            finding = _averaged(differences_over_others(asked), asked, ratio=True)
        case None:
            raise AssertionError("a claim with runs has a criterion")
    return finding


def _counted(tally: Tally) -> Finding:
    if not tally.total:
        return Finding(Verdict.NOT_TESTED, left_out=tally.left_out)
    low, high = clopper_pearson(tally.count, tally.total)
    share = tally.count / tally.total
    return Finding(majority(tally.count, tally.total), tally.total, tally.count, share, low, high, tally.left_out)


def _held(tally: Tally, pairs_alone: Alone | None) -> Finding:
    """Return what a claim that runs hold is: refuted where most explode, or more often alone than their controls. Borne
    out where most hold, and their controls explode alone."""
    found = _counted(tally)
    if found.verdict is Verdict.NOT_TESTED:
        return found
    both = {found.verdict, Verdict.UNDECIDED if pairs_alone is None else pairs_alone.verdict}
    verdict = both.pop() if len(both) == 1 else Verdict.FAILS if Verdict.FAILS in both else Verdict.UNDECIDED
    return replace(found, verdict=verdict, alone=pairs_alone)


def _averaged(
    values: NDArray[np.float64], asked: Interval | Deviates | Differs, ratio: bool = False, left_out: int = 0
) -> Finding:
    if not len(values):
        return Finding(Verdict.NOT_TESTED, left_out=left_out)
    if ratio:
        mean, ends = ratio_interval(values)
    else:
        mean, half = mean_interval(values)
        ends = None if half is None else (mean - half, mean + half)
    if ends is None:
        return Finding(Verdict.UNDECIDED, 1, value=mean, left_out=left_out)
    verdict = within(*ends, asked.above, asked.below)
    return Finding(verdict, len(values), None, mean, *ends, left_out)


def _ratios(runs: Sequence[Run], against: Sequence[Run]) -> list[OnsetRatio]:
    groups = onset_ratios(pairs(runs, against))
    if len(groups) > 1:
        told = "; ".join(f"{label} {setting}".strip() for setting, label in groups)
        raise UserError(f"{len(groups)} attentions or settings: {told}; name runs of one of them")
    return [ratio for by_seed in groups.values() for ratio in by_seed.values()]
