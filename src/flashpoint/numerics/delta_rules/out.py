"""δ = rowsum(dO∘O) of O as returned: FlashAttention-2's."""

from __future__ import annotations

from torch import Tensor

from flashpoint.numerics.delta_rules.rule import BackwardInputs, DeltaRule


def delta(inputs: BackwardInputs) -> Tensor:
    """Return δ [..., T]."""
    return (inputs.grad_out * inputs.out).sum(-1)


RULE = DeltaRule(delta=delta)
