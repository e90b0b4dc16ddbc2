"""How the attention's tensors lie in memory, and whether anyone traces what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor


def by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor [B, H, T, d] that lies in memory as [B, T, H, d], as the model reads it next."""
    B, H, T, d = x.shape
    return x.new_empty_strided((B, H, T, d), (T * H * d, d, H * d, 1), dtype=dtype)


# Releases of PyTorch without it always take what can be traced.
_compiler_of_frames = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: "unknown")


def is_eager(*tensors: Tensor) -> bool:
    """Whether PyTorch only computes: tensors of a CPU or GPU, no compiler, which would also compile what it is
    not called for, no mode that sees operations, and no CUDA graph that is captured."""
    if torch.compiler.is_compiling():
        return False
    plain = all(type(x) is Tensor and (x.is_cuda or x.is_cpu) for x in tensors)
    if not plain or torch._C._len_torch_dispatch_stack() or _compiler_of_frames() is not None:
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())
