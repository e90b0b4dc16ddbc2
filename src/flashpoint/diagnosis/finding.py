"""What a diagnosis finds, what accounts for an error without a fault, and what is sure over several sequences.

Shapes: N sequences, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import averaged
from flashpoint.diagnosis.measures import Measures
from flashpoint.quantiles import student_t_isf, variance_ratio_isf

FP32_COARSE = 2**-9
"""Error of weights by FP32 beyond which the rounding of P̄, O or ℓ to BF16 cannot be told from it: half an ulp at 1."""
FP32_STEPS = 2**-22
"""Relative error of O by FP32 beside that of S: exp, ℓ, the sum over keys and the division by ℓ round by 2⁻²⁴ each."""
DEAD_ROWS = 0.001
"""Share of rows that are switched off. Nothing else makes |O| half as long."""
CHANCE = 0.001
"""How likely one test may find something in some head of a layer without a fault: that δ is biased, or does not follow,
that scores or dQ have a factor, that O errs beyond rounding. Of a diagnosis of L layers a test errs in up to L times as
many: the bound is over heads, so that a layer is judged alike alone and beside others."""
_MOST = 10_000
"""Degrees of freedom; with more of them the quantile of a ratio of variances changes by less than a tenth."""
_OF_GRADIENTS, _OF_ANY_SCORES = 8.0, 0.2
"""What the error of a gradient may be where rounded scores account for it: so many times O's, and so much at least. A
dV that nearly cancels erred by 0.05, eleven times as much as O."""
_UNSHARED = 0.5
"""Of O's error, what dV may lack where both passes have one P. What roundings add is less, and one pass alone makes 1.
"""
_UNMOVED = 0.25
"""Of O's relative error, what dV's is below where the backward pass does not have it."""
FOLLOWS = 0.5
"""Slope of an error on what a rounding makes, above which the error is surely of that rounding."""
FEW = 3
"""Different sequences without which nothing is said of δ."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in some heads of a layer.

    Attributes:
        kind: as docs/watching.md lists them.
        layer: from 1.
        heads: from 1.
        text: what is wrong and the figures that show it, one sentence.
        inherited: whether the layer was given what is wrong: then another place made it.
        beyond_rounding: of errors of δ: whether the rounding of O surely does not account for them.
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    text: str
    inherited: bool = False
    beyond_rounding: bool = False


Make = Callable[[str, Tensor, str], Finding]
"""Makes a finding of a kind, the heads [H] that have it, and a text."""


def maker(layer: int) -> Make:
    """Return what makes the findings of a layer."""

    def finding(kind: str, heads: Tensor, text: str) -> Finding:
        return Finding(kind, layer, tuple((heads.nonzero().flatten() + 1).tolist()), text)

    return finding


def fp32_error(measures: Measures) -> Tensor:
    """Return the relative error [H] of P = exp(S − L) that S of either pass and L have from FP32, at its largest.

    A sum of FP32 errs by one number in each pass; L is rounded by half of one.
    """
    return torch.expm1(2.5 * measures[table.SCORE_SPACING.name].amax(0))


def by_cap(measures: Measures, of: table.Measure) -> Tensor:
    """Return the relative error [N, H] of dQ or dK that is put down to roundings of a soft cap: twice what they make.
    Without a cap it is 0."""
    at_most = measures.get(of.name)
    return torch.zeros(()) if at_most is None else 2 * at_most.nan_to_num(0.0)


def mean_square(measures: Measures, of: table.Measure) -> Tensor:
    """Return the mean square [H] of a measure over sequences."""
    return measures[of.name].square().mean(0)


def ratio_by_chance(measures: Measures, error: table.Measure, numbers: table.Measure) -> Tensor:
    """Return the ratio [H] that the square sums of two such errors of one size surely stay below: F's quantile,
    Bonferroni over heads.

    Args:
        error: root mean square of each sequence.
        numbers: degrees of freedom of its square. Those of sequences together are by Welch and Satterthwaite.
    """
    squares = measures[error.name].square()
    together = squares.sum(0).square() / (squares.square() / measures[numbers.name]).sum(0)
    degrees = together.nan_to_num(1.0).clamp(1, _MOST).long().tolist()
    return squares.new_tensor([variance_ratio_isf(CHANCE / len(degrees), one, one) for one in degrees])


def beyond_rounding(measures: Measures) -> Tensor:
    """Return the heads [H] whose O surely errs by more than twice what the rounding of P̄ and O makes."""
    by_chance = ratio_by_chance(measures, table.OUT_ERROR, table.OUT_NUMBERS)
    expected = mean_square(measures, table.OUT_ERROR_EXPECTED)
    return mean_square(measures, table.OUT_ERROR) > by_chance.clamp_min(4) * expected


def of_another_function(measures: Measures) -> Tensor:
    """Return the heads [H] whose O errs as no rounding makes it, where the backward pass has the same P.

    They compute something else than the call says, in both passes: an option that the call was not told, or a fault of
    the forward pass. Their gradients are those of another O, and say nothing of the backward pass.
    """
    if table.OUT_UNSHARED.name not in measures:
        return torch.zeros_like(fp32_error(measures), dtype=torch.bool)
    share = measures[table.OUT_UNSHARED.name].square().nanmean(0).sqrt()
    return beyond_rounding(measures) & ~as_rounded(measures) & (share < _UNSHARED)


