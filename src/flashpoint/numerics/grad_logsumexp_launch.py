"""Launches the kernel of the gradient of L that corrects δ."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from flashpoint.numerics.fp16_launch import on_device_of
from flashpoint.numerics.kept_launch import KeptLaunch
from flashpoint_kernels.grad_logsumexp import grad_logsumexp_kernel

_TILE = 4096
"""Elements of a program."""
_ALIGNED = 8
"""Elements that strides count at once where they can: Triton then reads 16 bytes of BF16 at a time."""


def grad_logsumexp(grad_out: Tensor, out: Tensor, saved: Tensor, mantissa: int) -> Tensor:
    """Return dL = rowsum(dO∘(O − Ô)) [B, H, T] float32.

    Args:
        grad_out: dO [B, H, T, d] bfloat16, d a power of two, of any strides.
        out: O likewise, which lies in memory as [B, T, H, d].
        saved: Ô float32, or where ``mantissa`` is not 0 the residual of O; it lies as O does.
        mantissa: mantissa bits of O and its residual together.
    """
    B, H, T, d = out.shape
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    strides = grad_out.stride()[:3]
    step = 1 if any(stride % _ALIGNED for stride in strides) else _ALIGNED
    grads = out.new_empty((B, H, T), dtype=torch.float32)
    blocks = triton.cdiv(T, _TILE // d)
    numbers = H, T, blocks, *(stride // step for stride in strides)
    large = numbers if max(numbers) >= 2**31 else ()  # which of them take 64 bits follows from all
    with on_device_of(out):
        _kept(B * H * blocks, d, step, mantissa, out.get_device(), large)((), (grad_out, out, saved, grads), *numbers)
    return grads


@lru_cache(maxsize=256)
def _kept(programs: int, d: int, step: int, mantissa: int, _device: int, _large: tuple[int, ...]) -> KeptLaunch:
    choices = {"D": d, "BQ": _TILE // d, "STEP": step, "MANTISSA": mantissa, "num_warps": 4, "enable_fp_fusion": False}
    return KeptLaunch(grad_logsumexp_kernel, programs, (), choices)
