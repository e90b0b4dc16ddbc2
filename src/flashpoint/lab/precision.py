"""The precision of a training: what its matrix products take and return. Weights and optimiser stay FP32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["bf16", "fp16", "fp32", "tf32"]
_OF_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""Precisions that autocast has, and PyTorch's names of them."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return the context of a forward pass: autocast to BF16 or FP16, and nothing for FP32 and TF32."""
    import torch  # here, because the configuration reads this module and commands print without PyTorch

    if precision not in _OF_AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=linear_dtype(precision))


def linear_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of what a linear layer returns in a forward pass of this precision."""
    import torch

    dtype: torch.dtype = getattr(torch, _OF_AUTOCAST.get(precision, "float32"))
    return dtype


def loss_scale(precision: Precision) -> float:
    """Return the factor by which the loss is multiplied before the backward pass and its gradients divided after.

    FP16's smallest positive number is 6e-8, and gradients of the logits are smaller. A power of two rounds nothing.
    """
    return 2.0**12 if precision == "fp16" else 1.0


@contextmanager
def exact_fp32_products() -> Iterator[None]:
    """Take products of FP32 matrices in FP32, also beside a training in TF32, whose switch is the whole process's."""
    import torch

    of_training = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(of_training)
