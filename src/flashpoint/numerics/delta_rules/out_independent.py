"""δ = rowsum(dO∘O′): O′ is O of the same P̄ with random bits of its own in every stochastic rounding of Ō and O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashpoint.numerics.choices import Rounding
from flashpoint.numerics.delta_rules.rule import BackwardInputs, DeltaRule

if TYPE_CHECKING:  # every verb reads the rules, and none is to wait for PyTorch
    from torch import Tensor


def delta(inputs: BackwardInputs) -> Tensor:
    """Return δ [..., T]."""
    return (inputs.grad_out * inputs.saved_out).sum(-1)


def _something_to_draw(out_unnormalized: Rounding, out: Rounding) -> None:
    if "stochastic" not in (out_unnormalized.mode, out.mode):
        raise ValueError(
            "attn.delta=out_independent finds no stochastic rounding of Ō or O to draw again: set "
            "attn.out_unnormalized.mode=stochastic or attn.out.mode=stochastic, or attn.delta=out"
        )


RULE = DeltaRule(delta=delta, saved_out="redrawn", constraints=(_something_to_draw,))
