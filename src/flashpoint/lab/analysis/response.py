"""How the onset answers to one setting, or to the hardware: a dose and its response, each dose a group of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flashpoint.errors import UserError, nearest
from flashpoint.lab.analysis.lifetimes import (
    Lifetimes,
    choices_of,
    differing,
    distinct,
    lifetimes,
    seed_and_corpus,
    settings_of,
)
from flashpoint.runs.run import Run

HARDWARE = "hardware"
"""What is no key of the configuration but of the manifest: the device's name."""


@dataclass(frozen=True)
class Dose:
    """The runs of one attention at one value of the setting."""

    value: float | str
    runs: Sequence[Run]

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Return the lifetimes of these runs. Raises UserError if two are one experiment, or one is a branch."""
        return lifetimes("", "", self.runs)


def responses(runs: Sequence[Run], key: str) -> dict[str, list[Dose]]:
    """Return the doses, smallest first, of each attention, and of each value of all else in which runs differ, the seed
    apart.

    Args:
        key: a number of the configuration: ``attn.out_unnormalized.bits``, ``attn.delta_error.size``, ``train.lr``, …;
            or :data:`HARDWARE`.

    Raises:
        UserError: a run has no such number.
    """
    groups: dict[str, dict[Any, list[Run]]] = {}
    namesakes = distinct((run.variant, _settings(run)) for run in runs)
    for run in runs:
        groups.setdefault(_label(run, namesakes[run.variant], key), {}).setdefault(_value(run, key), []).append(run)
    return {
        label: [Dose(value, members) for value, members in sorted(doses.items())]
        for label, doses in sorted(groups.items())
    }


def _value(run: Run, key: str) -> float | str:
    if key == HARDWARE:
        return run.manifest.hardware
    settings = _settings(run)
    numbers = {name: one for name, one in settings.items() if isinstance(one, int | float) and type(one) is not bool}
    if key not in numbers:  # a loop that is watched tells few of them
        example = next((f"e.g. {name}, or " for name in ("train.lr", *numbers) if name in numbers), "")
        if key == "seed":
            raise UserError(f"--by {key}: each row counts its runs over seeds; give a setting, {example}{HARDWARE}")
        wrong = "is no number there" if key in settings else "is no number there that experiments differ in"
        raise UserError(f"{run.where}: {key} {wrong}; {nearest(key, numbers)}give one that is, {example}{HARDWARE}")
    return float(numbers[key])


def exponents(doses: Sequence[Dose], key: str) -> list[float]:
    """Return p of onset ∝ value^p for each seed: the least-squares slope of log onset over log value.

    Empty where the setting is no positive quantity of two values or more, or where a seed has no onset at one of them.
    To leave out those that held would make the answer look smaller than it is.
    """
    from scipy.stats import linregress

    if len(doses) < 2 or not is_quantity(doses, key):
        return []
    by_seed = [{seed_and_corpus(run): run.failed_at for run in dose.runs} for dose in doses]
    seeds = dict.fromkeys(seed for of_dose in by_seed for seed in of_dose)
    onsets = np.array([[of_dose.get(seed) or np.nan for of_dose in by_seed] for seed in seeds])
    if np.isnan(onsets).any():
        return []
    values = np.log(np.array([dose.value for dose in doses], np.float64))
    return [float(linregress(values, np.log(of_seed)).slope) for of_seed in onsets]


def is_quantity(doses: Sequence[Dose], key: str) -> bool:
    """Whether ratios of the values mean something; bits are a logarithm already."""
    values = [dose.value for dose in doses]
    return all(isinstance(value, float) and value > 0 for value in values) and not key.endswith(".bits")


def _label(run: Run, namesakes: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the attention's name with each setting that tells it from others of that name, and its formats other than
    BF16, unless these are what is asked for."""
    of_bits = key.endswith(".bits")
    own = {
        name: value
        for name, value in _settings(run).items()
        if name != key and (of_bits or not (name.startswith("attn.") and name.endswith(".bits")))
    }
    name = " ".join([run.variant, *(part.removeprefix("attn.") for part in differing(own, namesakes))])
    return name if of_bits else name + run.title.removeprefix(run.variant)


def _settings(run: Run) -> dict[str, Any]:
    return {**{f"attn.{name}": value for name, value in choices_of(run).items()}, **settings_of(run)}
