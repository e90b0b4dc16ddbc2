"""δ = rowsum(P∘dP), which exact arithmetic cannot tell from rowsum(dO∘O)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashpoint.numerics.delta_rules.rule import BackwardInputs, DeltaRule

if TYPE_CHECKING:  # every verb reads the rules, and none is to wait for PyTorch
    from torch import Tensor


def delta(inputs: BackwardInputs) -> Tensor:
    """Return δ [..., T]."""
    return inputs.row_sums()[0]


def _a_pass_of_its_own(exact_row_sum: bool, exact_row_sum_passes: int) -> None:
    if exact_row_sum and exact_row_sum_passes == 1:
        raise ValueError("attn.exact_row_sum_passes=1 has no pass for attn.delta=p_dp: set attn.delta=out")


RULE = DeltaRule(delta=delta, constraints=(_a_pass_of_its_own,))
