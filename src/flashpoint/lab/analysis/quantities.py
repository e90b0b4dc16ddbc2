"""Quantities of runs whose mean and interval a claim is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.analysis.bias import BEFORE_ONSET, Window
from flashpoint.lab.analysis.bias_breakdown import by_layer
from flashpoint.lab.analysis.bias_law import by_weights
from flashpoint.lab.analysis.claims_file import Interval, QuantityName
from flashpoint.lab.analysis.drawn_targets import by_digest
from flashpoint.lab.analysis.lifetimes import choices_of, grouped
from flashpoint.lab.analysis.paired import losses_at
from flashpoint.lab.analysis.ratios import pairs, w_q_ratio
from flashpoint.lab.analysis.weight_distances import Apart, apart, by_difference
from flashpoint.runs.metric_table import (
    EFFECTIVE_RANK,
    FEATURE_SIGN_AGREEMENT,
    FEATURE_V_SIGN_AGREEMENT,
    ONE_SIDED_TIED_OUT_BIAS,
    SIGN_AGREEMENT,
    STEP_SIMILARITY,
    TIE_MULTIPLICITY,
    TIED_OUT_BIAS,
    TIED_ROWS,
    TIES_ON_FIRST_KEYS,
    TOKEN_SIMILARITY,
    UNTIED_OUT_BIAS,
)
from flashpoint.runs.run import Run

GROWTH = Window(last=2000)
"""Where probes of the hottest head are read: the 2,000 steps that end ``BEFORE_ONSET`` before the onset."""
GROWTH_BEGINS = 2000 + BEFORE_ONSET
"""Steps before the onset."""


@dataclass(frozen=True)
class Quantity:
    """A measured quantity that an interval is taken of."""

    told: str
    """What tables call it, with its unit."""
    form: str
    """The format of its values."""
    values: Callable[[Sequence[Run], Sequence[Run], Interval], NDArray[np.float64]]
    """Its values [n], from runs, the runs to compare with, and the criterion."""
    ratio: bool = False
    """Whether the values are ratios, of which the mean is a geometric one."""
    by_seed: bool = False
    """Whether runs of one seed have one value together; else a run without a value is left out."""


def _bias_over_variance(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    by_run = [by_layer(run, Window()).biases_over_variance for run in runs]
    for run, by_step in zip(runs, by_run, strict=True):
        if not len(by_step):
            raise UserError(f"{run.where}: δ takes no part of the error of O there; leave the run out")
    return np.array([by_step.mean() for by_step in by_run])


def _bias_exponents(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each seed, the slope of log bias against log noise² over the roundings of a set of weights, a mean
    over its sets."""
    exponents = []
    for name, points in by_weights(runs, Window()).items():
        known = [point for point in points if not point.independent]
        if len(known) < 2 or any(point.bias <= 0 for point in known):
            raise UserError(f"{name}: two or more roundings with a positive bias make an exponent; leave its runs out")
        noises, biases = np.log([point.variance for point in known]), np.log([point.bias for point in known])
        exponents.append((points[0].run.seed, float(np.polyfit(noises, biases, 1)[0])))
    return _by_seed(exponents)


