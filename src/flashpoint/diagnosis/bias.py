"""The bias of δ in each head of a layer: how large, how sure, and whether errors of that size ignited runs here.

A sequence gives one value, because tokens of one sequence are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from flashpoint.diagnosis.measures import Measures

CHANCE = 0.001
"""How likely a diagnosis of one layer without a fault may call some head's δ biased."""
IGNITED = {1e-6: "2 of 4", 3e-6: "3 of 4", 1e-5: "4 of 4"}
"""Runs that exploded with a constant error of δ of this share of |dO||O| in one layer (docs/findings/injected.md)."""
_SOURCES = ("row_sum", "grad_delta", "delta")
"""Measures of δ's error, the most direct one first."""


@dataclass(frozen=True)
class DeltaBias:
    """The mean error of δ of each head [H], float64.

    Attributes:
        mean, error: Σ ε / Σ |dO||O| and its standard error over sequences; NaN with one sequence.
        nats, nats_error: Σ ε over all observed tokens, nats of the loss that dO is the gradient of.
        noise: (Σ ε² / Σ (|dO||O|)²)^½.
        sequences: that were observed.
    """

    mean: Tensor
    error: Tensor
    nats: Tensor
    nats_error: Tensor
    noise: Tensor
    sequences: int

    @classmethod
    def of(cls, measures: Measures) -> DeltaBias | None:
        """Return the bias by the most direct measure of δ's error; None where there is none."""
        name = next((name for name in _SOURCES if f"{name}_bias" in measures), None)
        if name is None:
            return None
        biases, sums = measures[f"{name}_bias"], measures[f"{name}_sum"]
        count = len(biases)
        spread, sums_spread = (x.std(0) if count > 1 else torch.full_like(x[0], torch.nan) for x in (biases, sums))
        return cls(
            mean=biases.mean(0),
            error=spread / count**0.5,
            nats=sums.sum(0),
            nats_error=sums_spread * count**0.5,
            noise=measures[f"{name}_noise"].mean(0),
            sequences=count,
        )

    @property
    def smallest(self) -> Tensor:
        """The smallest bias [H] that these sequences could have shown: Student's t, Bonferroni over heads."""
        threshold = stats.t.isf(CHANCE / len(self.mean) / 2, max(self.sequences - 1, 1))
        return self.error.clamp_min(1e-300) * float(threshold)

    @property
    def igniting(self) -> Tensor:
        """The heads [H] whose bias is sure and as large as the smallest that ignited a run."""
        return (self.mean.abs() > self.smallest) & (self.mean.abs() >= min(IGNITED))


def ignited(size: float) -> str:
    """Return what an error of a size has done: the runs with the largest one that is not larger."""
    tried = max((one for one in IGNITED if one <= abs(size)), default=min(IGNITED))
    return f"a constant error of {tried:.0e} in one layer made {IGNITED[tried]} runs explode"
