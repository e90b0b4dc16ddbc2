"""Which measure of an attention foretells how soon it explodes: rank correlations with the onset, seed by seed.

Runs of one seed on another text, or in another setting, are a seed of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.bias import Relative, Window
from flashpoint.lab.analysis.lifetimes import grouped, pairing
from flashpoint.lab.analysis.weight_distances import apart
from flashpoint.lab.deviation.defaults import HEAD_SIZE, LENGTH, SEEDS
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.metric_table import ROW_SUM
from flashpoint.runs.run import Run

WINDOW = Window(1000, 3000)
"""Steps of the measures in training: after the warm-up, before most onsets."""
FEWEST = 5
"""Attentions that a seed needs for a correlation of its own."""


@dataclass(frozen=True)
class Foretelling:
    """How the ranks of a measure and of the onset go together."""

    measure: str
    correlations: NDArray[np.float64]
    """Spearman's ρ over the attentions of one seed, for each seed that has enough of them."""
    attentions: NDArray[np.int64]
    """How many attentions each of these seeds has."""


def foretellings(runs: Sequence[Run]) -> list[Foretelling]:
    """Correlate measures with the onset. A run without an onset ranks behind all onsets. NaN measures nothing.

    Runs of one experiment are taken together: the longest has the onset, and each adds what it has measured.

    Raises:
        UserError: no seed has enough attentions with any measure.
    """
    values: dict[str, dict[object, list[tuple[float, float]]]] = {}
    for members in grouped(runs).values():
        isolated = dict(_isolated(members[0].attention))
        experiments: dict[object, list[Run]] = {}
        for run in members:
            experiments.setdefault(pairing(run), []).append(run)
        for experiment, same in experiments.items():
            longest = max(same, key=lambda run: run.outcome.step)
            onset = float("inf") if longest.failed_at is None else float(longest.failed_at)
            measured = dict(isolated)
            for run in same:
                measured.update([*_in_training(run), *_weights(run)])
            for measure, value in measured.items():
                if not np.isnan(value):
                    values.setdefault(measure, {}).setdefault(experiment, []).append((value, onset))
    found = [_foretelling(measure, of_seeds) for measure, of_seeds in values.items()]
    found = [one for one in found if len(one.correlations)]
    if not found:
        raise UserError(f"--measures: no seed has {FEWEST} attentions whose onsets differ; give more runs")
    return found


def _foretelling(measure: str, of_seeds: dict[object, list[tuple[float, float]]]) -> Foretelling:
    from scipy.stats import spearmanr

    correlations, counts = [], []
    for pairs in of_seeds.values():
        measured, onsets = np.array(pairs).T
        if len(pairs) >= FEWEST and len(set(onsets)) > 1 and len(set(measured)) > 1:
            correlations.append(float(spearmanr(measured, onsets).statistic))
            counts.append(len(pairs))
    return Foretelling(measure, np.array(correlations), np.array(counts))


def _isolated(variant: AttentionVariant) -> Iterator[tuple[str, float]]:
    """Yield the distances from FP64 of one forward and backward pass in BF16 on random inputs, relative to the golden
    value's root mean square."""
    from flashpoint.lab.deviation.arithmetic import arithmetic
    from flashpoint.lab.deviation.drawn_inputs import drawn
    from flashpoint.lab.deviation.emulated import Block
    from flashpoint.lab.deviation.engines import engine_of
    from flashpoint.lab.deviation.formats import format_named
    from flashpoint.lab.deviation.pairs import pairs
    from flashpoint.lab.deviation.statistics import deviation

    bf16, inputs = format_named("bf16"), drawn("normal", SEEDS, LENGTH, HEAD_SIZE)
    engine, compute = engine_of(variant, variant.title), arithmetic(bf16, "fp32")
    for pair in pairs([engine], inputs, compute, [Block(64, 64)], causal=True, quantities=("O", "dQ")):
        told = deviation(pair.difference, pair.golden, bf16, "relative")
        yield f"{pair.quantity} on random inputs, largest error", told.largest
        yield f"{pair.quantity} on random inputs, RMS error", told.rms
        yield f"{pair.quantity} on random inputs, |signed mean|", float(abs(told.signed_means.mean()))


def _in_training(run: Run) -> Iterator[tuple[str, float]]:
    """Yield noise and bias of δ against the exact row sum, where the run has measured them in the window."""
    try:
        relative = Relative.of(run, ROW_SUM, WINDOW)
    except UserError:
        return
    yield "δ in training, noise", relative.variance**0.5
    yield "δ in training, |bias|", abs(relative.bias)


def _weights(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the distances of the weights from those of a twin with another attention, where they were measured."""
    if run.manifest.twin is None:
        return
    found = apart(run)
    what, _, twin = found.differs_in.rpartition(" for ")
    if what.startswith("attention "):
        for step, distance in zip(found.steps, found.wasserstein, strict=True):
            yield f"W₁ of weights from those of {twin} after {step:,} steps", float(distance)
