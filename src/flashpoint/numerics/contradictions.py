"""What a variant cannot be: values outside their range, and fields that contradict each other.

A rule is a function of the fields of :class:`~flashpoint.numerics.variant.AttentionVariant` that it names. It raises
``ValueError`` with the field and what to set.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from flashpoint.numerics.choices import DeltaError, Heads, Rounding


def check(fields: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` of the first rule that the fields of a variant break."""
    for rule, names in _RULES.items():
        rule(**{name: fields[name] for name in names})


def _selection(layers: tuple[int, ...] | None, heads: Heads | None, kernel: str, elsewhere: Any) -> None:
    selects = layers is not None or heads is not None
    if selects and elsewhere is None:
        raise ValueError(
            "attn.elsewhere is missing: name the variant of the layers and heads that "
            "attn.layers and attn.heads leave out, e.g. attn.elsewhere=flash_fp32"
        )
    if elsewhere is None:
        return
    if not selects:
        raise ValueError("attn.elsewhere needs attn.layers or attn.heads: nothing is left for it")
    if heads is not None and "sdpa" in (kernel, elsewhere.kernel):
        raise ValueError("attn.heads: kernel=sdpa computes whole layers; take flash_fp32 for single heads")
    if elsewhere.elsewhere is not None:
        raise ValueError(f"attn.elsewhere={elsewhere.name}: that variant selects layers itself")


def _shift(
    beta: float, gamma: float, tie_tolerance: float, max_shift: float | None, shift_offset: float, masked_blocks: str
) -> None:
    # Written so that NaN is refused, too.
    if not 1 <= beta < math.inf:
        raise ValueError(f"attn.beta={beta}: give a finite number; below 1 the shift falls under the row maximum")
    if not 0 <= gamma < 1:
        raise ValueError(f"attn.gamma={gamma}: give 0 or more, and less than 1, which would leave the row maximum")
    if gamma and masked_blocks == "count":
        raise ValueError("attn.gamma: a counted masked block has no finite maximum; set attn.masked_blocks=skip")
    if not 0 <= tie_tolerance < math.inf:
        raise ValueError(f"attn.tie_tolerance={tie_tolerance}: give a finite number, 0 or more")
    if max_shift is not None and not 0 <= max_shift < math.inf:
        raise ValueError(f"attn.max_shift={max_shift}: give a finite number, 0 or more, or null for no guard")
    if not -60 <= shift_offset <= 60:
        raise ValueError(f"attn.shift_offset={shift_offset}: beyond ±60 nats rows over- or underflow")


def _blocks(
    block_k: int | None, normalizer: str, denominator: Rounding, denominator_floor: float, grad_blocks: Rounding
) -> None:
    if block_k is not None and block_k < 1:
        raise ValueError(f"attn.block_k={block_k}: give at least 1, or null for no tiling")
    if not 0 <= denominator_floor < 1:
        raise ValueError(f"attn.denominator_floor={denominator_floor}: give 0 or more, and less than 1")
    if normalizer == "before_product" and block_k is not None:
        raise ValueError("attn.normalizer=before_product needs the whole row: set attn.block_k=null")
    if normalizer == "before_product" and (denominator.mode != "none" or denominator_floor):
        raise ValueError(
            "attn.normalizer=before_product divides P̄ by ℓ as summed: set attn.denominator.mode=none and "
            "attn.denominator_floor=0"
        )
    if grad_blocks.mode != "none" and block_k is None:
        raise ValueError("attn.grad_blocks: attn.block_k=null makes one block of all; set attn.block_k")


def _independent_delta(delta: str, out_unnormalized: Rounding, out: Rounding) -> None:
    if delta == "out_independent" and "stochastic" not in (out_unnormalized.mode, out.mode):
        raise ValueError(
            "attn.delta=out_independent finds no stochastic rounding of Ō or O to draw again: set "
            "attn.out_unnormalized.mode=stochastic or attn.out.mode=stochastic, or attn.delta=out"
        )


def _exact_row_sum(exact_row_sum: bool, exact_row_sum_passes: int, delta: str, center_keys: bool) -> None:
    if exact_row_sum_passes not in (1, 2):
        raise ValueError(f"attn.exact_row_sum_passes={exact_row_sum_passes}: choose one of 1, 2")
    if not exact_row_sum or exact_row_sum_passes == 2:
        return
    if delta == "p_dp":
        raise ValueError("attn.exact_row_sum_passes=1 has no pass for attn.delta=p_dp: set attn.delta=out")
    if center_keys:
        raise ValueError(
            "attn.exact_row_sum_passes=1: with attn.center_keys=true dK needs row sums of dS that only two passes "
            "make; set attn.exact_row_sum_passes=2"
        )


def _residual(
    out_residual_bits: int | None,
    delta: str,
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
    if delta != "out_fp32":
        raise ValueError(f"{given}: attn.delta={delta} takes no unrounded O; set attn.delta=out_fp32")
    if not out.fits_bf16:
        raise ValueError(f"{given}: O as returned does not fit BF16; set attn.out.mode=nearest, of at most 7 bits")
    by_block = out_unnormalized.mode != "none" and out_unnormalized_when != "final"
    if by_block or denominator.mode != "none":
        raise ValueError(
            f"{given}: only Ō and O may be rounded, once each; set attn.out_unnormalized_when=final and "
            "attn.denominator.mode=none, or attn.out_residual_bits=null"
        )


def _centred_keys(center_grad_q: bool, center_keys: bool) -> None:
    if center_grad_q and center_keys:
        raise ValueError("attn.center_grad_q=true: attn.center_keys=true centres dQ's keys already; choose one")


def _injected_error(delta_error: DeltaError, kernel: str, center_keys: bool, layers: tuple[int, ...] | None) -> None:
    if delta_error.kind == "none":
        return
    if kernel == "sdpa":
        raise ValueError("attn.delta_error: kernel=sdpa computes δ out of reach; take attn=flash_fp32")
    if delta_error.into != "both" and center_keys:
        raise ValueError(
            "attn.delta_error.into: with attn.center_keys=true dQ and dK share one row sum of dS; take "
            "attn=flash_exact_rowsum"
        )
    if delta_error.layers is not None and layers is not None and not set(delta_error.layers) <= set(layers):
        raise ValueError(
            f"attn.delta_error.layers={list(delta_error.layers)}: only attn.layers={list(layers)} take this variant"
        )


_RULES = {
    rule: tuple(inspect.signature(rule).parameters)
    for rule in (
        _selection, _shift, _blocks, _independent_delta, _exact_row_sum, _residual, _centred_keys, _injected_error
    )
}  # fmt: skip
"""Each rule with the fields that it is of."""