def of_forward_alone(measures: Measures) -> Tensor:
    """Return the heads [H] whose dV is right beside an O that is not: P of the backward pass is that of the call.

    With another P in both passes, or a factor of V or O, dV errs about as much as O. What is added to O does not move
    dV, as positions in V do not.
    """
    if table.OUT_UNSHARED.name not in measures:
        return torch.zeros_like(fp32_error(measures), dtype=torch.bool)
    share = measures[table.OUT_UNSHARED.name].square().nanmean(0).sqrt()
    of_out, of_grad_v = (measures[one.name].square().nanmean(0).sqrt() for one in (table.OUT_ERROR, table.GRAD_V.error))
    return (share > _UNSHARED) & (of_grad_v < _UNMOVED * of_out)


def as_rounded(measures: Measures) -> Tensor:
    """Return the heads [H] whose O errs by no more than twice what rounding S, P̄ and Ō makes, or by chance. All
    features of a row with two keys have the error of one number."""
    by_chance = ratio_by_chance(measures, table.OUT_ERROR, table.OUT_NUMBERS_OF_SCORES)
    coarse = mean_square(measures, table.OUT_ERROR_COARSE)
    return mean_square(measures, table.OUT_ERROR) < by_chance.clamp_min(4) * coarse


def cut_off(measures: Measures, identities: Sequence[str]) -> Tensor:
    """Return the heads [H] whose O is surely cut off to its dtype, and errs by nothing else: cutting off makes at most
    twice the error of rounding. What makes O shorter by far looks like it, too."""
    share, margin = mean_and_margin(measures[table.OUT_CUT.name], identities)
    return (share - margin > 0) & ~beyond_rounding(measures)


def follows(measures: Measures, rows: Iterable[table.Measure], identities: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the heads [H] in which the slope on what one of some roundings makes is surely above :data:`FOLLOWS`, and
    the largest such slope [H]; 0 in the others."""
    found = [mean_and_margin(measures[row.name], identities) for row in rows if row.name in measures]
    sure = [mean.where(mean - margin > FOLLOWS, 0.0) for mean, margin in found]
    largest = torch.stack(sure).amax(0) if sure else torch.zeros_like(fp32_error(measures))
    return largest > 0, largest


def explained(measures: Measures) -> Tensor:
    """Return the heads [H] whose errors may follow from rounded scores, or from rows that are switched off."""
    by_chance = ratio_by_chance(measures, table.OUT_ERROR, table.OUT_NUMBERS)
    expected = mean_square(measures, table.OUT_ERROR_EXPECTED)
    coarse = by_chance * mean_square(measures, table.OUT_ERROR) > 2 * expected
    return (coarse & as_rounded(measures)) | (measures[table.DEAD_ROWS.name].mean(0) > DEAD_ROWS)


def explained_gradient(measures: Measures, error: Tensor) -> Tensor:
    """Return the heads [H] in which a gradient's relative error [H] may follow from what :func:`explained` names.

    Rounded scores make gradients err about as O does. In 6,000 right calls of ``scripts/faults/fuzz_calls.py`` those
    that erred by more than :data:`_OF_ANY_SCORES` did so at most 2.8 times as much as O.
    """
    of_out = mean_square(measures, table.OUT_ERROR).sqrt()
    dead = measures[table.DEAD_ROWS.name].mean(0) > DEAD_ROWS
    return explained(measures) & (dead | (error <= (_OF_GRADIENTS * of_out).clamp_min(_OF_ANY_SCORES)))


def standard_errors(count: int, heads: int) -> float:
    """Return how many standard errors from a value a mean of so many surely differs from it: Student's t, Bonferroni
    over heads. Of one it is as of two."""
    return student_t_isf(CHANCE / heads / 2, max(count - 1, 1))


def mean_and_margin(values: Tensor, identities: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the mean [H] of values [N, H] over different sequences, and how far the true one surely is no farther from
    it. The latter is infinite where fewer than :data:`FEW` have a value. NaN is none."""
    different = averaged(values, identities)
    mean, counts = different.nanmean(0), (~different.isnan()).sum(0)
    variance = (different - mean).square().nansum(0) / (counts - 1).clamp_min(1)
    limits = mean.new_tensor([standard_errors(count, len(counts)) for count in counts.tolist()])
    return mean, torch.where(counts >= FEW, limits * (variance / counts).sqrt(), torch.inf)


def margin_by_rows(spreads: Tensor, rows: Tensor, identities: Sequence[str]) -> Tensor:
    """Return the margin [H] of :func:`mean_and_margin` where rows of a sequence are independent.

    Args:
        spreads: standard errors [N, H] of the values over rows.
        rows: degrees of freedom [N, H] of these.
    """
    different, together = averaged(spreads.square(), identities), averaged(rows, identities).sum(0)
    counts = (~different.isnan()).sum(0)
    degrees = together.nan_to_num(1.0).clamp(1, _MOST).long().tolist()
    limits = spreads.new_tensor([standard_errors(one + 1, len(counts)) for one in degrees])
    return torch.where(counts >= FEW, limits * different.nansum(0).sqrt() / counts, torch.inf)


def surely_off(values: Tensor, identities: Sequence[str], least: Tensor | float) -> Tensor:
    """Return the mean [H] of values [N, H] where it surely is not 0 and at least so large; 0 in other heads."""
    mean, margin = mean_and_margin(values, identities)
    return mean.where((mean.abs() > margin) & (mean.abs() >= least), 0.0)


def told_range(values: Tensor, form: str) -> str:
    """Return the least and the largest of some values, or the one that both are told as."""
    return " to ".join(dict.fromkeys(format(float(one), form) for one in (values.min(), values.max())))
