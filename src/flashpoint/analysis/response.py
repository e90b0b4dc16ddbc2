"""How the onset answers to one setting: a dose and its response, each dose a group of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flashpoint.analysis.survival import Lifetimes, choices_of, differing, lifetimes, seed_and_corpus, settings_of
from flashpoint.errors import UserError
from flashpoint.runs.recorded import Run


@dataclass(frozen=True)
class Dose:
    """The runs of one attention at one value of the setting."""

    value: float
    runs: Sequence[Run]

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Return the lifetimes of these runs. Raises UserError if two are one experiment, or one is a branch."""
        return lifetimes("", "", self.runs)


def responses(runs: Sequence[Run], key: str) -> dict[str, list[Dose]]:
    """Return the doses, smallest first, of each attention, and of each value of all else in which runs differ, the seed
    apart.

    Args:
        key: a number of the configuration: ``attn.out_unnormalized.bits``, ``attn.delta_error.size``, ``train.lr``, …

    Raises:
        UserError: a run has no such number.
    """
    groups: dict[str, dict[float, list[Run]]] = {}
    for run in runs:
        value = _settings(run).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{run.where}: {key} is no number there; give one that is, e.g. train.lr")
        groups.setdefault(_label(run, runs, key), {}).setdefault(float(value), []).append(run)
    return {
        label: [Dose(value, members) for value, members in sorted(doses.items())]
        for label, doses in sorted(groups.items())
    }


def exponents(doses: Sequence[Dose], key: str) -> list[float]:
    """Return p of onset ∝ value^p for each seed: the least-squares slope of log onset over log value.

    Empty where the setting is no positive quantity of two values or more, or where a seed has no onset at one of them:
    to leave out those that held would make the answer look smaller than it is.
    """
    from scipy.stats import linregress

    if len(doses) < 2 or not is_quantity(doses, key):
        return []
    by_seed = [{seed_and_corpus(run): run.failed_at for run in dose.runs} for dose in doses]
    seeds = dict.fromkeys(seed for of_dose in by_seed for seed in of_dose)
    onsets = np.array([[of_dose.get(seed) or np.nan for of_dose in by_seed] for seed in seeds])
    if np.isnan(onsets).any():
        return []
    values = np.log([dose.value for dose in doses])
    return [float(linregress(values, np.log(of_seed)).slope) for of_seed in onsets]


def is_quantity(doses: Sequence[Dose], key: str) -> bool:
    """Whether ratios of the values mean something; bits are a logarithm already."""
    return all(dose.value > 0 for dose in doses) and not key.endswith(".bits")


def _label(run: Run, runs: Sequence[Run], key: str) -> str:
    """Return the attention's name with each setting that tells it from others of that name."""
    namesakes = [_settings(other) for other in runs if other.variant == run.variant]
    own = {name: value for name, value in _settings(run).items() if name != key}
    return " ".join([run.variant, *(part.removeprefix("attn.") for part in differing(own, namesakes))])


def _settings(run: Run) -> dict[str, Any]:
    return {**{f"attn.{name}": value for name, value in choices_of(run).items()}, **settings_of(run)}
