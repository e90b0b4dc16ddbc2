"""δ = rowsum(dO∘O) of O as returned: FlashAttention-2's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashpoint.numerics.delta_rules.rule import BackwardInputs, DeltaRule

if TYPE_CHECKING:  # every verb reads the rules, and none is to wait for PyTorch
    from torch import Tensor


def delta(inputs: BackwardInputs) -> Tensor:
    """Return δ [..., T]."""
    return (inputs.grad_out * inputs.out).sum(-1)


RULE = DeltaRule(delta=delta)
