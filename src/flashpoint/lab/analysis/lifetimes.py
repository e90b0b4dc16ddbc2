"""How long runs of a variant last: Kaplan–Meier curves of the onset step, intervals, the log-rank test, severity.

A run that ended without an explosion is censored at its length: it says only that the onset is not before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.build_config import keys
from flashpoint.lab.stored_config import trained_config
from flashpoint.numerics.effective import effective_choices
from flashpoint.quantiles import CONFIDENCE
from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.runs.recovery import RISE, lasting, recovery
from flashpoint.runs.run import Run
from flashpoint.schema import EXPERIMENT

if TYPE_CHECKING:
    from scipy.stats import CensoredData

_EPS = 1e-9  # the shares are products of fractions
FEWEST = 3
"""Runs of each group that a log-rank test needs."""
SETTINGS = tuple(key.name for key in keys() if EXPERIMENT in key.marks)
"""Keys of the configuration that make an experiment, besides attention, data and seed."""


@dataclass(frozen=True)
class Lifetimes:
    """Runs of one variant."""

    label: str
    variant: str
    onsets: NDArray[np.int64]
    """Steps at which runs exploded, or their numbers ceased to be finite."""
    censored: NDArray[np.int64]
    """Lengths of the runs that did not."""
    setting: str = ""
    """How their experiment differs from the usual one among the given runs."""
    nonfinite: int = 0
    """How many of the onsets are of a NaN or an infinity, and not of a loss that rose."""

    @property
    def count(self) -> int:
        return len(self.onsets) + len(self.censored)

    @property
    def median_onset(self) -> float | None:
        """Step by which half of the runs have exploded by the Kaplan–Meier estimate; None where it is not reached.

        Where the curve stays at one half until the next explosion, the middle of the two, as R's ``survfit`` has it.
        Where it stays there to the end, the step from which on it does: R takes the middle up to the longest run, which
        says how long the runs were.
        """
        if not len(self.onsets):
            return None
        steps, share, *_ = self.curve()
        reached, below = _first_step(steps, share <= 0.5 + _EPS), _first_step(steps, share < 0.5 - _EPS)
        return reached if reached is None or below is None else (reached + below) / 2

    def median_interval(self) -> tuple[float | None, float | None]:
        """Return the steps at which the curve's interval passes one half (Brookmeyer & Crowley 1982); None where not
        reached.

        None at both ends of fewer than five runs, too. The lower end would be their first onset. All of n onsets come
        after the true median with probability 1/2ⁿ, more than the 5 % that the interval allows.
        """
        if not len(self.onsets) or 0.5**self.count > 1 - CONFIDENCE:
            return None, None
        steps, _, low, high = self.curve()
        return _first_step(steps, low <= 0.5 + _EPS), _first_step(steps, high <= 0.5 + _EPS)

    def curve(self) -> tuple[NDArray[np.float64], ...]:
        """Return the steps, share of runs still stable, and the lower and upper end of its log-log interval, from step
        0 on."""
        from scipy.stats import ecdf

        function = ecdf(self.data()).sf
        with warnings.catch_warnings():  # where all runs are stable, or none, the formula has no answer
            warnings.simplefilter("ignore", RuntimeWarning)
            interval = function.confidence_interval(CONFIDENCE, method="log-log")
        steps, share = np.r_[0.0, function.quantiles], np.r_[1.0, function.probabilities]
        low, high = (np.r_[1.0, end.probabilities] for end in (interval.low, interval.high))
        low = np.where(np.isnan(low), np.where(share == 1, 1.0, 0.0), low)
        for at in np.flatnonzero(np.isnan(high)):
            high[at] = high[at - 1]  # the last that is known, from 1 on
        return steps, share, low, high

    def data(self) -> CensoredData:
        """Return the lifetimes as SciPy's censored data."""
        from scipy.stats import CensoredData

        return CensoredData(uncensored=self.onsets, right=self.censored)


Groups = Mapping[tuple[str, str], Sequence[Run]]
"""Runs by unusual setting and attention (:func:`grouped`)."""


def by_variant(groups: Groups) -> list[Lifetimes]:
    """Return the lifetimes of each group."""
    return [lifetimes(label, setting, members) for (setting, label), members in groups.items()]


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Group runs by unusual setting and by attention, in the order of each group's first run.

    An attention is named by its variant's title, with each choice in which runs of that title differ.
    """
    usual = usual_settings(runs)
    choices = distinct((run.title, choices_of(run)) for run in runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        setting = " ".join(differing(settings_of(run), [usual]))
        label = " ".join([run.title, *differing(choices_of(run), choices[run.title])])
        groups.setdefault((setting, label), []).append(run)
    return groups


def side_by_side(groups: Groups) -> list[list[Run]]:
    """Return the runs of each setting: their rows are read against one another."""
    settings: dict[str, list[Run]] = {}
    for (setting, _), members in groups.items():
        settings.setdefault(setting, []).extend(members)
    return list(settings.values())


def usual_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the commonest value of each setting in which runs differ; the first of equally common values."""
    values: dict[str, list[Any]] = {}
    for run in runs:
        for name, value in settings_of(run).items():
            values.setdefault(name, []).append(value)
    return {name: Counter(of_runs).most_common(1)[0][0] for name, of_runs in values.items() if len(set(of_runs)) > 1}


def pairing(run: Run) -> tuple[object, ...]:
    """Seed, fingerprint of the data and settings: two runs that share them differ in their attention alone."""
    return *seed_and_corpus(run), *settings_of(run).items()


