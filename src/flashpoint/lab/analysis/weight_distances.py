"""How far the weights of runs come apart that differ in one thing (arXiv 2405.02803, figures 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.lifetimes import seed_and_corpus
from flashpoint.runs.metric_table import ALL_TENSORS, WEIGHTS_LARGEST, WEIGHTS_SPREAD, WEIGHTS_WASSERSTEIN
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Apart:
    """Distances of one run's weights from its twin's, at the n steps at which they were measured."""

    where: str
    """The run."""
    differs_in: str
    seed: int
    corpus: str | None
    """Fingerprint of the data."""
    steps: NDArray[np.int64]
    """Steps done, [n]."""
    largest: NDArray[np.float64]
    """Largest |difference| of an element, [n]."""
    wasserstein: NDArray[np.float64]
    """1-Wasserstein distance of the two distributions of values, [n]."""
    spread: NDArray[np.float64]
    """Standard deviation of the twin's values, [n]."""

    @property
    def pairing(self) -> tuple[int, str | None]:
        """What a run shares with the one whose distance its own is divided by: seed and corpus."""
        return self.seed, self.corpus

    @property
    def growth(self) -> float | None:
        """p of W₁ ∝ step^p by least squares on the logarithms; None where fewer than two distances are positive."""
        known = np.isfinite(self.wasserstein) & (self.wasserstein > 0)
        if known.sum() < 2:
            return None
        return float(np.polyfit(np.log(self.steps[known]), np.log(self.wasserstein[known]), 1)[0])

    def at(self, step: int) -> Distance:
        """Return the distance after ``step`` steps.

        Raises:
            UserError: it was not measured there.
        """
        place = np.flatnonzero(self.steps == step)
        if not len(place):
            raise UserError(f"--at {step}: weights were measured after {', '.join(map(str, self.steps))} steps")
        return Distance(*(float(values[place[0]]) for values in (self.largest, self.wasserstein, self.spread)))


@dataclass(frozen=True)
class Distance:
    """One distance, and the spread that it may be put in relation to."""

    largest: float
    wasserstein: float
    spread: float


def apart(run: Run) -> Apart:
    """Return the distances of a run that was measured against another (``probes.weights_against``).

    Raises:
        UserError: it was not.
    """
    twin = run.manifest.twin
    if twin is None:
        raise UserError(f"{run.where}: not measured against another run; train it with probes.weights_against=RUN")
    names = [metric.of_tensor(ALL_TENSORS) for metric in (WEIGHTS_LARGEST, WEIGHTS_WASSERSTEIN, WEIGHTS_SPREAD)]
    if names[0] not in run.columns:
        raise UserError(f"{run.where}: has no {names[0]}; give a run that measured it")
    run.check_together(*names)
    steps = run.columns[names[0]][0]
    distances = [run.columns[name][1] for name in names]
    return Apart(run.where, twin.differs_in, run.seed, seed_and_corpus(run)[1], steps + 1, *distances)


def by_difference(found: Sequence[Apart]) -> dict[str, list[Apart]]:
    """Group by what the runs differ in, in the order of each group's first run.

    Raises:
        UserError: two runs of one seed differ from their twins in the same thing.
    """
    groups: dict[str, list[Apart]] = {}
    for one in found:
        members = groups.setdefault(one.differs_in, [])
        for other in members:
            if other.seed == one.seed:
                told = f"{other.where} and {one.where}: both of seed {one.seed}, and both differ in {one.differs_in}"
                raise UserError(f"{told}; leave one of them out")
        members.append(one)
    return groups


def last_common_step(found: Sequence[Apart]) -> int:
    """Return the last step after which all were measured.

    Raises:
        UserError: there is none.
    """
    common = set(found[0].steps.tolist()).intersection(*(one.steps.tolist() for one in found))
    if not common:
        raise UserError("no step at which the weights of all these runs were measured; choose some with --at")
    return int(max(common))
