"""Linear layers whose BF16 and FP16 products run at FP32 speed on any CPU.

Few CPUs have BF16 matrix instructions, and without them PyTorch multiplies BF16 matrices a hundred times slower than
FP32 ones. A product of two BF16 values is exact in FP32. So an FP32 product of the same operands, rounded once to BF16,
is what autocast asks for: exact products, FP32 sums, a BF16 result. The same holds for FP16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · Wᵀ + bias.

    Under autocast both operands and the result have its dtype, BF16 or FP16, and so have both gradients before they
    take the dtypes of ``x`` and ``weight``. On a CPU every such product is then :func:`rounded_matmul`, to which a bias
    is added; a GPU takes PyTorch's, where the bias is a part of the product.

    Args:
        x: [..., in_features] float32 or autocast's dtype, any strides.
        weight: [out_features, in_features] float32.
        bias: [out_features] float32.

    Returns:
        [..., out_features]; autocast's dtype under autocast, else float32.
    """
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    dtype = torch.get_autocast_dtype("cpu")
    if torch.compiler.is_compiling():
        product = rounded_matmul(x.to(dtype).reshape(-1, x.shape[-1]), weight.to(dtype).mT)
    else:
        product = _EagerLinear.apply(x.reshape(-1, x.shape[-1]), weight, dtype)
    product = product.view(*x.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias.to(dtype)


class Linear(nn.Linear):
    """``nn.Linear`` without a bias that computes :func:`linear`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


@torch.library.custom_op("flashpoint::rounded_matmul", mutates_args=())
def rounded_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b with exact products, FP32 sums and one rounding to nearest even, on a CPU; its gradients likewise.

    An op, so that ``torch.compile`` does not drop the rounding of an operand: a cast from FP32 to BF16 and back counts
    as removable there.

    Args:
        a: [M, K] bfloat16 or float16, any strides.
        b: [K, N] of the same dtype, any strides.

    Returns:
        [M, N] of that dtype, contiguous.
    """
    with torch.autocast("cpu", enabled=False):  # which would round the operands back
        return torch.mm(a.float(), b.float()).to(a.dtype)


@rounded_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    for_a, for_b = ctx.needs_input_grad
    return rounded_matmul(grad, b.mT) if for_a else None, rounded_matmul(a.mT, grad) if for_b else None


rounded_matmul.register_autograd(_backward, setup_context=_setup_context)


class _EagerLinear(torch.autograd.Function):
    """The same bits as :func:`rounded_matmul` between casts, where nothing is compiled: without an op's Python, with
    the casts in one node of the graph, and with each operand taken to FP32 once for all three products. It has no
    second derivatives: those are of ``x`` and ``weight`` themselves, which are not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = x.to(dtype).float(), weight.to(dtype).float().mT
        ctx.save_for_backward(a, b)
        ctx.dtypes = x.dtype, weight.dtype
        with torch.autocast("cpu", enabled=False):  # which would round the operands back
            return torch.mm(a, b).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        for_x, for_weight, _ = ctx.needs_input_grad
        of_x, of_weight = ctx.dtypes
        grad_fp32 = grad.float()
        with torch.autocast("cpu", enabled=False):
            return (
                torch.mm(grad_fp32, b.mT).to(grad.dtype).to(of_x) if for_x else None,
                torch.mm(a.mT, grad_fp32).to(grad.dtype).to(of_weight).mT if for_weight else None,
                None,
            )
