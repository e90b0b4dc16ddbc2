"""What is sure over several sequences: Student's t, Bonferroni over heads.

Shapes: N sequences, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint.diagnosis.repeats import averaged
from flashpoint.quantiles import student_t_isf

CHANCE = 0.001
"""How likely a diagnosis of one layer without a fault may call some head's δ biased, or one that does not follow."""
FEW = 3
"""Different sequences without which nothing is said of δ."""


def standard_errors(sequences: int, heads: int) -> float:
    """Return how many standard errors from a value a mean over sequences surely differs from it: Student's t,
    Bonferroni over heads. Of one sequence it is as of two."""
    return student_t_isf(CHANCE / heads / 2, max(sequences - 1, 1))


def mean_and_margin(values: Tensor, identities: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the mean [H] of values [N, H] over different sequences, and how far the true one surely is no farther from
    it; infinite where fewer than :data:`FEW` have a value. NaN is none."""
    different = averaged(values, identities)
    mean, counts = different.nanmean(0), (~different.isnan()).sum(0)
    variance = (different - mean).square().nansum(0) / (counts - 1).clamp_min(1)
    limits = mean.new_tensor([standard_errors(count, len(counts)) for count in counts.tolist()])
    return mean, torch.where(counts >= FEW, limits * (variance / counts).sqrt(), torch.inf)


def surely_off(values: Tensor, identities: Sequence[str], least: Tensor | float) -> Tensor:
    """Return the mean [H] of values [N, H] where it surely is not 0 and at least so large; 0 in other heads."""
    mean, margin = mean_and_margin(values, identities)
    return mean.where((mean.abs() > margin) & (mean.abs() >= least), 0.0)
