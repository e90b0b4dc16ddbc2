"""What a variant cannot be: values outside their range, and fields that contradict each other.

A constraint is a function of the fields of :class:`~flashpoint.numerics.variant.AttentionVariant` that it names. It
raises ``ValueError`` with the field and what to set. Those of one rule of δ stand with that rule.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from flashpoint.numerics.choices import DeltaError, Heads, Rounding
from flashpoint.numerics.delta_rules import RULES

CORRECTED = ("flex", "fa4")
"""Kernels of other libraries whose δ takes a gradient of L, by which it is corrected from outside."""


OF_ANY_KERNEL = frozenset((
    "name", "kernel", "shift_keys", "shift_values", "fp16_inside", "delta", "out_residual_bits", "delta_error",
    "layers", "heads", "elsewhere",
))  # fmt: skip
"""Fields that say something beside a kernel of another library, or that a constraint of their own refuses there."""


def check(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` of the first constraint that the fields of a variant break."""
    if fields["kernel"] != "flash":
        _refuse_unread(fields, defaults)
    rule = RULES[fields["delta"]]
    for constraint in (*_CONSTRAINTS, *rule.constraints):
        constraint(**{name: fields[name] for name in _fields_of(constraint)})
    for other, owner in RULES.items():
        for name in owner.choices if owner is not rule else ():
            if (value := fields[name]) is not None:
                raise ValueError(
                    f"attn.{name}={value}: attn.delta={fields['delta']} does not read it; set attn.delta={other}"
                )


def _refuse_unread(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for name in (name for name in defaults if name not in OF_ANY_KERNEL):  # in their order
        pair, part = (fields[name], defaults[name]), ""
        if isinstance(pair[0], Rounding):  # its bits are an experiment's, for whatever attention
            pair, part = (pair[0].mode, pair[1].mode), ".mode"
        if pair[0] != pair[1]:
            value, default = (json.dumps(one).strip('"') for one in pair)
            raise ValueError(
                f"attn.{name}{part}={value}: kernel={fields['kernel']} does not read it; set it to {default}, or take "
                "an attention of ours, such as attn=flash_bf16"
            )


@cache
def _fields_of(constraint: Callable[..., None]) -> tuple[str, ...]:
    return tuple(inspect.signature(constraint).parameters)


def _selection(
    layers: tuple[int, ...] | None,
    heads: Heads | None,
    kernel: str,
    elsewhere: Any,
    shift_keys: str,
    shift_values: str,
    fp16_inside: bool,
) -> None:
    stabilizes = fp16_inside or shift_keys != "none" or shift_values != "none"
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
    if heads is not None and (whole := [one for one in (kernel, elsewhere.kernel) if one != "flash"]):
        raise ValueError(f"attn.heads: kernel={whole[0]} computes whole layers; take flash_fp32 for single heads")
    if heads is not None and (stabilizes or elsewhere.stabilizes):
        raise ValueError(
            "attn.heads: attn.shift_keys, shift_values and fp16_inside are of whole layers; select with attn.layers"
        )
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


def _exact_row_sum(exact_row_sum: bool, exact_row_sum_passes: int, center_keys: bool) -> None:
    if exact_row_sum_passes not in (1, 2):
        raise ValueError(f"attn.exact_row_sum_passes={exact_row_sum_passes}: choose one of 1, 2")
    if exact_row_sum and exact_row_sum_passes == 1 and center_keys:
        raise ValueError(
            "attn.exact_row_sum_passes=1: with attn.center_keys=true dK needs row sums of dS that only two passes "
            "make; set attn.exact_row_sum_passes=2"
        )


def _centred_keys(center_grad_q: bool, center_keys: bool) -> None:
    if center_grad_q and center_keys:
        raise ValueError("attn.center_grad_q=true: attn.center_keys=true centres dQ's keys already; choose one")


def _fp16(fp16_inside: bool, kernel: str) -> None:
    if fp16_inside and kernel == "flash":
        raise ValueError("attn.fp16_inside: kernel=flash takes BF16 and FP32; take attn=sdpa_cudnn or the like")


def _outside(kernel: str, delta: str, fp16_inside: bool) -> None:
    if kernel == "flash" or delta == "out":
        return
    if kernel not in CORRECTED or delta != "out_fp32":
        raise ValueError(
            f"attn.delta={delta}: kernel={kernel} computes δ out of reach; set attn.delta=out, or "
            "take attn=flex_fixed, fa4_fixed, or one of ours"
        )
    if fp16_inside:
        raise ValueError(f"attn.fp16_inside: attn.delta={delta} takes BF16 alone; choose one of the two")


def _injected_error(delta_error: DeltaError, kernel: str, center_keys: bool, layers: tuple[int, ...] | None) -> None:
    if delta_error.kind == "none":
        return
    if kernel != "flash":
        raise ValueError(f"attn.delta_error: kernel={kernel} computes δ out of reach; take attn=flash_fp32")
    if delta_error.into != "both" and center_keys:
        raise ValueError(
            "attn.delta_error.into: with attn.center_keys=true dQ and dK share one row sum of dS; take "
            "attn=flash_exact_rowsum"
        )
    if delta_error.layers is not None and layers is not None and not set(delta_error.layers) <= set(layers):
        raise ValueError(
            f"attn.delta_error.layers={list(delta_error.layers)}: only attn.layers={list(layers)} take this variant"
        )


_CONSTRAINTS: tuple[Callable[..., None], ...] = (
    _selection,
    _shift,
    _blocks,
    _exact_row_sum,
    _centred_keys,
    _fp16,
    _outside,
    _injected_error,
)