def seed_and_corpus(run: Run) -> tuple[int | str, str | None]:
    """Return the corpus by its fingerprint; None of runs that do not name it.

    Somebody's own loop tells neither. Instead of its seed the run itself is named, so that no other is taken for its
    repetition or its pair.
    """
    if run.watched:
        return run.where, None
    return run.seed, run.manifest.data.fingerprint


def pooled_corpora(groups: Iterable[Sequence[Run]]) -> list[str]:
    """Return the corpora, by the first digits of their fingerprints, of the groups whose runs are of several; groups
    of one corpus each have none. When a run explodes depends on its text, too."""
    found: set[str] = set()
    for runs in groups:
        corpora = {str(corpus)[:8] for _, corpus in map(seed_and_corpus, runs) if corpus is not None}
        found |= corpora if len(corpora) > 1 else set()
    return sorted(found)


def control_of(group: Lifetimes, groups: Sequence[Lifetimes], control: str) -> Lifetimes | None:
    """Return the group of that label in the same setting, or else the one of that attention's name.

    Raises:
        UserError: several groups have that name and none that label.
    """
    rivals = [other for other in groups if other.setting == group.setting]
    named = [o for o in rivals if o.label == control] or [o for o in rivals if o.variant == control]
    if len(named) > 1:
        labels = "; ".join(other.label for other in named)
        raise UserError(f"--control {control} fits several rows: give one of {labels}")
    return named[0] if named else None


def logrank_p(one: Lifetimes, other: Lifetimes) -> float | None:
    """Return the two-sided p of the log-rank test, or None where the runs say nothing. They do not if none exploded
    while both groups had some. Nor if there are fewer than :data:`FEWEST` in one of them, whose p could not be
    small."""
    from scipy.stats import logrank

    if not len(one.onsets) + len(other.onsets) or min(one.count, other.count) < FEWEST:
        return None
    with np.errstate(invalid="ignore"):
        p = float(logrank(one.data(), other.data()).pvalue)
    return None if np.isnan(p) else p


def _first_step(steps: NDArray[np.float64], where: NDArray[np.bool_]) -> float | None:
    return float(steps[where][0]) if where.any() else None


def lifetimes(label: str, setting: str, runs: Sequence[Run]) -> Lifetimes:
    """Return the lifetimes of runs of one attention and setting.

    Raises:
        UserError: two are the same experiment, or one did not start at step 0: neither is a life of its own.
    """
    seen: dict[object, Run] = {}
    for run in runs:
        refuse_late_entry(run)
        if (same := seen.setdefault(pairing(run), run)) is not run:
            seed = run.config.seed  # a watched loop may not have told it
            told = f"{run.where} and {same.where} are one experiment" + ("" if seed is None else f" with seed {seed}")
            raise UserError(
                f"{told}; leave one of them out, or tell them apart with --by hardware"
                if run.manifest.hardware != same.manifest.hardware
                else f"{told}; name the runs one by one, without one of these"
            )
    failed = [run.failed_at for run in runs if run.failed_at is not None]
    held = [run.outcome.step for run in runs if run.failed_at is None]
    onsets, censored = np.array(sorted(failed), np.int64), np.array(sorted(held), np.int64)
    nonfinite = sum(run.outcome.outcome == "nonfinite" for run in runs)
    return Lifetimes(label, runs[0].variant, onsets, censored, setting, nonfinite)


def refuse_late_entry(run: Run) -> None:
    """Raises UserError: the run did not start at step 0. It would be counted as one that could have failed before."""
    if run.first_step:
        raise UserError(f"{run.where}: begins at step {run.first_step:,}, and could not explode before; leave it out")


def differing(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return ``name=value`` of each of one's own settings that is another in some that have it."""
    return [
        f"{name}={value}" for name, value in own.items() if any(other.get(name, value) != value for other in others)
    ]


def distinct(named: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the mappings of each name, equal ones once: many runs have few."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, values in named:
        if values not in (others := found.setdefault(name, [])):
            others.append(values)
    return found


def choices_of(run: Run) -> Mapping[str, Any]:
    """Return every choice of the attention that has an effect; none of somebody's own loop, which tells none."""
    return {} if run.watched else effective_choices(run.attention)


def settings_of(run: Run) -> dict[str, Any]:
    """Return what makes an experiment besides attention and seed.

    Of somebody's own loop it is the model's shape, if it was seen.
    """
    if run.watched:
        shape = run.config.to_dict().get("model", {})
        return {f"model.{name}": value for name, value in shape.items()}
    config = trained_config(run)
    nothing_decays = config.train.min_lr_ratio == 1
    return {key: attrgetter(key)(config) for key in SETTINGS if not (nothing_decays and key == "train.decay_steps")}


@dataclass(frozen=True)
class Lasting:
    """How many of the runs that exploded have a lasting rise (:mod:`flashpoint.runs.recovery`)."""

    count: int
    of: int
    """The runs that exploded and can say it."""
    up: int
    """Of those whose tail is too short, the ones that ended as far above what they had before."""
    short: int
    """Those whose tail is too short."""
    unknown: int
    """Those that were not validated before their onset and at their end, or whose metrics cannot be read."""


def lasting_of(runs: Sequence[Run]) -> Lasting:
    """Count both end points of the runs that exploded; those that did not have none."""
    crossed = [run for run in runs if run.failed_at is not None]
    told, ups = [], []
    for run in crossed:
        with suppress(UserError):
            if (lasts := lasting(run)) is not None:
                told.append(lasts)
            else:
                ups.append(not recovery(run).rise <= RISE)  # or NaN
    return Lasting(sum(told), len(told), sum(ups), len(ups), len(crossed) - len(told) - len(ups))


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
