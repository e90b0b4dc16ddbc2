"""How the onset answers to one setting: a dose and its response, each dose a group of seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flashpoint.errors import UserError
from flashpoint.report.figures import colour
from flashpoint.report.series import RecordedRun
from flashpoint.report.survival import Lifetimes, choices_of, differing, lifetimes, seed_and_corpus, settings_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Dose:
    """The runs of one attention at one value of the setting."""

    value: float
    runs: Sequence[RecordedRun]

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Raises UserError where two of the runs are one experiment, or one is a branch."""
        return lifetimes("", "", self.runs)


def responses(runs: Sequence[RecordedRun], key: str) -> dict[str, list[Dose]]:
    """Doses, smallest first, of each attention, and of each value of all else in which runs differ, the seed apart.

    Args:
        key: a number of the configuration: ``attn.out_unnormalized_bits``, ``attn.delta_error.size``, ``train.lr``, …

    Raises:
        UserError: a run has no such number.
    """
    groups: dict[str, dict[float, list[RecordedRun]]] = {}
    for run in runs:
        value = _settings(run).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{run.folder.path}: {key} is no number there; give one that is, e.g. train.lr")
        groups.setdefault(_label(run, runs, key), {}).setdefault(float(value), []).append(run)
    return {
        label: [Dose(value, members) for value, members in sorted(doses.items())]
        for label, doses in sorted(groups.items())
    }


def exponents(doses: Sequence[Dose], key: str) -> list[float]:
    """p of onset ∝ value^p for each seed: the least-squares slope of log onset over log value.

    Empty where the setting is no positive quantity of two values or more, or where a seed has no onset at one of them:
    to leave out those that held would make the answer look smaller than it is.
    """
    from scipy.stats import linregress

    if len(doses) < 2 or not _is_quantity(doses, key):
        return []
    by_seed = [{seed_and_corpus(run): run.failed_at for run in dose.runs} for dose in doses]
    seeds = dict.fromkeys(seed for of_dose in by_seed for seed in of_dose)
    onsets = np.array([[of_dose.get(seed) or np.nan for of_dose in by_seed] for seed in seeds])
    if np.isnan(onsets).any():
        return []
    values = np.log([dose.value for dose in doses])
    return [float(linregress(values, np.log(of_seed)).slope) for of_seed in onsets]


def draw_responses(found: dict[str, list[Dose]], key: str) -> Figure:
    """Median onset with its 95 % interval over the setting; an arrow where most runs were stable to the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.5), dpi=110, layout="constrained")
    panel = figure.subplots()
    shared = Counter(doses[0].lifetimes.variant for doses in found.values())
    for number, (label, doses) in enumerate(found.items()):
        variant = doses[0].lifetimes.variant
        line = colour(variant) if shared[variant] == 1 else f"C{number}"
        for dose in doses:
            if (median := dose.lifetimes.median_onset) is not None:
                low, high = dose.lifetimes.median_interval()
                reach = [[median - (low or median)], [(high or _longest(dose.lifetimes)) - median]]
                panel.errorbar(dose.value, median, yerr=reach, color=line, marker="o", capsize=3)
        reached = [
            (dose.value, dose.lifetimes.median_onset) for dose in doses if dose.lifetimes.median_onset is not None
        ]
        panel.plot([value for value, _ in reached], [median for _, median in reached], color=line, label=label)
        held = [dose for dose in doses if dose.lifetimes.median_onset is None]
        panel.plot(
            [dose.value for dose in held],
            [_longest(dose.lifetimes) for dose in held],
            "^",
            color=line,
            fillstyle="none",
        )
    panel.set_yscale("log")
    if all(_is_quantity(doses, key) for doses in found.values()):
        panel.set_xscale("log")
    panel.set_xlabel(key)
    panel.set_ylabel("median onset, step (95 %); △ stable to there")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False)
    return figure


def _is_quantity(doses: Sequence[Dose], key: str) -> bool:
    """Whether ratios of the values mean something; bits are a logarithm already."""
    return all(dose.value > 0 for dose in doses) and not key.endswith("_bits")


def _label(run: RecordedRun, runs: Sequence[RecordedRun], key: str) -> str:
    """The attention, with what else differs from its namesakes."""
    namesakes = [_settings(other) for other in runs if other.variant == run.variant]
    own = {name: value for name, value in _settings(run).items() if name != key}
    return " ".join([run.variant, *(part.removeprefix("attn.") for part in differing(own, namesakes))])


def _settings(run: RecordedRun) -> dict[str, Any]:
    return {**{f"attn.{name}": value for name, value in choices_of(run).items()}, **settings_of(run)}


def _longest(runs: Lifetimes) -> float:
    return float(max([*runs.onsets, *runs.censored]))
