"""δ = rowsum(dO∘O) of O of the same P̄ with Ō, ℓ and O unrounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashpoint.numerics.choices import Rounding
from flashpoint.numerics.delta_rules.rule import BackwardInputs, DeltaRule

if TYPE_CHECKING:  # every verb reads the rules, and none is to wait for PyTorch
    from torch import Tensor


def delta(inputs: BackwardInputs) -> Tensor:
    """Return δ [..., T]."""
    return (inputs.grad_out * inputs.saved_out).sum(-1)


def _residual(
    out_residual_bits: int | None,
    out: Rounding,
    out_unnormalized: Rounding,
    out_unnormalized_when: str,
    denominator: Rounding,
) -> None:
    if out_residual_bits is None:
        return
    given = f"attn.out_residual_bits={out_residual_bits}"
    if not 1 <= out_residual_bits <= 8:
        raise ValueError(f"{given}: give 1 to 8, or null for a second O in FP32")
    if not out.fits_bf16:
        raise ValueError(f"{given}: O as returned does not fit BF16; set attn.out.mode=nearest, of at most 7 bits")
    by_block = out_unnormalized.mode != "none" and out_unnormalized_when != "final"
    if by_block or denominator.mode != "none":
        raise ValueError(
            f"{given}: only Ō and O may be rounded, once each; set attn.out_unnormalized_when=final and "
            "attn.denominator.mode=none, or attn.out_residual_bits=null"
        )


RULE = DeltaRule(delta=delta, saved_out="unrounded", constraints=(_residual,), choices=("out_residual_bits",))
