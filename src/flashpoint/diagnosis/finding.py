"""What a diagnosis finds, and what accounts for an error without a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.measures import Measures

FP32_COARSE = 2**-9
"""Error of weights by FP32 beyond which the rounding of P̄, O or ℓ to BF16 cannot be told from it: half an ulp at 1."""
DEAD_ROWS = 0.001
"""Share of rows that are switched off. Nothing else makes |O| half as long."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in some heads of a layer.

    Attributes:
        kind: as docs/watching.md lists them.
        layer: from 1.
        heads: from 1.
        text: what is wrong and the figures that show it, one sentence.
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    text: str


Make = Callable[[str, Tensor, str], Finding]
"""Makes a finding of a kind, the heads [H] that have it, and a text."""


def maker(layer: int) -> Make:
    """Return what makes the findings of a layer."""

    def finding(kind: str, heads: Tensor, text: str) -> Finding:
        return Finding(kind, layer, tuple((heads.nonzero().flatten() + 1).tolist()), text)

    return finding


def fp32_error(of: Measures) -> Tensor:
    """Return the relative error [H] of P = exp(S − L) that S of either pass and L have from FP32, at its largest.

    A sum of FP32 errs by one number in each pass; L is rounded by half of one.
    """
    return torch.expm1(2.5 * of[table.SCORE_SPACING.name].amax(0))


def as_rounded(of: Measures) -> Tensor:
    """Return the heads [H] whose O errs by no more than twice what rounding S, P̄ and Ō makes."""
    return of[table.OUT_ERROR.name].square().mean(0) < 4 * of[table.OUT_ERROR_COARSE.name].square().mean(0)


def explained(of: Measures) -> Tensor:
    """Return the heads [H] whose errors follow from rounded scores, or from rows that are switched off."""
    coarse = of[table.OUT_ERROR.name].square().mean(0) > 2 * of[table.OUT_ERROR_EXPECTED.name].square().mean(0)
    return (coarse & as_rounded(of)) | (of[table.DEAD_ROWS.name].mean(0) > DEAD_ROWS)