def _random_over_nearest(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each seed, bias / noise² with Ō rounded at random over that with Ō rounded to nearest, a geometric
    mean over its sets of weights."""
    ratios = []
    for name, points in by_weights(runs, Window()).items():
        factors = {point.run.attention.out_unnormalized.mode: point.factor for point in points}
        if len(points) != 2 or factors.keys() != {"stochastic", "nearest"} or min(factors.values()) <= 0:
            raise UserError(
                f"{name}: one rounding of Ō at random and one to nearest, each with a positive bias, make a ratio; "
                "leave other runs out"
            )
        ratios.append((points[0].run.seed, float(np.log(factors["stochastic"] / factors["nearest"]))))
    return np.exp(_by_seed(ratios))


def _bias_with_targets(targets: str) -> Callable[..., NDArray[np.float64]]:
    """Return, for each seed, the mean over batches of the layer with the largest error, a mean over its sets of
    weights."""

    def values(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
        groups = [group for group in by_digest(runs) if group.complete]
        measured = [(group, group.measure("bias", targets, group.heaviest_layer)) for group in groups]
        return _by_seed([(group.first.seed, float(found.mean())) for group, found in measured if found is not None])

    return values


def _by_seed(values: Sequence[tuple[int, float]]) -> NDArray[np.float64]:
    """Return the mean of each seed [seeds]. Sets of weights of one seed have the same batches and are often of one run:
    they are no repetitions of one another."""
    seeds = dict.fromkeys(seed for seed, _ in values)
    return np.array([np.mean([value for its_seed, value in values if its_seed == seed]) for seed in seeds])


def _loss_differences(runs: Sequence[Run], against: Sequence[Run], asked: Interval) -> NDArray[np.float64]:
    of_one_attention(runs)
    of_one_attention(against)
    assert asked.step is not None  # checked where the criterion is read
    found = losses_at(asked.step, [*runs, *against], against[0].title)
    return np.concatenate([losses.differences for losses in found])


def _weights_ratios(runs: Sequence[Run], against: Sequence[Run], asked: Interval) -> NDArray[np.float64]:
    """Return, for each seed and corpus of both, W₁ of the weights from their twin's over that of the other run.

    A pair of which one has the weights of its twin is left out: it has no ratio."""
    assert asked.step is not None  # the criterion's own check
    others = {one.pairing: one.at(asked.step).wasserstein for one in _of_one_difference(against)}
    own = {one.pairing: one.at(asked.step).wasserstein for one in _of_one_difference(runs)}
    return np.array([value / others[key] for key, value in own.items() if value and others.get(key)])


def _of_one_difference(runs: Sequence[Run]) -> list[Apart]:
    """Return the distances of runs that differ from their twins in one thing, one a seed.

    Raises:
        UserError: they differ in several, or two of one seed in the same.
    """
    groups = by_difference([apart(run) for run in runs])
    if len(groups) > 1:
        raise UserError(f"{len(groups)} differences from the twin: {'; '.join(groups)}; name runs of one of them")
    return next(iter(groups.values()))


def _of_hottest_head(metric: str) -> Callable[..., NDArray[np.float64]]:
    """Return, for each run, the mean of a probe over the growth, in the head whose W_Q is largest at the onset."""

    def values(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
        return np.array([_growing(run, metric).mean() for run in runs])

    return values


def _of_one_sign(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each run, the share of elements where dO and the error of O have one sign; the probe has the mean
    product of the two signs."""
    products = [_growing(run, SIGN_AGREEMENT.name).mean() for run in runs]
    return (1 + np.array(products)) / 2


def _growing(run: Run, metric: str) -> NDArray[np.float64]:
    """Return a probe by observed step [n] of the growth, in the head whose W_Q is largest at the onset.

    Raises:
        UserError: the run has no such growth, or has not measured the probe.
    """
    if run.onset is None or run.onset < GROWTH_BEGINS:
        raise UserError(
            f"{run.where}: {run.verdict}; probes are read from {GROWTH_BEGINS:,} steps before an onset on, leave the "
            "run out"
        )
    layer, head = run.hottest_head
    steps, found = run.measured_by_head(metric)
    of_head: NDArray[np.float64] = found[layer - 1, head - 1, GROWTH.of(run, steps)]
    return of_head


def _effective_rank(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each run, the mean effective rank of the error of dW_Q; of no error the probe has 0, which is none.

    Raises:
        UserError: a run has no error.
    """
    ranks = [_growing(run, EFFECTIVE_RANK.name) for run in runs]
    for run, by_step in zip(runs, ranks, strict=True):
        if not by_step.all():
            raise UserError(f"{run.where}: δ takes no part of the error of O there; leave the run out")
    return np.array([by_step.mean() for by_step in ranks])


def _ties_on_sinks(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each run, the share of tied maxima that lie on the first four keys, over all ties of the growth."""
    return _over_ties(runs, TIES_ON_FIRST_KEYS.name, TIED_ROWS.name, TIE_MULTIPLICITY.name)


def _one_sided_bias(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each run, the bias of O's rounding away from 0 in the most one-sided feature of V, over all tied rows
    of the growth."""
    return _over_ties(runs, ONE_SIDED_TIED_OUT_BIAS.name, TIED_ROWS.name)


def _over_ties(runs: Sequence[Run], metric: str, *counts: str) -> NDArray[np.float64]:
    """Return, for each run, the mean of a probe of ties over the growth, each step by the product of its counts.

    A run without a tie is left out."""
    means = []
    for run in runs:
        ties = np.prod([_growing(run, count) for count in counts], axis=0)
        if ties.sum():
            means.append((_growing(run, metric) * ties).sum() / ties.sum())
    return np.array(means)


def _out_error_bias(tied: bool) -> Callable[..., NDArray[np.float64]]:
    """Return, for each run, the bias of O's rounding away from 0 in the rows with a tie, or in those without, over all
    that were observed.

    A run without such a row is left out."""

    def values(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
        biases = []
        for run in runs:
            steps, found = run.measured_by_head((TIED_OUT_BIAS if tied else UNTIED_OUT_BIAS).name)
            run.check_together((TIED_OUT_BIAS if tied else UNTIED_OUT_BIAS).name, TIED_ROWS.name)
            share = run.measured_by_head(TIED_ROWS.name)[1][..., (chosen := Window().of(run, steps))]
            rows = share if tied else 1 - share
            if rows.sum():
                biases.append((found[..., chosen] * rows).sum() / rows.sum())
        return np.array(biases)

    return values


def _w_q_ratios(runs: Sequence[Run], against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each pair of a seed, the ratio of :func:`.w_q_ratio` of layer 2. A pair without one is left out."""
    of_one_attention(runs)
    of_one_attention(against)
    found = [w_q_ratio(*pair, 2) for members in pairs(runs, against).values() for pair in members.values()]
    return np.array([ratio for ratio in found if ratio is not None])


def _weights_growth(runs: Sequence[Run], _against: Sequence[Run], _asked: Interval) -> NDArray[np.float64]:
    """Return, for each seed, p of W₁ ∝ step^p. A run whose weights are its twin's almost throughout is left out."""
    exponents = [one.growth for one in _of_one_difference(runs)]
    return np.array([exponent for exponent in exponents if exponent is not None])


QUANTITIES: Mapping[QuantityName, Quantity] = {
    "bias_over_variance": Quantity("bias / variance of the hottest layer", ".2f", _bias_over_variance),
    "bias_exponent": Quantity("p of bias ∝ (noise²)^p", ".2f", _bias_exponents, by_seed=True),
    "bias_random_over_nearest": Quantity(
        "bias / noise² with Ō rounded at random, over that with Ō rounded to nearest",
        ".2f",
        _random_over_nearest,
        ratio=True,
        by_seed=True,
    ),
    "bias_unrounded_targets": Quantity(
        "bias / variance, targets of the unrounded model", ".2f", _bias_with_targets("unrounded"), by_seed=True
    ),
    "bias_model_targets": Quantity(
        "bias / variance, targets of the rounded model", ".2f", _bias_with_targets("model"), by_seed=True
    ),
    "validation_loss": Quantity("difference of validation loss in nats", "+.3f", _loss_differences),
    "weights_distance": Quantity("ratio of the W₁ of weights", ".2f", _weights_ratios, ratio=True),
    "sign_agreement": Quantity("share of elements where dO and the error of O have one sign", ".4f", _of_one_sign),
    "feature_sign_agreement": Quantity(
        "share of rows where dO and the error of O have one sign, in the feature that agrees most often in other rows",
        ".4f",
        _of_hottest_head(FEATURE_SIGN_AGREEMENT.name),
    ),
    "feature_v_sign": Quantity(
        "share of keys whose V has the sign of the mean error of O, in that feature",
        ".3f",
        _of_hottest_head(FEATURE_V_SIGN_AGREEMENT.name),
    ),
    "effective_rank": Quantity("effective rank of the error of dW_Q", ".2f", _effective_rank),
    "token_similarity": Quantity(
        "cosine of (PK)[T]ᵀX[T] between tokens of a step", ".2f", _of_hottest_head(TOKEN_SIMILARITY.name)
    ),
    "step_similarity": Quantity(
        "cosine of (PK)[T]ᵀX[T] between tokens of two observed steps", ".2f", _of_hottest_head(STEP_SIMILARITY.name)
    ),
    "ties_on_sinks": Quantity("share of tied maxima on the first four keys", ".3f", _ties_on_sinks),
    "tied_out_error_bias": Quantity(
        "Σ (O_lp − O_hp)·sign O_hp / Σ |O_lp − O_hp| in tied rows, mean by tied rows", "+.3f", _out_error_bias(True)
    ),
    "untied_out_error_bias": Quantity(
        "Σ (O_lp − O_hp)·sign O_hp / Σ |O_lp − O_hp| in rows without a tie, mean by rows",
        "+.3f",
        _out_error_bias(False),
    ),
    "one_sided_tied_out_error_bias": Quantity(
        "Σ (O_lp − O_hp)·sign O_hp / Σ |O_lp − O_hp| in tied rows, in the feature whose V is most of one sign",
        "+.3f",
        _one_sided_bias,
    ),
    "w_q_layer_2": Quantity(
        "largest W_Q norm of a head of layer 2, over that of the other run, at the last step that both measured",
        ".2g",
        _w_q_ratios,
        ratio=True,
    ),
    "weights_growth": Quantity("p of W₁ of weights ∝ step^p", ".2f", _weights_growth),
}
"""Quantities by name."""


def _apart_from_heads(run: Run) -> tuple[str, str]:
    if run.watched:
        return run.title, ""
    named, _, _ = run.attention.name.partition(" ")  # what follows tells its choices, the heads too
    return named, str({**choices_of(run), "heads": None})


def of_one_attention(runs: Sequence[Run]) -> None:
    """Refuse runs of several attentions, but let each run choose the heads that its attention computes.

    Raises:
        UserError: naming the attentions.
    """
    if len(set(map(_apart_from_heads, runs))) > 1:
        labels = list(dict.fromkeys(label for _, label in grouped(runs)))
        raise UserError(f"{len(labels)} attentions: {'; '.join(labels)}; name runs of one of them")
