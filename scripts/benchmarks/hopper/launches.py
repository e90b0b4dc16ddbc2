"""Launches of the candidates' kernels, as :mod:`flashpoint.numerics.launch` has those of the package."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.hopper.backward import hopper_dkdv_kernel, hopper_dq_kernel, row_deltas_kernel
from benchmarks.hopper.forward import hopper_fwd_kernel
from benchmarks.hopper.one_pass import grad_q_kernel, hopper_bwd_kernel
from benchmarks.hopper.tiles import ROWS
from flashpoint.numerics.layout import by_token
from flashpoint_kernels.tile_sizes import GROUP_BYTES

MANTISSA = 13
"""Bits of O and of its residual in ``flash_fixed``: 7 and 6."""
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_BLOCK = 128
"""Queries of a block of dQ, keys of one of dK and dV: two groups of warps with 64 each."""


def forward(q: Tensor, k: Tensor, v: Tensor, *, bq: int, stages: int, persistent: bool, **choices: bool) -> Any:
    """Return O, L and the residual of O."""
    B, H, T, d = q.shape
    out, residual = by_token(q, q.dtype), by_token(q, torch.int8)
    logsumexp = q.new_empty((B, H, T), dtype=torch.float32)
    bk, groups = 128, bq // ROWS.value
    registers = {2: 240, 3: 160}[groups]
    hopper_fwd_kernel[_grid(q, bq, persistent)](
        _descriptor(q, 64), _descriptor(k, bk), _descriptor(v, bk), _descriptor(out, 64), _descriptor(residual, 64),
        logsumexp, B, H, T, _group(T, d), BQ=bq, BK=bk, D=d, STAGES=stages, UNIT=d**-0.5, MANTISSA=MANTISSA,
        REGISTERS=registers, maxnreg={2: 168, 3: 128}[groups], **choices, **_OPTIONS,
    )  # fmt: skip
    return out, logsumexp, residual


def row_deltas(grad_out: Tensor, out: Tensor, logsumexp: Tensor, residual: Tensor) -> Tensor:
    """Return L/ln 2 and δ, [2, B·H, T'], with T' the next multiple of a block."""
    B, H, T, d = out.shape
    rows = out.new_empty((2, B * H, triton.cdiv(T, _BLOCK) * _BLOCK), dtype=torch.float32)
    row_deltas_kernel[(rows.shape[-1] // 64, B * H)](
        out, residual, grad_out, logsumexp, rows, H, T, rows.shape[-1], rows[0].numel(), *grad_out.stride()[:3],
        D=d, BQ=64, MANTISSA=MANTISSA, **_OPTIONS,
    )  # fmt: skip
    return rows


def grad_q(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, bk: int, stages: int, persistent: bool
) -> Tensor:
    """Return dQ."""
    B, H, T, d = q.shape
    found = by_token(q, q.dtype)
    hopper_dq_kernel[_grid(q, _BLOCK, persistent)](
        _descriptor(q, 64), _descriptor(k, bk), _descriptor(v, bk), _descriptor(grad_out, 64), _descriptor(found, 64),
        rows, B, H, T, _group(T, d), rows.shape[-1], rows[0].numel(),
        BK=bk, **_backward_choices(d, stages),
    )  # fmt: skip
    return found


def grad_kv(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, stages: int, persistent: bool
) -> tuple[Tensor, Tensor]:
    """Return dK and dV."""
    B, H, T, d = q.shape
    grad_k, grad_v = by_token(k, k.dtype), by_token(v, v.dtype)
    hopper_dkdv_kernel[_grid(q, _BLOCK, persistent)](
        *(_descriptor(x, 64) for x in (q, k, v, grad_out)), _of_rows(rows), _descriptor(grad_k, 64),
        _descriptor(grad_v, 64),
        B, H, T, _group(T, d), BQ=64, **_backward_choices(d, stages),
    )  # fmt: skip
    return grad_k, grad_v


def all_grads(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, stages: int, persistent: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV."""
    B, H, T, d = q.shape
    grad_q, grad_k, grad_v = (by_token(x, x.dtype) for x in (q, k, v))
    summed = q.new_zeros((B * H, T, d), dtype=torch.float32)
    turns = q.new_zeros((B * H, triton.cdiv(T, 64)), dtype=torch.int32)
    block = [1, 64, d // 2]
    of_summed = _blocks(summed, block, gl.NVMMASharedLayout.get_default_for(block, gl.float32))
    hopper_bwd_kernel[_grid(q, _BLOCK, persistent)](
        *(_descriptor(x, 64) for x in (q, k, v, grad_out)), _of_rows(rows), _descriptor(grad_k, 64),
        _descriptor(grad_v, 64), of_summed, turns, B, H, T,
        **_backward_choices(d, stages),
    )  # fmt: skip
    grad_q_kernel[(triton.cdiv(T, 64), B * H)](summed, grad_q, H, T, D=d, BQ=64, ALPHA=d**-0.5, **_OPTIONS)
    return grad_q, grad_k, grad_v


def _of_rows(rows: Tensor) -> TensorDescriptor:
    return _blocks(rows, [1, 1, 64], gl.NVMMASharedLayout(0, 32, rank=3))


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [1, 1, rows, x.shape[-1]]
    of = gl.int8 if x.dtype == torch.int8 else gl.bfloat16
    return _blocks(x, block, gl.NVMMASharedLayout.get_default_for(block, of))


def _blocks(x: Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _backward_choices(d: int, stages: int) -> dict[str, Any]:
    """Return what all backward kernels are compiled with."""
    return {"D": d, "STAGES": stages, "UNIT": d**-0.5, "ALPHA": d**-0.5, "maxnreg": 168, **_OPTIONS}


def _grid(q: Tensor, block: int, persistent: bool) -> tuple[int]:
    B, H, T, _ = q.shape
    blocks = triton.cdiv(T, block) * B * H
    if not persistent:
        return (blocks,)
    # A number for tensors that only compile.
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    return (min(blocks, programs),)


def _group(T: int, d: int) -> int:
    """Return how many heads go side by side, as in ``launch``."""
    return max(1, GROUP_BYTES // (4 * T * d))
