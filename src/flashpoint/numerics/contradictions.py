"""What a variant cannot be: values outside their range, fields that contradict each other, layers of no model."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant


def check(variant: AttentionVariant) -> None:
    """Raise ``ValueError``, naming the field and what to set, if a variant is none."""
    _check_selection(variant)
    _check_ranges(variant)
    _check_blocks(variant)
    _check_delta(variant)
    _check_delta_error(variant)


def check_in_model(variant: AttentionVariant, n_layer: int, n_head: int) -> None:
    """Refuse layers and heads that the model does not have.

    Raises:
        ValueError: naming the field, the number and the range.
    """
    heads = itertools.chain.from_iterable([some] if isinstance(some, int) else some for some in variant.heads or ())
    for name, chosen, count in (("layers", variant.layers or (), n_layer), ("heads", heads, n_head)):
        beyond = sorted({number for number in chosen if number > count})
        if beyond:
            raise ValueError(f"attn.{name}={beyond}: the model has {name} 1 to {count}")
    for error in (one.delta_error for one in (variant, variant.elsewhere) if one is not None):
        beyond = [number for number in error.layers or () if number > n_layer]
        if beyond:
            raise ValueError(f"attn.delta_error.layers={beyond}: the model has layers 1 to {n_layer}")
        if error.trajectory is not None and len(error.trajectory) != n_layer:
            given = len(error.trajectory)
            raise ValueError(f"attn.delta_error.trajectory: factors for {given} layers, the model has {n_layer}")


def _check_selection(variant: AttentionVariant) -> None:
    selects = variant.layers is not None or variant.heads is not None
    if selects and variant.elsewhere is None:
        raise ValueError(
            "attn.elsewhere is missing: name the variant of the layers and heads that "
            "attn.layers and attn.heads leave out, e.g. attn.elsewhere=flash_fp32"
        )
    if variant.elsewhere is None:
        return
    if not selects:
        raise ValueError("attn.elsewhere needs attn.layers or attn.heads: nothing is left for it")
    if variant.heads is not None and "sdpa" in (variant.kernel, variant.elsewhere.kernel):
        raise ValueError("attn.heads: kernel=sdpa computes whole layers; take flash_fp32 for single heads")
    if variant.elsewhere.elsewhere is not None:
        raise ValueError(f"attn.elsewhere={variant.elsewhere.name}: that variant selects layers itself")


def _check_ranges(variant: AttentionVariant) -> None:
    if variant.block_k is not None and variant.block_k < 1:
        raise ValueError(f"attn.block_k={variant.block_k}: give at least 1, or null for no tiling")
    # Written so that NaN is refused, too.
    if not 1 <= variant.beta < math.inf:
        raise ValueError(
            f"attn.beta={variant.beta}: give a finite number; below 1 the shift falls under the row maximum"
        )
    if not 0 <= variant.tie_tolerance < math.inf:
        raise ValueError(f"attn.tie_tolerance={variant.tie_tolerance}: give a finite number, 0 or more")
    if variant.max_shift is not None and not 0 <= variant.max_shift < math.inf:
        raise ValueError(f"attn.max_shift={variant.max_shift}: give a finite number, 0 or more, or null for no guard")
    if not -60 <= variant.shift_offset <= 60:
        raise ValueError(f"attn.shift_offset={variant.shift_offset}: beyond ±60 nats rows over- or underflow")
    if variant.delta == "out_independent" and "stochastic" not in (variant.out_unnormalized.mode, variant.out.mode):
        raise ValueError(
            "attn.delta=out_independent finds no stochastic rounding of Ō or O to draw again: set "
            "attn.out_unnormalized.mode=stochastic or attn.out.mode=stochastic, or attn.delta=out"
        )
    if variant.center_grad_q and variant.center_keys:
        raise ValueError("attn.center_grad_q=true: attn.center_keys=true centres dQ's keys already; choose one")
    if not 0 <= variant.denominator_floor < 1:
        raise ValueError(f"attn.denominator_floor={variant.denominator_floor}: give 0 or more, and less than 1")


def _check_blocks(variant: AttentionVariant) -> None:
    if variant.normalizer == "before_product" and variant.block_k is not None:
        raise ValueError("attn.normalizer=before_product needs the whole row: set attn.block_k=null")
    if variant.normalizer == "before_product" and (variant.denominator.mode != "none" or variant.denominator_floor):
        raise ValueError(
            "attn.normalizer=before_product divides P̄ by ℓ as summed: set attn.denominator.mode=none and "
            "attn.denominator_floor=0"
        )
    if variant.grad_blocks.mode != "none" and variant.block_k is None:
        raise ValueError("attn.grad_blocks: attn.block_k=null makes one block of all; set attn.block_k")


def _check_delta(variant: AttentionVariant) -> None:
    if variant.exact_row_sum_passes not in (1, 2):
        raise ValueError(f"attn.exact_row_sum_passes={variant.exact_row_sum_passes}: choose one of 1, 2")
    if variant.corrects_in_one_pass:
        if variant.delta == "p_dp":
            raise ValueError("attn.exact_row_sum_passes=1 has no pass for attn.delta=p_dp: set attn.delta=out")
        if variant.center_keys:
            raise ValueError(
                "attn.exact_row_sum_passes=1: with attn.center_keys=true dK needs row sums of dS that only two passes "
                "make; set attn.exact_row_sum_passes=2"
            )
    if variant.out_residual_bits is not None:
        _check_residual(variant, f"attn.out_residual_bits={variant.out_residual_bits}")


def _check_residual(variant: AttentionVariant, given: str) -> None:
    if not 1 <= int(variant.out_residual_bits or 0) <= 8:
        raise ValueError(f"{given}: give 1 to 8, or null for a second O in FP32")
    if variant.delta != "out_fp32":
        raise ValueError(f"{given}: attn.delta={variant.delta} takes no unrounded O; set attn.delta=out_fp32")
    if not variant.out.fits_bf16:
        raise ValueError(f"{given}: O as returned does not fit BF16; set attn.out.mode=nearest, of at most 7 bits")
    by_block = variant.out_unnormalized.mode != "none" and variant.out_unnormalized_when != "final"
    if by_block or variant.denominator.mode != "none":
        raise ValueError(
            f"{given}: only Ō and O may be rounded, once each; set attn.out_unnormalized_when=final and "
            "attn.denominator.mode=none, or attn.out_residual_bits=null"
        )


def _check_delta_error(variant: AttentionVariant) -> None:
    if variant.delta_error.kind == "none":
        return
    if variant.kernel == "sdpa":
        raise ValueError("attn.delta_error: kernel=sdpa computes δ out of reach; take attn=flash_fp32")
    if variant.delta_error.into != "both" and variant.center_keys:
        raise ValueError(
            "attn.delta_error.into: with attn.center_keys=true dQ and dK share one row sum of dS; take "
            "attn=flash_exact_rowsum"
        )
    injected = variant.delta_error.layers
    if injected is not None and variant.layers is not None and not set(injected) <= set(variant.layers):
        raise ValueError(
            f"attn.delta_error.layers={list(injected)}: only attn.layers={list(variant.layers)} take this variant"
        )
