"""The token embedding, with a gradient whose bits do not change from run to run.

PyTorch's deterministic gradient of an embedding costs a sixth of a small model's step on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def token_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of ``weight`` [V, C] for ``tokens`` [B, T] int64: [B, T, C]. V ≤ 2³¹.

    Under ``torch.use_deterministic_algorithms`` a GPU sums the gradient in the order of positions.
    """
    if weight.is_cuda and torch.are_deterministic_algorithms_enabled():
        result: Tensor = _OrderedEmbedding.apply(tokens, weight)
        return result
    return F.embedding(tokens, weight)  # on a CPU its gradient is ordered


class _OrderedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.size = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, embedding_grad(grad, tokens, ctx.size)


@torch.library.custom_op("flashpoint::embedding_grad", mutates_args=())
def embedding_grad(grad: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Return Σ of the rows of ``grad`` [B, T, C] float32 over the positions of each token: [size, C] float32."""
    import triton  # a CPU need not wait for it

    from flashpoint_kernels.embedding import embedding_grad_kernel

    C = grad.shape[-1]
    ordered, positions = tokens.flatten().to(torch.int32).sort(stable=True)
    boundaries = torch.arange(size + 1, dtype=torch.int32, device=tokens.device)
    starts = torch.searchsorted(ordered, boundaries, out_int32=True)
    out = grad.new_empty(size, C)
    bc = min(128, triton.next_power_of_2(C))
    embedding_grad_kernel[(size, triton.cdiv(C, bc))](
        grad.contiguous(), positions, starts, out, C, BN=64, BC=bc, num_warps=4
    )
    return out


@embedding_grad.register_fake
def _(grad: Tensor, tokens: Tensor, size: int) -> Tensor:
    return grad.new_empty(size, grad.shape[-1])
