"""Launches of the kernels for Hopper, in which groups of warps have roles (:mod:`flashpoint_kernels.hopper`).

:func:`flashpoint.numerics.compile_time.runs_warp_groups` decides when :mod:`flashpoint.numerics.launch` takes them.
Shapes are the launcher's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashpoint.numerics.compile_time import launch_options
from flashpoint.numerics.kept_launch import KeptLaunch
from flashpoint.numerics.layout import by_token
from flashpoint_kernels.choices import Choices
from flashpoint_kernels.hopper.backward import hopper_dkdv_kernel, hopper_dq_kernel, row_deltas_kernel
from flashpoint_kernels.hopper.forward import hopper_fwd_kernel
from flashpoint_kernels.hopper.tiles import GROUPS, ROWS
from flashpoint_kernels.tile_sizes import WARP_GROUPS, TileSizes

_ROWS = int(ROWS.value)
_BLOCK = _ROWS * int(GROUPS.value)
"""Queries of a block of O and dQ, keys of one of dK and dV."""


class WarpGroups:
    """The passes of one layer on tensors [B, H, T, d] bfloat16 of one shape, which results have, too.

    Args:
        shape: [B, H, T, d].
        choices: of all heads.
        side_by_side: heads whose K and V stay in L2 together.
    """

    def __init__(self, shape: torch.Size, device: torch.device, choices: Choices, side_by_side: int) -> None:
        B, H, T, d = shape
        blocks = triton.cdiv(T, _BLOCK)
        self._numbers = B, H, T, side_by_side
        self._rows_shape = 2, B * H, blocks * _BLOCK
        self._of_rows = H, T, blocks * _BLOCK, B * H * blocks * _BLOCK
        programs = min(blocks * B * H, _multiprocessors(device))  # each takes several blocks in turn
        tiles = WARP_GROUPS[d]

        def launches(kernel: Any, sizes: TileSizes, blocks: list[list[int]], **more: Any) -> KeptLaunch:
            of_all = {"D": d, "STAGES": sizes.stages, "UNIT": choices.prescale * choices.unit, **launch_options(sizes)}
            return KeptLaunch(kernel, programs, blocks, {**of_all, **more}, _described)

        group, row = [1, 1, _ROWS, d], [1, 1, _ROWS]
        bk, bk_of_q, bq_of_kv = tiles.forward.bk, tiles.grad_q.bk, tiles.grad_kv.bq
        keys, keys_of_q = [1, 1, bk, d], [1, 1, bk_of_q, d]
        self._forward = launches(
            hopper_fwd_kernel, tiles.forward, [group, keys, keys, group, group], BK=bk, MANTISSA=choices.out_mantissa
        )
        self._row_deltas = KeptLaunch(
            row_deltas_kernel, blocks * B * H * (_BLOCK // _ROWS), [group],
            {"D": d, "BQ": _ROWS, "MANTISSA": choices.out_mantissa, "num_warps": 4, "enable_fp_fusion": False},
        )  # fmt: skip
        self._grad_q = launches(hopper_dq_kernel, tiles.grad_q, [group, keys_of_q, keys_of_q, group, group], BK=bk_of_q)
        self._grad_kv = launches(
            hopper_dkdv_kernel, tiles.grad_kv, [group, group, group, group, row, group, group], BQ=bq_of_kv
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return O, L and the residual of O, as :func:`flashpoint.numerics.launch.flash_fwd` does."""
        out, residual = by_token(q, q.dtype), by_token(q, torch.int8)
        logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        self._forward((q, k, v, out, residual), (logsumexp,), *self._numbers)
        return out, logsumexp, residual

    def row_deltas(self, grad_out: Tensor, out: Tensor, logsumexp: Tensor, residual: Tensor) -> Tensor:
        """Return L/ln 2 and δ, [2, B·H, T'] float32, with T' the next multiple of a block; O as ``forward`` left it."""
        rows = out.new_empty(self._rows_shape, dtype=torch.float32)
        self._row_deltas((grad_out,), (out, residual, logsumexp, rows), *self._of_rows)
        return rows

    def grad_q(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Return dQ; ``rows`` are those of ``row_deltas``."""
        grad_q = by_token(q, q.dtype)
        self._grad_q((q, k, v, grad_out, grad_q), (rows,), *self._numbers, *self._of_rows[2:])
        return grad_q

    def grad_kv(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return dK and dV; ``rows`` are those of ``row_deltas``."""
        grad_k, grad_v = by_token(k, k.dtype), by_token(v, v.dtype)
        self._grad_kv((q, k, v, grad_out, rows, grad_k, grad_v), (), *self._numbers)
        return grad_k, grad_v


def _multiprocessors(device: torch.device) -> int:
    """Return how many programs run at once; what only compiles names no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _described(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    if x.dtype == torch.float32:
        layout = gl.NVMMASharedLayout(0, 32, rank=len(block))
    else:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.int8 if x.dtype == torch.int8 else gl.bfloat16)
    return TensorDescriptor(x, shape, strides, block, layout)
