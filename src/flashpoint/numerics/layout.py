"""How the attention's tensors lie in memory, and whether anyone traces what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


class Form(NamedTuple):
    """What the kernels tell apart of tensors, but for how they lie in memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Function = TypeVar("Function", bound=Callable[..., Any])
form_of: Callable[[Tensor], tuple[torch.Size, torch.dtype, torch.device]] = attrgetter(*Form._fields)
Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What a forward pass leaves to its backward pass: O, L, what δ takes beside O, and centred keys, if some are."""


def by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor [B, H, T, d] that lies in memory as [B, T, H, d], as the model reads it next."""
    return x.new_empty_strided(x.shape, strides_by_token(x.shape), dtype=dtype)


def strides_by_token(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor [B, H, T, d] that lies in memory as [B, T, H, d]."""
    _, H, T, d = shape
    return T * H * d, d, H * d, 1


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps."""
    return torch.empty(shape, device="meta").stride()


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return what makes uninitialised tensors of a shape, strides and a dtype on the current device of a type.

    Where nobody traces it, what compiled graphs allocate by takes the host half as long as ``torch.empty_strided``.
    """
    of_graphs = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    return of_graphs or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


# Releases of PyTorch without it always take what can be traced.
_compiler_of_frames = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: "unknown")


def is_eager(*tensors: Tensor) -> bool:
    """Whether PyTorch only computes: tensors of a CPU or GPU, no compiler, which would also compile what it is
    not called for, no mode that sees operations, and no CUDA graph that is captured."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # a loop: in every call the host waits for it
        if type(x) is not Tensor or not (x.is_cuda or x.is_cpu):
            return False
    if torch._C._len_torch_dispatch_stack() or _compiler_of_frames() is not None:
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def constant_where_traced(function: Function) -> Function:
    """Have compilers call a function once and take what it returns for a constant.

    ``torch.compiler.assume_constant_result`` does no more, and imports the compiler, as long as PyTorch's own import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
