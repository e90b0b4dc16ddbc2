"""What a kernel is compiled for: a variant's choices as one constant, and the launch options of its tile sizes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from flashpoint.numerics.choices import Rounding
from flashpoint.numerics.variant import AttentionVariant, Groups
from flashpoint_kernels.choices import Choices, Point
from flashpoint_kernels.codes import Stream
from flashpoint_kernels.tile_sizes import WARP_GROUPS, TileSizes

_NO_GUARD = 3.0e38
_NO_TILING = 1 << 30
_OF_WARP_GROUPS = AttentionVariant(delta="out_fp32", out_residual_bits=6)
"""``flash_fixed``. Keys are taken 128 at a time, from the last on, not 64 from the first: that moves only the running
maximum under which P̄ is rounded."""


@lru_cache(maxsize=256)
def compile_time_choices(
    variant: AttentionVariant, layer: int, scale: float, causal: bool = True, tiles_per_block: int = 1
) -> Choices:
    """Return the choices that ``variant`` makes in a layer; its selection of layers and heads does not count.

    Args:
        scale: α.
        causal: whether a query sees no later key.
        tiles_per_block: of a block of keys of the online softmax; the forward kernel alone asks.
    """
    exact = math.frexp(scale)[0] == 0.5  # a power of two scales without rounding
    unit = scale if exact else 1.0
    error = variant.delta_error
    error_sizes = error.sizes_in(layer)
    errs = any(error_sizes)
    residual = variant.out_residual
    return Choices(
        scores=_point(variant.scores, Stream.SCORES),
        probs=_point(variant.probs, Stream.PROBS),
        probs_backward=_point(variant.probs, Stream.PROBS_BACKWARD),
        out_unnormalized=_point(variant.out_unnormalized, Stream.OUT_UNNORMALIZED),
        out=_point(variant.out, Stream.OUT),
        out_unnormalized_for_delta=_point(variant.out_unnormalized, Stream.OUT_UNNORMALIZED_FOR_DELTA),
        out_for_delta=_point(variant.out, Stream.OUT_FOR_DELTA),
        grad_probs=_point(variant.grad_probs, Stream.GRAD_PROBS),
        grad_scores=_point(variant.grad_scores, Stream.GRAD_SCORES),
        denominator=_point(variant.denominator, Stream.DENOMINATOR),
        grad_blocks=_point(variant.grad_blocks, Stream.GRAD_BLOCKS),
        grad_k_blocks=_point(variant.grad_blocks, Stream.GRAD_K_BLOCKS),
        grad_v_blocks=_point(variant.grad_blocks, Stream.GRAD_V_BLOCKS),
        out_unnormalized_when=variant.out_unnormalized_when,
        out_divisor=variant.out_divisor,
        shift=variant.shift,
        shift_offset=variant.shift_offset / unit,
        beta=variant.beta,
        gamma=variant.gamma,
        tie_tolerance=variant.tie_tolerance / unit,
        max_shift=_NO_GUARD if variant.max_shift is None else variant.max_shift / unit,
        denominator_floor=variant.denominator_floor,
        counts_masked=variant.masked_blocks == "count" and causal,
        normalizer=variant.normalizer,
        delta=variant.delta,
        saved_out=variant.saved_out,
        delta_error=error.kind if errs else "none",
        delta_error_size=error_sizes[0] if len(error_sizes) == 1 else 0.0,
        delta_error_sizes=len(error_sizes) if errs and len(error_sizes) > 1 else 0,
        delta_error_interval=error.interval if errs and len(error_sizes) > 1 else 0,
        delta_error_into=error.into if errs else "both",
        delta_error_stream=Stream.DELTA_ERROR,
        out_mantissa=residual.mantissa if residual else 0,
        exact_row_sum=variant.exact_row_sum,
        exact_row_sum_passes=variant.exact_row_sum_passes,
        center_keys=variant.center_keys,
        center_grad_q=variant.center_grad_q,
        block_k=variant.block_k or _NO_TILING,
        tiles_per_block=tiles_per_block,
        prescale=1.0 if exact else scale,
        unit=unit,
        causal=causal,
    )


def runs_warp_groups(
    groups: Groups, layer: int, head_size: int, chip: str | None, causal: bool = True, scale: float | None = None
) -> bool:
    """Whether the kernels of :mod:`flashpoint_kernels.hopper` compute a layer: on Hopper, and with 128 features causal
    attention of all heads with the choices of ``flash_fixed``, whatever its name. All else has the general kernels.

    Args:
        layer: from 1.
        scale: α; None is 1/√d.
    """
    scale = head_size**-0.5 if scale is None else scale
    # Their shift is the largest QKᵀ times α.
    if chip != "sm_90" or head_size not in WARP_GROUPS or len(groups) > 1 or not scale > 0:
        return False
    ((variant, _),) = groups
    of_groups = compile_time_choices(_OF_WARP_GROUPS, layer, scale)
    return variant.kernel == "flash" and compile_time_choices(variant, layer, scale, causal) == of_groups


def launch_options(sizes: TileSizes, in_one_pass: bool = False) -> dict[str, Any]:
    """Return Triton's options. Triton may not fuse a product and a sum by itself; kernels write out where they do.

    Args:
        in_one_pass: whether a kernel sums PK beside dQ. It needs more registers than the cap leaves: 168 a thread with
            64 features, and memory would take the rest.
    """
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": False}
    if sizes.registers is None or in_one_pass:
        return options
    return {**options, "maxnreg": sizes.registers}  # NVIDIA's alone


def _point(rounding: Rounding, stream: Stream) -> Point:
    return Point(rounding.mode, rounding.bits, stream)
